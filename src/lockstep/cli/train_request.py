"""From the words after ``lockstep train`` to one config: flags over overlay files over a recipe or a run's config."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.cli.arguments import (
    Arguments,
    Takes,
    nested,
    number,
    parse,
    path_of,
    switched_on,
    takes_of,
    value_of,
)
from lockstep.cli.usage import TRAIN_HABITS, unexpected_word, unknown_flag
from lockstep.core.config import check_names, combine, groups, load_overlay, merge, settings
from lockstep.core.errors import UsageError
from lockstep.core.registry import load
from lockstep.distributed import topology
from lockstep.learn.config import TrainConfig
from lockstep.recipes.catalog import TASKS, check_offered

# The command's own flags; all others are settings of TrainConfig.
_OWN_FLAGS = {
    "config": Takes.ONE,
    "checkpoint": Takes.ONE,
    "resume": Takes.OPTIONAL,
    "total_envs": Takes.ONE,
    "distributed": Takes.SWITCH,
}
_REPEATABLE = ("config",)
_INFORMATIONAL = ("world_size",)  # a run's config.yaml has it for people to read; it is no setting


@dataclass(frozen=True)
class Request:
    """What a command line asks for: ``checkpoint`` is where weights come from, ``resume`` the run to go on with."""

    config: TrainConfig
    checkpoint: Path | None
    resume: Path | None


def read(argv: Sequence[str]) -> Request:
    """Return what a command line asks for: flags over overlay files over the run's config or the task's recipe.

    Raises:
        UsageError: whatever is wrong, in one line.
    """
    # The task decides which settings there are, so the first look takes any flag with a dot for a setting of its.
    first_look = parse(argv, _lookup(TrainConfig(task=""), any_dotted=True), _REPEATABLE, TASKS)
    overlays = [(path, _overlay(path)) for path in first_look.flags.get("config", [])]
    overlay: dict[str, Any] = {}
    for _, values in overlays:
        overlay = combine(overlay, values)
    task = _task(first_look, overlay)
    resume = _run_to_resume(first_look, overlay, task)
    base = _config_of_run(resume, task) if resume else {}
    config = _recipe(base["task"] if resume else task)

    arguments = parse(argv, _lookup(config), _REPEATABLE, TASKS)
    _task(arguments, overlay)  # words that the first look gave to a flag may be left over now
    for path, values in overlays:
        _check_overlay(path, values, config)
    flags = {**_settings_in(arguments, config), "task": config.task}
    config = merge(config, combine(combine(base, overlay), flags))
    check_offered(config)
    _check_distributed(arguments)
    return Request(config, path_of(arguments, "checkpoint"), resume)


def _lookup(config: TrainConfig, any_dotted: bool = False) -> Callable[[str], Takes]:
    flags = {**_OWN_FLAGS, **{name: takes_of(setting) for name, setting in settings(config).items()}}

    def lookup(name: str) -> Takes:
        if name in flags:
            return flags[name]
        if any_dotted and "." in name:
            return Takes.UNKNOWN
        raise unknown_flag(name, flags, TRAIN_HABITS, groups(config))

    return lookup


def _overlay(path: str) -> dict[str, Any]:
    return {name: value for name, value in load_overlay(path).items() if name not in _INFORMATIONAL}


def _check_overlay(path: str, values: Mapping[str, Any], config: TrainConfig) -> None:
    try:
        check_names(config, values)
    except UsageError as error:
        raise UsageError(f"config file {path!r}: {error}") from None


def _task(arguments: Arguments, overlay: Mapping[str, Any]) -> str | None:
    for index, word in enumerate(arguments.positionals):
        if index > 0 or "=" in word:
            raise unexpected_word(word)
    positional, flag = next(iter(arguments.positionals), None), arguments.last("task")
    if positional is not None and flag is not None and positional != flag:
        if positional not in TASKS:
            raise unexpected_word(positional)
        raise UsageError(f"two tasks are given, '{positional}' and --task {flag!r}; keep one")
    task = next((name for name in (positional, flag, overlay.get("task")) if name is not None), None)
    return None if task is None else TASKS.get(str(task)).name


def _recipe(task: str | None) -> TrainConfig:
    if task is None:
        raise UsageError(f"no task is given; write lockstep train TASK, one of {', '.join(TASKS)}")
    config: TrainConfig = load(TASKS.get(task).recipe)()
    return config


def _run_to_resume(arguments: Arguments, overlay: Mapping[str, Any], task: str | None) -> Path | None:
    if "resume" not in arguments.flags:
        return None
    if "checkpoint" in arguments.flags:
        raise UsageError("--resume continues a run, --checkpoint starts a new one from weights; keep one of the two")
    if run_directory := path_of(arguments, "resume"):
        return run_directory
    from lockstep.core.run_directory import newest_run

    recipe = _recipe(task)
    given = (arguments.last("log_root"), overlay.get("log_root"))
    log_root = next((root for root in given if root is not None), recipe.log_root)
    return newest_run(str(log_root), recipe.task)


def _config_of_run(run_directory: Path, task: str | None) -> dict[str, Any]:
    from lockstep.core.run_directory import check_run_directory

    path = check_run_directory(run_directory) / "config.yaml"
    values = _overlay(str(path))
    if "task" not in values:
        raise UsageError(f"{path} names no task, so it is not the config of a run; resume another run")
    values["task"] = str(values["task"])
    if task is not None and task != values["task"]:
        raise UsageError(f"{run_directory} is a run of task {values['task']!r}, not of {task!r}; resume another run")
    return values


def _settings_in(arguments: Arguments, config: TrainConfig) -> dict[str, Any]:
    """Return the settings among the flags, nested for ``merge``."""
    known = settings(config)
    values = {name: value_of(known[name], words) for name, words in arguments.flags.items() if name in known}
    if "total_envs" in arguments.flags:
        total_envs = number("total_envs", arguments.flags["total_envs"], minimum=1)
        num_envs = number("num_envs", arguments.flags.get("num_envs", [str(total_envs)]), minimum=1)
        if num_envs != total_envs:
            raise UsageError(
                f"one process has --total_envs {total_envs} = --num_envs {num_envs} envs; keep one of them"
            )
        values["num_envs"] = total_envs
    return nested(values)


def _check_distributed(arguments: Arguments) -> None:
    if switched_on(arguments, "distributed") and topology.from_environment().world_size == 1:
        raise UsageError("--distributed needs WORLD_SIZE > 1, which torchrun sets; for one process, leave it out")
