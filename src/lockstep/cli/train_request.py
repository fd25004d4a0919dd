"""From the words after ``lockstep train`` to one config: flags over overlay files over a recipe or a run's config."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.cli.arguments import (
    Arguments,
    Takes,
    is_inside_mapping,
    is_mapping,
    nested,
    number,
    parse,
    path_of,
    switched_on,
    takes_of,
    value_of,
)
from lockstep.cli.usage import TRAIN_HABITS, unexpected_word, unknown_flag
from lockstep.core.config import check_names, combine, groups, load_overlay, merge, parse_value, settings, show
from lockstep.core.errors import UsageError
from lockstep.distributed import topology
from lockstep.learn.config import TrainConfig, deal, envs_of_run, ranks_of_run
from lockstep.recipes.catalog import (
    DEFAULT_ALGORITHM,
    TASKS,
    check_distributed,
    check_offered,
    check_processes,
    recipe_of,
)
from lockstep.recipes.libraries import OWN
from lockstep.session.attempts import Resume, run_of_launch, ways_to_start
from lockstep.session.framework import count_ranks, framework_of

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
    """What a command line asks for."""

    config: TrainConfig
    checkpoint: Path | None
    """Where weights come from."""
    resume: Resume
    """The run to go on with; ``auto``: the one that this job has started, if there is one."""


def read(argv: Sequence[str], world_size: int | None = None) -> Request:
    """Return what a command line asks for: flags over overlay files over the run's config or the task's recipe.

    Args:
        argv: the words after the command.
        world_size: processes of the job; None for the job that this process is in. With torch each is a rank, with
            JAX each of its devices.

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
    run = _config_of_run(resume, task) if isinstance(resume, Path) else {}
    base = {name: value for name, value in run.items() if name not in _INFORMATIONAL}
    library = _first((first_look.last("rl_library"), overlay.get("rl_library"), run.get("rl_library")), OWN)
    config = _recipe(run["task"] if run else task, _algorithm(first_look, overlay, run), library)

    arguments = parse(argv, _lookup(config), _REPEATABLE, TASKS)
    _task(arguments, overlay)  # words that the first look gave to a flag may be left over now
    for path, values in overlays:
        _check_overlay(path, values, config)
    flags = {**_settings_in(arguments, config), "task": config.task}
    if world_size is None:
        world_size = topology.from_environment().world_size
    values = combine(combine(base, overlay), flags)
    num_ranks = world_size * _devices_of_process(values, config, world_size)
    total_envs = _total_envs(arguments, run, overlay, num_ranks)
    if total_envs is not None:
        values = combine(values, {"num_envs": _shares(total_envs, num_ranks, values, config, is_new=not run)})
    config = merge(config, values)
    check_offered(config)
    _check_envs_of_run(config, run, num_ranks)
    _check_distributed(arguments, world_size)
    checkpoint = path_of(arguments, "checkpoint")
    check_distributed(config, num_ranks)
    check_processes(config, world_size)
    for way in ways_to_start(checkpoint, resume) if config.runner else ():
        framework_of(config).check_runner(config, world_size, starts_from=way)
    return Request(config, checkpoint, resume)


def flag_names() -> list[str]:
    """Return every flag that does not depend on the task."""
    return [*_OWN_FLAGS, *settings(TrainConfig(task=""))]


def _lookup(config: TrainConfig, any_dotted: bool = False) -> Callable[[str], Takes]:
    known = settings(config)
    flags = {**_OWN_FLAGS, **{name: takes_of(setting) for name, setting in known.items()}}

    def lookup(name: str) -> Takes:
        if name in known and is_mapping(known[name]):
            raise UsageError(f"--{name} is a mapping: write --{name}.NAME VALUE, or give an overlay file with --config")
        if name in flags:
            return flags[name]
        if any_dotted and "." in name:
            return Takes.UNKNOWN
        if is_inside_mapping(name, known):
            return Takes.MANY
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


def _recipe(task: str | None, algorithm: str = DEFAULT_ALGORITHM, rl_library: str = OWN) -> TrainConfig:
    if task is None:
        raise UsageError(f"no task is given; write lockstep train TASK, one of {', '.join(TASKS)}")
    return recipe_of(task, algorithm, rl_library)


def _first(values: Sequence[Any], default: str) -> str:
    """Return the first of several values that is given, as text."""
    return str(next((value for value in values if value is not None), default))


