"""``lockstep train --help``: every setting of the task, with its default, rendered by tyro."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import tyro

from lockstep.core.registry import load
from lockstep.learn.config import TrainConfig
from lockstep.recipes.catalog import TASKS


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
    total_envs: Annotated[int | None, _own("INT", "envs of the whole job; in one process the same as --num_envs")] = (
        None
    )


def print_help(argv: Sequence[str]) -> None:
    """Print the help for the task named in ``argv``, or for any task.

    Raises:
        UsageError: the task is not known.
    """
    task = _task_in(argv)
    if task is None:
        config = TrainConfig(task="TASK")
        description = (
            f"Train a policy. Tasks: {', '.join(TASKS)}. Defaults depend on the task, and a task has settings of its "
            "own: 'lockstep train TASK --help' shows them."
        )
    else:
        entry = TASKS.get(task)
        config = load(entry.recipe)()
        description = f"Train a policy on {task}: {entry.description}. Engines: {', '.join(entry.engines)}."
    with contextlib.suppress(SystemExit):  # tyro exits after printing
        tyro.cli(
            _Options,
            prog="lockstep train [TASK]",
            description=description,
            args=["--help"],
            default=_Options(settings=config),
            use_underscores=True,
            config=(tyro.conf.FlagConversionOff,),
        )


def _task_in(argv: Sequence[str]) -> str | None:
    """Return the task even from a command line that is not finished yet."""
    for before, word in pairwise(["", *argv]):
        if before == "--task" and not word.startswith("-"):
            return word
        if word.startswith("--task="):
            return word.removeprefix("--task=")
    if argv and not argv[0].startswith("-"):
        return argv[0]
    return next((word for word in argv if word in TASKS), None)
