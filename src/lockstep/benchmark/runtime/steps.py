"""How fast envs can be stepped: random actions, no policy, every rank measured."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lockstep.benchmark.options import TAG
from lockstep.core import beats

if TYPE_CHECKING:
    from lockstep.core.types import Peers
    from lockstep.session.framework import Stepper


@dataclass(frozen=True)
class RankRuntime:
    """What one rank did in the measured iterations."""

    rank: int
    num_envs: int
    env_steps: int
    iteration_s: tuple[float, ...]
    """Seconds of each iteration, until its own last step was done: without any wait for another rank."""

    @property
    def wall_s(self) -> float:
        """Seconds of all of them."""
        return sum(self.iteration_s)


@dataclass(frozen=True)
class RuntimeMeasurement:
    """What one process has measured."""

    warm_up_iterations: int
    warm_up_s: float
    """Of this process, compiling included."""
    wall_s: float
    """Of all measured iterations, from the moment that all processes began them to the end of this one's last step."""
    compile_s: float | None
    """Of these; None where nothing is compiled as a whole."""
    num_steps_per_env: int
    """Env steps of each env in an iteration."""
    ranks: tuple[RankRuntime, ...]
    """This process's, in ascending order."""


def time_steps(
    stepper: Stepper,
    comm: Peers,
    num_steps_per_env: int,
    warm_up: int,
    iterations: int,
    watching: AbstractContextManager[object] | None = None,
) -> RuntimeMeasurement:
    """Measure how fast the envs of this process are stepped. All processes call it together.

    Ranks wait for one another before the measured iterations and after them, not in between.

    Args:
        stepper: of this process.
        comm: the processes.
        num_steps_per_env: env steps of every env that make an iteration.
        warm_up: iterations that are not measured, one of them at least.
        iterations: that are measured, at least 1.
        watching: a context that is entered for the measured part alone, for whoever samples what is used meanwhile.

    Raises:
        RunError: a process has ended.
    """
    began = time.perf_counter()
    for number in range(max(1, warm_up)):
        _iterate(stepper, num_steps_per_env, number)
    warm_up_s = time.perf_counter() - began
    comm.gather_text("", TAG)
    with nullcontext() if watching is None else watching:
        comm.gather_text("", TAG)  # whoever took longer to begin to watch is here now too
        began = time.perf_counter()
        seconds = [_iterate(stepper, num_steps_per_env, max(1, warm_up) + number) for number in range(iterations)]
        wall_s = time.perf_counter() - began
    comm.gather_text("", TAG)
    ranks = tuple(
        RankRuntime(rank, num_envs, num_envs * num_steps_per_env * iterations, tuple(each[rank] for each in seconds))
        for rank, num_envs in sorted(stepper.num_envs.items())
    )
    return RuntimeMeasurement(max(1, warm_up), warm_up_s, wall_s, stepper.compile_s, num_steps_per_env, ranks)


def _iterate(stepper: Stepper, num_steps: int, num_before: int) -> dict[int, float]:
    seconds = stepper.step(num_steps)
    beats.at_iteration(num_before + 1)
    return seconds
