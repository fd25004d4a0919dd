"""The runtime benchmark as a whole: the envs of every rank stepped with random actions, measured and reported."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

from lockstep.benchmark.assemble import Job, assemble
from lockstep.benchmark.measuring import OwnRank, ProcessReport, make_sampler, own_ranks, place_of, threads_of
from lockstep.benchmark.resources import Interval
from lockstep.benchmark.runtime import RuntimeMeasurement, measure_runtime
from lockstep.benchmark.training import Finish, gather_reports
from lockstep.core import beats
from lockstep.distributed import heartbeat
from lockstep.session.process import memory_errors_in_words
from lockstep.session.train import check_start, checked_shares, join_team

if TYPE_CHECKING:
    from lockstep.benchmark.options import Options
    from lockstep.learn.config import TrainConfig
    from lockstep.session.framework import Team


def benchmark_runtime(config: TrainConfig, options: Options, prepare: Callable[[], object], finish: Finish) -> None:
    """Step envs, measure, and hand the bundle to ``finish`` on rank 0. All processes of the job call it.

    Args:
        config: of a training with these envs.
        options: of the benchmark.
        prepare: called on rank 0 before anything is built; raises what stands in the way of ``finish``.
        finish: writes and shows the bundle.

    Raises:
        UsageError: whatever can't work, found before anything is built.
        RunError: a process has ended, or the disk refused.
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
        ranks = own_ranks(team, shares)
        sampler = make_sampler(ranks)
        measured = measure_runtime(
            config,
            framework,
            team,
            resources,
            warm_up=options.warm_up,
            iterations=options.iterations,
            watching=sampler,
        )
        reports = gather_reports(_report(measured, team, ranks, sum(shares), tuple(sampler.intervals())), team.comm)
        job = Job("runtime", config, tuple(sys.argv))
        team.comm.on_main(lambda: finish(assemble(job, reports)) or "", "bundle")  # type: ignore[func-returns-value]


def _report(
    measured: RuntimeMeasurement,
    team: Team,
    ranks: tuple[OwnRank, ...],
    total_envs: int,
    intervals: tuple[Interval, ...],
) -> ProcessReport:
    # The devices of a process work side by side: an iteration is over when the slowest is through.
    iteration_s = tuple(max(seconds) for seconds in zip(*(each.iteration_s for each in measured.ranks), strict=True))
    steps = total_envs * measured.num_steps_per_env
    return ProcessReport(
        **place_of(team.comm),
        ranks=ranks,
        threads=threads_of(team),
        warm_up_iterations=measured.warm_up_iterations,
        warm_up_s=measured.warm_up_s,
        warm_up_steps=steps * measured.warm_up_iterations,
        compile_s=measured.compile_s,
        wall_s=sum(iteration_s),
        env_steps=steps * len(iteration_s),
        iteration_s=iteration_s,
        rank_s={each.rank: each.iteration_s for each in measured.ranks},
        phases_s={"rollout": iteration_s},
        exchanges=(),
        waits_s=(),
        alone_s=None,
        intervals=intervals,
    )
