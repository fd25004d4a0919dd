"""What an iteration takes a process that trains alone, its neighbours doing the same at the same time."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol, cast

from lockstep.benchmark.options import TAG

if TYPE_CHECKING:
    from lockstep.core.types import Peers
    from lockstep.learn.observer import Metrics
    from lockstep.session.framework import Learner

WARM_UP = 2
"""Iterations before the first that counts: the first one compiles."""


class _Iterates(Protocol):
    iteration: int

    def iterate(self) -> Metrics: ...


def measure_apart(learner: Learner, comm: Peers, num_iterations: int, *, warm_up: int = WARM_UP) -> list[float]:
    """Return the seconds of each iteration of this process.

    All processes call it at the same time, between the same iterations of their common training; again and again, with
    the same learner, which goes on where it was.

    Args:
        learner: that ``Framework.make_apart`` returned.
        comm: all processes; they wait for one another before the first iteration and after the last.
        num_iterations: at least 1.
        warm_up: iterations that come before the first that counts, once in the learner's life. As many as the common
            training has had, where its first iterations are of another kind (SAC collects before it learns).

    Raises:
        RunError: a process has ended.
    """
    training = cast(_Iterates, learner.runner)
    while training.iteration < warm_up:
        training.iterate()
    comm.gather_text("", TAG)
    seconds = []
    for _ in range(num_iterations):
        began = time.perf_counter()
        training.iterate()
        seconds.append(time.perf_counter() - began)
    comm.gather_text("", TAG)
    return seconds
