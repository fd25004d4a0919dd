"""One start of a training, measured: a process of its own that does all that comes before the first iteration is over.

``python -m lockstep.benchmark.startup.child JOB BEGAN``: the path of a ``Job`` as JSON, and when this process was
created, by ``time.monotonic``. It is a rank of a job that consists of such processes alone. It writes no run directory.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import time
import traceback
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.benchmark.startup.clock import Built, PhaseClock
from lockstep.core.errors import LockstepError
from lockstep.core.process_control import end_with_parent

if TYPE_CHECKING:
    from lockstep.learn.config import TrainConfig
    from lockstep.learn.observer import Metrics
    from lockstep.session.framework import Framework

_BUILDERS = {
    "torch": "lockstep.benchmark.startup.torch_start:build",
    "jax": "lockstep.benchmark.startup.jax_start:build",
}

WORDED = "lockstep: error: "
"""How the last line begins where it says all that there is to say."""


@dataclass(frozen=True)
class Job:
    """What this process is to do."""

    parent: int
    """The process that it must not outlive."""
    config: dict[str, Any]
    """Of the training, as plain values."""
    profiles: bool
    """Whether to look at functions; times mean nothing then."""
    note: str
    """File that tells the phase that it is in."""
    result: str
    """File that it leaves in the end: a ``ProcessStart`` as JSON."""


@dataclass(frozen=True)
class ProcessStart:
    """How this process started."""

    ranks: list[int]
    """That it has: one with torch, one per device with JAX."""
    places: list[dict[str, Any]]
    """What ``run.json`` would say of each of them."""
    seconds: dict[str, float]
    """Of each phase, ``total`` included."""
    cpu_s: float
    """CPU time of all its threads, until the first iteration was done."""
    memory_bytes: int
    """Resident in main memory, at its peak."""
    functions: list[dict[str, Any]]
    """Fields of ``schema.FunctionTime``; none without a profiler."""


class _FirstIterationDone(BaseException):
    """Raised out of the training, which can't catch it, after the first iteration."""

    def __init__(self, metrics: Metrics) -> None:
        super().__init__()
        self.metrics = metrics


class _Observer:
    """The ``Observer`` that lets a training do one iteration as if it were to do all of them."""

    stop_requested = None
    save_due = False

    def record(self, metrics: Metrics) -> None:
        raise _FirstIterationDone(metrics)

    def save(self, iteration: int, content: dict[str, Any]) -> None:
        """Keep nothing."""

    def save_failure(self, iteration: int, content: dict[str, Any]) -> Path | None:
        """Keep nothing."""
        return None


def main(words: list[str]) -> int:
    """Start, and return the exit code."""
    job = Job(**json.loads(Path(words[0]).read_text()))
    end_with_parent(signal.SIGKILL, job.parent)
    _take_turns_as_usual()
    clock = PhaseClock("interpreter", float(words[1]), Path(job.note), job.profiles)
    try:
        started = start(job.config, clock)
    except LockstepError as error:
        # Not as other processes end: the ranks that wait for this one learn of it only when it is gone.
        _end_at_once(f"{WORDED}{error}", error.exit_code)
    except Exception:
        _end_at_once(traceback.format_exc(), 1)
    temporary = Path(f"{job.result}.part")
    temporary.write_text(json.dumps(vars(started)))
    temporary.replace(job.result)
    return 0


def start(values: dict[str, Any], clock: PhaseClock) -> ProcessStart:
    """Go through a whole start, together with the other ranks.

    Args:
        values: of the config.
        clock: runs.
    """
    clock.enter("imports")
    framework = _import(values)
    from lockstep.distributed import heartbeat

    clock.enter("config")
    config = _make_config(values, framework)
    clock.enter("join")
    heartbeat.begin()
    with ExitStack() as resources:
        resources.enter_context(framework.running())
        team = framework.join(config)
        clock.enter("env_creation")
        framework.prepare(config, team.comm.rank)
        built: Built = _loaded(_BUILDERS[framework.name])(config, team, resources, clock)
        figures = _iterate(built, clock)
        started = ProcessStart(
            ranks=list(built.ranks), places=[team.ranks[rank] for rank in built.ranks], **figures, **_functions(clock)
        )
        team.comm.gather_text("", "end of the start")  # whoever has left could be missed by those who have not
    team.comm.close()
    return started


