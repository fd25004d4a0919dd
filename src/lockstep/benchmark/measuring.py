"""What one process has measured of its ranks, as it tells the others: times by iteration, exchanges, resources."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from lockstep.benchmark.hardware import gpu_of, own_cores, own_node
from lockstep.benchmark.resources import Interval, Sampler
from lockstep.benchmark.schema import NodeHardware, Record
from lockstep.core.gpu_mask import find_gpus
from lockstep.distributed.cores import threads_per_rank
from lockstep.distributed.topology import from_environment
from lockstep.learn.observer import nobody_asks

if TYPE_CHECKING:
    from lockstep.core.interrupts import StopReason
    from lockstep.core.types import Peers
    from lockstep.learn.observer import Metrics, OwnTimes
    from lockstep.session.framework import Team


class OwnRank(Record):
    """A rank of this process."""

    rank: int
    device: str
    gpu_uuid: str | None
    pci_bus_id: str | None
    num_envs: int


class OwnExchange(Record):
    """One of the exchanges that every iteration has, in their order."""

    tag: str
    num_bytes: int


class ProcessReport(Record):
    """All that one process has to say."""

    process: int
    local_rank: int
    node: int | None
    """As torchrun numbers it."""
    hardware: NodeHardware
    ranks: tuple[OwnRank, ...]
    cores: tuple[int, ...] | None
    threads: int
    warm_up_iterations: int
    warm_up_s: float
    warm_up_steps: int
    """Of all ranks, as the learner counts them."""
    compile_s: float | None
    wall_s: float
    """Of all measured iterations, from the moment that all ranks began them together."""
    env_steps: int
    """Of all ranks, in the measured iterations."""
    iteration_s: tuple[float, ...]
    rank_s: dict[int, tuple[float, ...]] = Field(default_factory=dict)
    """The same for each rank, where the ranks of a process are timed one by one."""
    phases_s: dict[str, tuple[float, ...]]
    """By phase, of each measured iteration."""
    exchanges: tuple[OwnExchange, ...]
    waits_s: tuple[tuple[float, ...], ...]
    """``(num_iterations, num_exchanges)``."""
    alone_s: float | None
    """Mean iteration without the other processes, where that is how its own work is told from waiting."""
    intervals: tuple[Interval, ...]


class Meter:
    """Follows a training from its first iteration to its last, and keeps what this process did; it is the ``Observer``.

    The first iterations warm up. Then all processes meet, and the clock starts.

    Args:
        own_times: returns what the learner says of this process's last iteration.
        meet: called when the warm-up is over; returns when all processes have called it.
        sampler: of this process's resources.
        warm_up: iterations that are not measured.
        iterations: that are, after these; further ones are not.
        keep: takes the state of the training when it is over.
        clock: in seconds.
    """

    save_due = False
    stop_requested: StopReason | None = nobody_asks()

    def __init__(
        self,
        own_times: Callable[[], OwnTimes | None],
        meet: Callable[[], object],
        sampler: Sampler,
        warm_up: int,
        iterations: int,
        keep: Callable[[int, dict[str, Any]], None] = lambda iteration, content: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._own_times, self._meet, self._sampler = own_times, meet, sampler
        self._warm_up, self._iterations, self._keep, self._clock = warm_up, iterations, keep, clock
        self._sampling = ExitStack()
        self._began = self._last = clock()
        self.warm_up_s = 0.0
        self.warm_up_steps = self._steps_at_end = 0
        self.compile_s: float | None = None
        self.recorded: list[Metrics] = []
        """Of every iteration, those of the warm-up included."""
        self.iteration_s: list[float] = []
        self.own: list[OwnTimes | None] = []
        if warm_up == 0:
            self._begin()

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
        self.recorded.append(dict(metrics))
        if len(self.recorded) > self._warm_up:
            if len(self.iteration_s) < self._iterations:
                self._measure(now, metrics)
            return
        compile_s = metrics.get("time/compile")
        if compile_s is not None:
            self.compile_s = (self.compile_s or 0.0) + compile_s
        if len(self.recorded) == self._warm_up:
            self.warm_up_s, self.warm_up_steps = now - self._began, int(metrics["env_steps"] or 0)
            self._begin()

    def _measure(self, now: float, metrics: Metrics) -> None:
        self.iteration_s.append(now - self._last)
        self.own.append(self._own_times())
        self._last, self._steps_at_end = now, int(metrics["env_steps"] or 0)
        if len(self.iteration_s) == self._iterations:
            self._sampling.close()

    def save(self, iteration: int, content: dict[str, Any]) -> None:
        """Hand on the state of the training; the clock has been read by then."""
        self._keep(iteration, content)

    def save_failure(self, iteration: int, content: dict[str, Any]) -> Path | None:
        """Keep nothing."""

    def intervals(self) -> tuple[Interval, ...]:
        """Return what was used in the measured iterations."""
        return tuple(self._sampler.intervals())

    def _begin(self) -> None:
        self._sampling.enter_context(self._sampler)
        self._meet()
        self._began = self._last = self._clock()


def own_ranks(team: Team, shares: Sequence[int]) -> tuple[OwnRank, ...]:
    """Return the ranks of this process.

    Args:
        team: of the job.
        shares: envs of each rank.
    """
    process, gpus = team.comm.rank, find_gpus()
    found = []
    for rank, place in enumerate(team.ranks):
        if int(place.get("process", rank)) != process:
            continue
        device = str(place["device"])
        order = os.environ.get("CUDA_DEVICE_ORDER")
        gpu = gpu_of(device, gpus, os.environ.get("CUDA_VISIBLE_DEVICES"), order)
        found.append(
            OwnRank(
                rank=rank,
                device=device,
                gpu_uuid=None if gpu is None else gpu.uuid,
                pci_bus_id=None if gpu is None else gpu.pci_bus_id,
                num_envs=shares[rank],
            )
        )
    return tuple(found)


def make_sampler(ranks: Sequence[OwnRank]) -> Sampler:
    """Return what samples the resources of this process."""
    return Sampler(own_cores(), tuple(rank.gpu_uuid for rank in ranks if rank.gpu_uuid is not None))


def report_of(meter: Meter, team: Team, ranks: tuple[OwnRank, ...], alone_s: float | None = None) -> ProcessReport:
    """Return what this process has measured of a training.

    Args:
        meter: that has followed it.
        team: of the job.
        ranks: of this process.
        alone_s: its mean iteration without the others.
    """
    own = [times for times in meter.own if times is not None]
    is_told = len(own) == len(meter.own)
    exchanges, waits_s = _exchanges(own) if is_told else ((), ())
    return ProcessReport(
        **place_of(team.comm),
        ranks=ranks,
        threads=threads_of(team),
        warm_up_iterations=meter.num_warm_up,
        warm_up_s=meter.warm_up_s,
        warm_up_steps=meter.warm_up_steps,
        compile_s=meter.compile_s,
        wall_s=meter.wall_s,
        env_steps=meter.env_steps,
        iteration_s=tuple(meter.iteration_s),
        phases_s=_phases(own) if is_told else {},
        exchanges=exchanges,
        waits_s=waits_s,
        alone_s=alone_s,
        intervals=meter.intervals(),
    )


def place_of(comm: Peers) -> Mapping[str, Any]:
    """Return where this process runs, as fields of a report."""
    topology = from_environment()
    return {
        "process": comm.rank,
        "local_rank": topology.local_rank,
        "node": topology.node,
        "hardware": own_node(find_gpus()),
        "cores": own_cores(),
    }


def threads_of(team: Team) -> int:
    """Return how many threads this process keeps busy: as many as torch was given, or its share of the cores."""
    torch: Any = sys.modules.get("torch")
    return threads_per_rank() if torch is None or team.mesh is not None else int(torch.get_num_threads())


def _phases(own: Sequence[OwnTimes]) -> dict[str, tuple[float, ...]]:
    return {name: tuple(times.phases_s[name] for times in own) for name in own[0].phases_s} if own else {}


def _exchanges(own: Sequence[OwnTimes]) -> tuple[tuple[OwnExchange, ...], tuple[tuple[float, ...], ...]]:
    """Return the exchanges that every iteration has, and the wait of each; nothing if iterations differ."""
    kinds = {tuple(wait.tag for wait in times.waits) for times in own}
    if len(kinds) != 1:
        return (), ()
    exchanges = tuple(OwnExchange(tag=wait.tag, num_bytes=wait.num_bytes) for wait in own[0].waits)
    return exchanges, tuple(tuple(wait.seconds for wait in times.waits) for times in own)