def _algorithm(arguments: Arguments, overlay: Mapping[str, Any], run: Mapping[str, Any]) -> str:
    """Return the algorithm, which decides on the recipe; a run goes on with its own.

    Raises:
        UsageError: another one is asked for than the run has.
    """
    given = next((name for name in (arguments.last("algorithm"), overlay.get("algorithm")) if name is not None), None)
    if not run:
        return DEFAULT_ALGORITHM if given is None else str(given)
    algorithm = str(run.get("algorithm", DEFAULT_ALGORITHM))
    if given is not None and given != algorithm:
        raise UsageError(
            f"the run has algorithm {algorithm}, not {show(given)}; a run resumes with the algorithm it had (to change "
            "it, start a new run)"
        )
    return algorithm


def _run_to_resume(arguments: Arguments, overlay: Mapping[str, Any], task: str | None) -> Resume:
    if "resume" not in arguments.flags:
        return None
    if arguments.last("resume") == "auto":  # a folder of that name is ./auto
        return "auto"
    if "checkpoint" in arguments.flags:
        raise UsageError("--resume continues a run, --checkpoint starts a new one from weights; keep one of the two")
    if run_directory := path_of(arguments, "resume"):
        return run_directory
    from lockstep.core.runs import newest_run

    recipe = _recipe(task)
    log_root = _first((arguments.last("log_root"), overlay.get("log_root")), recipe.log_root)
    # Ranks that are started again must not take up what another job has started meanwhile.
    return run_of_launch(log_root, recipe.task, topology.start_from_environment()) or newest_run(log_root, recipe.task)


def _config_of_run(run_directory: Path, task: str | None) -> dict[str, Any]:
    from lockstep.core.run_directory import check_run_directory

    path = check_run_directory(run_directory) / "config.yaml"
    values = load_overlay(path)
    if "task" not in values:
        raise UsageError(f"{path} names no task, so it is not the config of a run; resume another run")
    values["task"] = str(values["task"])
    if task is not None and task != values["task"]:
        raise UsageError(f"{run_directory} is a run of task {values['task']!r}, not of {task!r}; resume another run")
    return values


def _settings_in(arguments: Arguments, config: TrainConfig) -> dict[str, Any]:
    """Return the settings among the flags, nested for ``merge``."""
    known = settings(config)
    given = {name: value_of(known[name], words) for name, words in arguments.flags.items() if name in known}
    # Of what stands in a mapping nobody here knows the type: it is read as an overlay file would be.
    inside = {name: parse_value(words) for name, words in arguments.flags.items() if is_inside_mapping(name, known)}
    return nested(given | inside)


def _devices_of_process(values: Mapping[str, Any], recipe: TrainConfig, world_size: int) -> int:
    """Return how many ranks each process will be."""
    names = ("ml_framework", "rl_library", "device", "num_devices", "enable_multi_devices")
    config = merge(recipe, {name: values[name] for name in names if name in values})
    return count_ranks(config, world_size) // world_size


def _total_envs(
    arguments: Arguments, run: Mapping[str, Any], overlay: Mapping[str, Any], world_size: int
) -> int | None:
    """Return the envs of the whole job if they are to be shared out, None if ``num_envs`` says what each rank has."""
    given = arguments.flags.get("num_envs")
    if "total_envs" in arguments.flags:
        total_envs = number("total_envs", arguments.flags["total_envs"], minimum=1)
        if given is None:
            return total_envs
        each = number("num_envs", given, minimum=1)
        if each * world_size != total_envs:
            raise UsageError(
                f"--total_envs {total_envs} and --num_envs {each} on {world_size} rank(s) contradict each other; keep "
                "one of them"
            )
        return None
    if not run or given is not None or "num_envs" in overlay:
        return None
    if ranks_of_run(run) == world_size:
        return None  # each rank keeps those that it had
    return envs_of_run(run)


def _check_envs_of_run(config: TrainConfig, run: Mapping[str, Any], world_size: int) -> None:
    total, had = sum(config.envs_by_rank(world_size)), envs_of_run(run) if run else None
    if had is not None and total != had:
        raise UsageError(
            f"the run has {had} envs, not {total}; a run resumes with as many as it had, on any number of ranks (leave "
            "--num_envs and --total_envs out, or start a new run with --checkpoint)"
        )


def _shares(total_envs: int, world_size: int, values: Mapping[str, Any], recipe: TrainConfig, is_new: bool) -> Any:
    given = values.get("agent")
    agent = merge(recipe.agent, given, inside="agent") if isinstance(given, Mapping) else recipe.agent
    block = agent.env_block(total_envs)
    shares = deal(total_envs, world_size, agent)
    if is_new and isinstance(shares, list) and 0 in shares:
        raise UsageError(
            f"total_envs {total_envs} leaves some of {world_size} ranks without envs, as they come in blocks of "
            f"{block} ({agent.block_setting()}); use --total_envs {world_size * block} or more, or fewer ranks"
        )
    return shares


def _check_distributed(arguments: Arguments, world_size: int) -> None:
    if switched_on(arguments, "distributed"):
        topology.require_several(world_size, "--distributed")
