"""How long a training takes to start: from ``python`` to the end of its first iteration, on all ranks at the same time.

Each rank's process stays what it is, and starts another one that does the whole start as that rank of a job of its own,
with the same GPU and cores: first with empty kernel caches, then again and again with what the first left there, and
once more under a profiler. All processes of one start begin together.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep.benchmark.schema import FunctionTime, Startup, StartupPhase
from lockstep.benchmark.spread import spread_of
from lockstep.benchmark.startup.child import ProcessStart
from lockstep.benchmark.startup.clock import PHASES
from lockstep.benchmark.startup.process import (
    Child,
    Meeting,
    choose_meeting,
    environment_of_start,
    folder_for_caches,
    new_name,
    shared_cache,
)
from lockstep.core.errors import RunError, UsageError
from lockstep.core.interrupts import StopRequest, watch
from lockstep.core.outcome import LOST_A_RANK

if TYPE_CHECKING:
    from lockstep.core.types import Peers
    from lockstep.learn.config import TrainConfig

TIMEOUT_S = 1800.0
"""A start that takes longer is given up; compilers take long."""
_ROUND_S = 0.5
_GRACE_ROUNDS = 10
"""Rounds in which a failed process may tell why, after another one has lost it."""
_TAG = "startup"

Starts = Sequence[ProcessStart]
"""Of all processes, in order."""


@dataclass(frozen=True)
class RankStarts:
    """One rank's starts, for its line in the bundle. A process's figures are those of all its ranks."""

    rank: int
    process: int
    place: dict[str, Any]
    """As ``run.json`` has it of a rank: local_rank, host, pid, device, visible_gpus, cores and more."""
    total_s: tuple[float, ...]
    """Of each warm start or, where there is none, of the cold one: wall seconds."""
    cpu_s: tuple[float, ...]
    """CPU seconds of all threads in the same starts."""
    memory_bytes: tuple[int, ...]
    """Resident in main memory at the peak of the same starts."""


def coordinator_config(config: TrainConfig) -> TrainConfig:
    """Return the config with which to call ``Framework.join`` before ``measure_startup``.

    These processes only meet: they must leave every GPU to those whose start is measured.
    """
    return config.model_copy(update={"device": "cpu", "num_devices": 0, "enable_multi_devices": False})


def measure_startup(
    config: TrainConfig,
    comm: Peers,
    *,
    repetitions: int = 3,
    timeout_s: float = TIMEOUT_S,
    say: Callable[[str], None] = lambda line: None,
) -> tuple[Startup, tuple[RankStarts, ...]]:
    """Start the training again and again; return how long that took, the same on every rank.

    All processes call it together. In its first start the caches of all kernel compilers are empty; Python's own
    (``__pycache__``) is left alone.

    Args:
        config: of the training.
        comm: the processes, met with ``coordinator_config``.
        repetitions: warm starts.
        timeout_s: after which a start has failed.
        say: shows a line to the user; called on rank 0.

    Raises:
        RunError, UsageError: a start has failed, on all ranks; the rank and the start are named.
        KeyboardInterrupt: Ctrl-C.
    """
    values = config.model_dump(mode="json", serialize_as_any=True)
    name = comm.on_main(new_name, _TAG)
    titles = ["cold start", *(f"warm start {number + 1} of {repetitions}" for number in range(repetitions))]
    titles.append("start under a profiler")
    shared = shared_cache(os.environ, name)
    with ExitStack() as resources:
        request = resources.enter_context(watch())
        folder = resources.enter_context(folder_for_caches(shared))
        done = []
        for number, title in enumerate(titles):
            start = _Start(comm, request, title, timeout_s)
            done.append(start.run(folder, number, values, name, profiles=number > repetitions, say=say))
    cold, warm, profiled = done[0], done[1:-1], done[-1]
    return summarise(cold, warm, profiled[0].functions), by_rank(warm or [cold])


class _Start:
    """One start of all ranks at the same time.

    Args:
        comm: the processes.
        request: of this process to stop.
        title: of the start, in messages.
        timeout_s: after which it has failed.
    """

    def __init__(self, comm: Peers, request: StopRequest, title: str, timeout_s: float) -> None:
        self._comm, self._request, self._title, self._timeout_s = comm, request, title, timeout_s

    def run(
        self,
        folder: Path,
        number: int,
        values: dict[str, Any],
        name: str,
        *,
        profiles: bool,
        say: Callable[[str], None],
    ) -> list[ProcessStart]:
        """Return the figures of all processes."""

        def choose() -> str:
            say(self._title)
            return json.dumps(vars(choose_meeting(name)))

        meeting = Meeting(**json.loads(self._comm.on_main(choose, _TAG)))
        environment = environment_of_start(os.environ, meeting, folder)
        self._comm.gather_text("", _TAG)  # all are here
        child = Child(folder, number, values, environment, profiles)
        try:
            self._wait(child)
            texts = self._comm.gather_text(json.dumps(vars(child.figures())), _TAG)
        finally:
            child.end()
        return [ProcessStart(**json.loads(text)) for text in texts]

    def _wait(self, child: Child) -> None:
        """Wait until all processes are done; they are ended if one fails, or if this job is asked to stop."""
        rounds_left = _GRACE_ROUNDS
        while True:
            # Even if this rank's process is done: who waits in an exchange may keep a core busy that others need.
            time.sleep(_ROUND_S)
            said = {
                "problem": child.problem(self._timeout_s),
                "exit_code": child.exit_code,
                "is_done": child.is_done,
                "stop": self._request.status,
            }
            states = [json.loads(text) for text in self._comm.gather_text(json.dumps(said), _TAG)]
            _raise_stop([state["stop"] for state in states])
            problems = {rank: state for rank, state in enumerate(states) if state["problem"]}
            rounds_left -= bool(problems)
            first = _first_cause(problems)
            if first is not None and (not _only_follows(problems[first]) or not rounds_left):
                raise self._failure(first, problems[first])
            if all(state["is_done"] for state in states):
                return

    def _failure(self, rank: int, state: dict[str, Any]) -> RunError | UsageError:
        kind = UsageError if state["exit_code"] == UsageError.exit_code else RunError
        return kind(f"rank {rank} failed in its {self._title}: it {state['problem']}", shared=True)


def _first_cause(problems: dict[int, dict[str, Any]]) -> int | None:
    """Return the rank whose process brought the others' down, as far as that can be told; None if none has failed."""
    return min(problems, key=lambda rank: (_only_follows(problems[rank]), rank), default=None)