def _import(values: dict[str, Any]) -> Framework:
    """Load what a training loads before it begins, and return the framework."""
    from lockstep.core.registry import load
    from lockstep.recipes.libraries import OWN
    from lockstep.session.framework import FRAMEWORKS

    importlib.import_module("lockstep.session.train")
    name = values["ml_framework"]
    framework: Framework = load(FRAMEWORKS.get(name).framework)
    load(_BUILDERS[name])  # which imports what builds envs and learners
    # Another library is imported where it finds the ranks met: its time is the learner's.
    if values["rl_library"] == OWN and not values["runner"]:
        learners = "lockstep.session.runner:LEARNERS" if name == "torch" else "lockstep.session.jax_session:ALGORITHMS"
        load(load(learners).get(values["algorithm"]))
    return framework


def _make_config(values: dict[str, Any], framework: Framework) -> TrainConfig:
    """Return the config, made and checked as the command line does."""
    from lockstep.core.config import merge
    from lockstep.distributed.topology import from_environment
    from lockstep.recipes.catalog import check_offered, check_processes, recipe_of

    config = merge(recipe_of(values["task"], values["algorithm"], values["rl_library"]), values)
    num_processes = from_environment().world_size
    check_offered(config)
    framework.check_runner(config, num_processes)
    framework.check(config, num_processes)
    check_processes(config, num_processes)
    return config


def _iterate(built: Built, clock: PhaseClock) -> dict[str, Any]:
    """Go on to the end of the first iteration; return the figures of all phases."""
    if not built.step_is_apart:
        clock.enter("first_step")
        built.step()
    clock.enter("first_iteration")
    metrics: Metrics = {}
    try:
        built.runner.train(_Observer(), built.evaluation_env)
    except _FirstIterationDone as done:
        metrics = done.metrics
    clock.stop()
    total_s = clock.total_s
    cpu_s, memory_bytes = _own_use()
    if built.step_is_apart:
        clock.enter("first_step")
        built.step()
        clock.stop()
    seconds = dict(clock.seconds)
    compile_s = metrics.get("time/compile")
    if compile_s is not None:
        seconds["compile"] = float(compile_s)
        seconds["first_iteration"] -= float(compile_s)
    return {"seconds": seconds | {"total": total_s}, "cpu_s": cpu_s, "memory_bytes": memory_bytes}


def _functions(clock: PhaseClock) -> dict[str, Any]:
    return {"functions": clock.functions()}


def _own_use() -> tuple[float, int]:
    """Return the CPU time of all threads in seconds, and the peak of resident memory in bytes."""
    # Not getrusage: its peak is that of the process that started this one, where that was larger.
    lines = Path("/proc/self/status").read_text().splitlines()
    peak = next((line for line in lines if line.startswith("VmHWM:")), "VmHWM: 0 kB")
    return time.process_time(), int(peak.split()[1]) * 1024


def _take_turns_as_usual() -> None:
    """Undo what the parent, which has met other ranks, may have set for itself and all that it starts."""
    with contextlib.suppress(OSError, AttributeError):
        if os.sched_getscheduler(0) == os.SCHED_BATCH:
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def _loaded(import_string: str) -> Any:
    module, _, name = import_string.partition(":")
    return getattr(importlib.import_module(module), name)


def _end_at_once(words: str, code: int) -> None:
    sys.stdout.flush()
    print(words, file=sys.stderr, flush=True)  # noqa: T201
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
