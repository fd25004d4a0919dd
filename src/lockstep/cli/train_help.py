"""``lockstep train --help``: every setting of the task, with its default, rendered by tyro."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import tyro

from lockstep.cli.arguments import flag_name
from lockstep.envs.config import GuestConfig
from lockstep.learn.config import AGENTS, TrainConfig
from lockstep.recipes.catalog import DEFAULT_ALGORITHM, TASKS, engines_of, recipe_of
from lockstep.recipes.libraries import OWN
from lockstep.recipes.suites import SUITES


def _own(metavar: str, help_text: str) -> Any:
    """Describe a flag of the command itself; nothing happens without it, so no default is shown."""
    return tyro.conf.arg(metavar=metavar, help=help_text, help_behavior_hint="")


@dataclass
class _Options:
    settings: Annotated[TrainConfig, tyro.conf.arg(name="")]
    checkpoint: Annotated[
        Path | None, _own("PATH", "start a new run at iteration 0 from these weights, with a fresh optimizer")
    ] = None
    resume: Annotated[
        Path | None,
        _own(
            "[RUN_DIR|auto]",
            "continue this run in place; without a value, the newest run of the task; auto, for job scripts: the run "
            "that this job has started (by LOCKSTEP_RUN_KEY, else the newest of this --run_name if it is not "
            "finished), or a new one",
        ),
    ] = None
    config: Annotated[
        Path | None, _own("FILE", "YAML laid over the recipe and under the flags; may be repeated, later ones win")
    ] = None
    library: Annotated[
        str | None,
        tyro.conf.arg(
            name="library.NAME",
            metavar="VALUE",
            help="a setting of --rl_library in its own names, over what it is given for agent.*; dots lead inwards",
            help_behavior_hint="",
        ),
    ] = None
    total_envs: Annotated[int | None, _own("INT", "envs of the whole job; in one process the same as --num_envs")] = (
        None
    )


@dataclass
class _GuestOptions(_Options):
    kwargs: Annotated[
        str | None,
        tyro.conf.arg(
            name="env.kwargs.NAME",
            metavar="VALUE",
            help="a keyword argument of the library's own maker of the env; dots lead inwards",
            help_behavior_hint="",
        ),
    ] = None


def print_help(argv: Sequence[str]) -> None:
    """Print the help for the task and the algorithm named in ``argv``, or for any task.

    Raises:
        UsageError: the task is not known, or has no recipe for the algorithm.
    """
    task = _task_in(argv)
    algorithm = _value_of("algorithm", argv) or DEFAULT_ALGORITHM
    if task is None:
        config = TrainConfig(task="TASK", algorithm=algorithm if algorithm in AGENTS else DEFAULT_ALGORITHM)
        description = (
            f"Train a policy. Tasks: {', '.join(TASKS)}; and envs of other libraries, by prefix and id, such as "
            f"{', '.join(suite.example for suite in map(SUITES.get, SUITES))}. Defaults depend on the task and the "
            "algorithm, and both have settings of their own: 'lockstep train TASK --algorithm A --help' shows them."
        )
    else:
        config = recipe_of(task, algorithm, _value_of("rl_library", argv) or OWN)
        framework = _value_of("ml_framework", argv) or config.ml_framework
        engines = ", ".join(engines_of(task, framework))
        others = [name for name in TASKS.get(task).recipes if name != algorithm]
        more = f" --algorithm {' or '.join(others)} has settings of its own." if others else ""
        description = (
            f"Train a policy on {task} by {algorithm}: {TASKS.get(task).description}. Engines with {framework}: "
            f"{engines}.{more}"
        )
    options = _GuestOptions if isinstance(config.env, GuestConfig) else _Options
    with contextlib.suppress(SystemExit):  # tyro exits after printing
        tyro.cli(
            options,
            prog="lockstep train [TASK]",
            description=description,
            args=["--help"],
            default=options(settings=config),
            use_underscores=True,
            config=(tyro.conf.FlagConversionOff,),
        )


def _task_in(argv: Sequence[str]) -> str | None:
    """Return the task even from a command line that is not finished yet."""
    if task := _value_of("task", argv):
        return task
    if argv and not argv[0].startswith("-"):
        return argv[0]
    return next((word for word in argv if word in TASKS), None)


def _value_of(flag: str, argv: Sequence[str]) -> str | None:
    """Return what a flag is given, however it is spelled."""
    for before, word in pairwise(["", *argv]):
        if flag_name(before) == flag and "=" not in before and not word.startswith("-"):
            return word
        if flag_name(word) == flag and "=" in word:
            return word.partition("=")[2]
    return None