def _only_follows(state: dict[str, Any]) -> bool:
    """Return whether a process has failed since it lost another one, which may still be about to say why."""
    return LOST_A_RANK in state["problem"]


def _raise_stop(asked: Sequence[str | None]) -> None:
    if "interrupted" in asked:
        raise KeyboardInterrupt
    reason = next(filter(None, asked), None)
    if reason is not None:
        raise RunError("stopped by a signal (SIGTERM or SIGUSR1) before all starts were measured", shared=True)


def summarise(cold: Starts, warm: Sequence[Starts], functions: Sequence[dict[str, Any]]) -> Startup:
    """Return the part of the bundle about the start.

    Args:
        cold: the start with empty caches.
        warm: those after it.
        functions: of process 0, by phase, as ``schema.FunctionTime`` has them.
    """
    names = [name for name in PHASES if name in cold[0].seconds]
    return Startup(
        repetitions=len(warm),
        phases=tuple(_phase(name, cold, warm) for name in names),
        functions=tuple(FunctionTime(**function) for function in functions),
    )


def by_rank(starts: Sequence[Starts]) -> tuple[RankStarts, ...]:
    """Return each rank's starts, in the order of ranks.

    Args:
        starts: one or more, each of all processes.
    """
    found = [
        RankStarts(
            rank,
            process,
            place,
            total_s=tuple(start[process].seconds["total"] for start in starts),
            cpu_s=tuple(start[process].cpu_s for start in starts),
            memory_bytes=tuple(start[process].memory_bytes for start in starts),
        )
        for process, own in enumerate(starts[0])
        for rank, place in zip(own.ranks, own.places, strict=True)
    ]
    return tuple(sorted(found, key=lambda each: each.rank))


def _phase(name: str, cold: Starts, warm: Sequence[Starts]) -> StartupPhase:
    cold_s, warm_s = _by_rank(name, cold), [_by_rank(name, start) for start in warm]
    ranks = sorted(cold_s)
    mean_s = {rank: float(np.mean([each[rank] for each in warm_s or [cold_s]])) for rank in ranks}
    return StartupPhase(
        name=name,
        cold_s=spread_of([cold_s[rank] for rank in ranks]),
        warm_s=spread_of([each[rank] for each in warm_s for rank in ranks]) if warm_s else None,
        slowest_rank=max(ranks, key=lambda rank: (mean_s[rank], -rank)),
    )


def _by_rank(name: str, start: Starts) -> dict[int, float]:
    return {rank: process.seconds[name] for process in start for rank in process.ranks}
