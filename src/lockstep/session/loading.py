"""Reading checkpoints on rank 0, which alone needs the files, and taking them up on all ranks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.core.checkpoint_files import set_aside
from lockstep.core.errors import UsageError
from lockstep.learn.resuming import DamagedError
from lockstep.recipes.libraries import OWN
from lockstep.session.framework import Content, Framework, framework_of, require_same_framework

if TYPE_CHECKING:
    from lockstep.core.null_run_directory import NullRunDirectory
    from lockstep.core.run_directory import RunDirectory
    from lockstep.core.types import Peers
    from lockstep.learn.config import TrainConfig
    from lockstep.session.runner import SessionRunner


def load_weights(training: SessionRunner, comm: Peers, path: Path) -> None:
    """Take up the weights of a checkpoint.

    Raises:
        UsageError: it can't be read, or does not fit.
    """
    framework, contents = framework_of(training.config), list[Content]()

    def read() -> str:
        require_same_framework(path, training.config)
        contents.append(framework.load(path))
        _require_same_runner(contents[0], training.config, path)
        return ""

    comm.on_main(read, "checkpoint")
    training.load_weights(next(iter(contents), None), path)


def go_on(training: SessionRunner, comm: Peers, run: RunDirectory | NullRunDirectory) -> bool:
    """Load the newest checkpoint of a run that is whole. A run that never had one starts again from its config.

    Returns:
        Whether there was one, on every rank.

    Raises:
        UsageError: it had checkpoints, and none of them is there and whole; or another runner made them; or the runner
            can't go on from one.
    """
    framework, contents = framework_of(training.config), list[Content]()

    def read() -> str:
        for newest in run.checkpoints()[:1]:
            require_same_framework(newest, training.config)
        path = _read_newest(run, framework, contents)
        for content in contents:
            _require_same_runner(content, training.config, path)
        return path

    path = comm.on_main(read, "checkpoint")
    if path:
        # Ranks that are started again go on although nobody has asked for it.
        framework.check_runner(training.config, comm.world_size, starts_from="resume")
        training.load_state_dict(next(iter(contents), None), path)
    return bool(path)


def _read_newest(run: RunDirectory | NullRunDirectory, framework: Framework, contents: list[Content]) -> str:
    """Append the content of the newest whole checkpoint and return its path; "" if there never was one."""
    damaged: list[Path] = []
    named = run.named_checkpoint
    problem = f"checkpoint {named} is gone" if named and not (run.path / named).exists() else None
    for path in run.checkpoints():
        try:
            contents.append(framework.load(path))
        except UsageError as error:
            # The one before it may be whole: a resumed run loses some iterations rather than everything.
            print(f"lockstep: warning: {error}", file=sys.stderr)  # noqa: T201
            problem = problem or f"checkpoint {path} is damaged"
            damaged += [path] if isinstance(error, DamagedError) else []
            continue
        _set_aside(damaged)
        return str(path)
    if problem is not None:
        raise UsageError(f"no checkpoint of {run.path} is whole ({problem}); put one back, or start a new run")
    return ""


def _set_aside(damaged: list[Path]) -> None:
    """Rename checkpoints that are not whole, now that one is: by their names the run would seem to be further on.

    Where none is whole they stay, or the run would seem to be one that never had a checkpoint.
    """
    for path in damaged:
        aside = set_aside(path)  # on a disk that refuses it is tried again the next time
        if aside is not None:
            print(f"lockstep: warning: {path} is called {aside.name} now", file=sys.stderr)  # noqa: T201


def _require_same_runner(content: Content, config: TrainConfig, path: object) -> None:
    then, now = _learner_in_words(content["config"]), _learner_in_words(config.model_dump(mode="json"))
    if then != now:
        raise UsageError(f"checkpoint {path} is of {then}, not of {now}; go on with what made it, or start a new run")


def _learner_in_words(config: dict[str, Any]) -> str:
    """Return whose learner a config of plain values asks for; older ones name no library."""
    library = config.get("rl_library", OWN)
    if library != OWN:
        return f"algorithm {config['algorithm']} of rl_library {library}"
    return f"runner {config['runner']}" if config.get("runner") else "lockstep's own learner"
