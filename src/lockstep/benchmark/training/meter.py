"""What follows a training and keeps its times: the warm-up apart, and nothing beyond the measured iterations."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lockstep.core.metrics import cleaned
from lockstep.learn.observer import nobody_asks

if TYPE_CHECKING:
    from lockstep.benchmark.resources import Interval, Sampler
    from lockstep.core.interrupts import StopReason
    from lockstep.core.types import Wait
    from lockstep.learn.observer import Metrics, OwnTimes


def _nothing() -> None:
    pass


class Iteration(NamedTuple):
    """One measured iteration, as this process saw it."""

    seconds: float
    own: OwnTimes | None
    """What the learner says of it; None where it does not tell."""
    other_waits_s: float
    """In exchanges that are no part of an iteration's own, as comparing replicated state is."""


class Meter:
    """Follows a training from its first iteration to its last, and keeps what this process did; it is the ``Observer``.

    The first iterations warm up. Then all processes meet, and the clock starts.

    Args:
        own_times: returns what the learner says of this process's last iteration.
        take_waits: returns this process's exchanges since it was last asked, or since the learner asked.
        meet: returns when all processes have called it.
        sampler: of this process's resources, in the measured iterations.
        warm_up: iterations that are not measured.
        iterations: that are, after these; further ones are not.
        prepare: called once between the warm-up and the meeting.
        stop: returns why this process should stop, or None.
        keep: takes the state of the training when it is over.
        clock: in seconds.
    """

    save_due = False

    def __init__(
        self,
        own_times: Callable[[], OwnTimes | None],
        take_waits: Callable[[], Sequence[Wait]],
        meet: Callable[[], object],
        sampler: Sampler,
        *,
        warm_up: int,
        iterations: int,
        prepare: Callable[[], None] = _nothing,
        stop: Callable[[], StopReason | None] = nobody_asks,
        keep: Callable[[int, dict[str, Any]], None] = lambda iteration, content: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._own_times, self._take_waits, self._meet, self._prepare = own_times, take_waits, meet, prepare
        self._sampler, self._keep, self._stop, self._clock = sampler, keep, stop, clock
        self._warm_up, self._num_wanted = warm_up, iterations
        self._sampling = ExitStack()
        self._began = self._last = clock()
        self.warm_up_s = 0.0
        self.warm_up_steps = self._steps_at_end = 0
        self.compile_s: float | None = None
        self.recorded: list[Metrics] = []
        """Of every iteration, those of the warm-up included."""
        self.iterations: list[Iteration] = []
        """That were measured."""
        if warm_up == 0:
            self._begin()

    @property
    def stop_requested(self) -> StopReason | None:
        """Why this process should stop, or None."""
        return self._stop()

    @property
    def num_warm_up(self) -> int:
        """Iterations that were not measured, before those that were."""
        return min(self._warm_up, len(self.recorded))

    @property
    def wall_s(self) -> float:
        """Seconds of all measured iterations."""
        return self._last - self._began

    @property
    def env_steps(self) -> int:
        """Of all ranks, in the measured iterations."""
        return self._steps_at_end - self.warm_up_steps

    def record(self, metrics: Metrics) -> None:
        """Take an iteration that has just ended."""
        now = self._clock()
        metrics = cleaned(metrics)
        self.recorded.append(metrics)
        if len(self.recorded) > self._warm_up:
            if len(self.iterations) < self._num_wanted:
                self._measure(now, metrics)
            return
        compile_s = metrics.get("time/compile")
        if compile_s is not None:
            self.compile_s = (self.compile_s or 0.0) + compile_s
        if len(self.recorded) == self._warm_up:
            self.warm_up_s, self.warm_up_steps = now - self._began, int(metrics["env_steps"] or 0)
            self._begin()

    def save(self, iteration: int, content: dict[str, Any]) -> None:
        """Hand on the state of the training; the clock has been read by then."""
        self._keep(iteration, content)

    def save_failure(self, iteration: int, content: dict[str, Any]) -> Path | None:
        """Keep nothing."""

    def intervals(self) -> tuple[Interval, ...]:
        """Return what was used in the measured iterations."""
        return tuple(self._sampler.intervals())

    def _begin(self) -> None:
        self._prepare()
        self._meet()
        self._sampling.enter_context(self._sampler)
        self._meet()  # whoever took a sample more slowly is here now too
        self._take_waits()
        self._began = self._last = self._clock()

    def _measure(self, now: float, metrics: Metrics) -> None:
        other_s = sum(wait.seconds for wait in self._take_waits())
        self.iterations.append(Iteration(now - self._last, self._own_times(), other_s))
        self._last, self._steps_at_end = now, int(metrics["env_steps"] or 0)
        if len(self.iterations) == self._num_wanted:
            self._sampling.close()
