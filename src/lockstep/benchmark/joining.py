"""The way into a benchmark that is the same for all: the ranks meet, and rank 0 looks whether it can write."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lockstep.benchmark.hardware import own_cores
from lockstep.benchmark.options import TAG
from lockstep.benchmark.process_report import OwnRank, ProcessReport, own_ranks
from lockstep.benchmark.resources import Sampler
from lockstep.benchmark.schema import Bundle
from lockstep.core import beats
from lockstep.core.errors import LockstepError
from lockstep.core.interrupts import EXIT_CODES, StopReason
from lockstep.distributed import heartbeat
from lockstep.session.process import memory_errors_in_words
from lockstep.session.train import check_start, checked_shares, join_team

if TYPE_CHECKING:
    from lockstep.learn.config import TrainConfig
    from lockstep.session.framework import Framework, Team

Prepare = Callable[[], object]
"""Called on rank 0 before anything is built; raises what stands in the way of ``Finish``."""
Finish = Callable[[Bundle], None]
"""Writes and shows a bundle, on rank 0."""


class StoppedError(LockstepError):
    """A benchmark was asked to stop, and all ranks have; it leaves nothing behind.

    Args:
        reason: interrupted or preempted.
    """

    def __init__(self, reason: StopReason) -> None:
        super().__init__(f"{reason}: a benchmark that is stopped has measured nothing, and leaves nothing", shared=True)
        self.exit_code = EXIT_CODES[reason]


@dataclass(frozen=True)
class Joined:
    """A process of a benchmark, ready to build what it measures."""

    config: TrainConfig
    framework: Framework
    team: Team
    shares: tuple[int, ...]
    """Envs of each rank."""
    ranks: tuple[OwnRank, ...]
    """Of this process."""
    resources: ExitStack
    """Closed at the end of the benchmark."""

    def meet(self) -> None:
        """Wait until all processes have come."""
        self.team.comm.gather_text("", TAG)

    def make_sampler(self) -> Sampler:
        """Return what samples the resources of this process."""
        return Sampler(own_cores(), tuple(rank.gpu_uuid for rank in self.ranks if rank.gpu_uuid is not None))

    def share(self, report: ProcessReport) -> list[ProcessReport]:
        """Return the reports of all processes, on each of them."""
        return [
            ProcessReport.model_validate_json(text)
            for text in self.team.comm.gather_text(report.model_dump_json(), TAG)
        ]


@contextmanager
def joined(config: TrainConfig, prepare: Prepare) -> Iterator[Joined]:
    """Meet the other processes, and set this one up as a training would be.

    Raises:
        UsageError: whatever can't work, found before anything is built.
        RunError: processes are missing, or memory.
    """
    framework = check_start(config)
    heartbeat.begin()
    with beats.training(), ExitStack() as resources:
        resources.enter_context(framework.running())
        team = join_team(framework, config, resources)
        team.comm.on_main(lambda: str(prepare() or ""), "output")
        shares = checked_shares(config, team.comm.num_ranks)
        resources.enter_context(memory_errors_in_words(max(shares)))
        framework.prepare(config, team.comm.rank)
        yield Joined(config, framework, team, shares, own_ranks(team, shares), resources)
        beats.enter("end")
