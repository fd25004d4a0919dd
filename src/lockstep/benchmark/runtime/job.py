"""The runtime benchmark as a whole: the envs of every rank stepped with random actions, measured and reported."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.benchmark.assemble import Job, assemble
from lockstep.benchmark.joining import Finish, Joined, Prepare, joined
from lockstep.benchmark.process_report import ProcessReport, place_of, threads_of
from lockstep.benchmark.runtime.steps import RuntimeMeasurement, time_steps

if TYPE_CHECKING:
    from lockstep.benchmark.options import Options
    from lockstep.benchmark.resources import Interval
    from lockstep.learn.config import TrainConfig


def benchmark_runtime(config: TrainConfig, options: Options, prepare: Prepare, finish: Finish) -> None:
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
    with joined(config, prepare) as job:
        stepper = job.framework.make_stepper(config, job.team, job.resources)
        sampler = job.make_sampler()
        steps = config.agent.num_steps_per_env
        measured = time_steps(stepper, job.team.comm, steps, options.warm_up, options.iterations, sampler)
        threads = threads_of(job.team, stepper.env.engine)
        reports = job.share(_report(measured, job, threads, tuple(sampler.intervals())))
        about = Job("runtime", config, options.command)
        job.team.comm.on_main(lambda: finish(assemble(about, reports)) or "", "bundle")  # type: ignore[func-returns-value]


def _report(measured: RuntimeMeasurement, job: Joined, threads: int, intervals: tuple[Interval, ...]) -> ProcessReport:
    # The devices of a process work side by side: an iteration is over when the slowest is through.
    iteration_s = tuple(max(seconds) for seconds in zip(*(each.iteration_s for each in measured.ranks), strict=True))
    steps = sum(job.shares) * measured.num_steps_per_env
    return ProcessReport(
        **place_of(job.team.comm),
        ranks=job.ranks,
        threads=threads,
        warm_up_iterations=measured.warm_up_iterations,
        warm_up_s=measured.warm_up_s,
        warm_up_steps=steps * measured.warm_up_iterations,
        compile_s=measured.compile_s,
        wall_s=measured.wall_s,
        env_steps=steps * len(iteration_s),
        iteration_s=iteration_s,
        rank_s={each.rank: each.iteration_s for each in measured.ranks},
        phases_s={"rollout": iteration_s},
        exchanges=(),
        waits_s=(),
        alone_s=None,
        intervals=intervals,
    )
