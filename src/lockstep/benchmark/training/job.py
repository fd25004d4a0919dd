"""The training benchmark: the learner's own loop, measured on every rank between two points that all pass together."""

from __future__ import annotations

from dataclasses import replace
from math import isinf
from typing import TYPE_CHECKING

from lockstep.benchmark.assemble import Job, assemble
from lockstep.benchmark.joining import Finish, Joined, Prepare, StoppedError, joined
from lockstep.benchmark.options import Options, config_for
from lockstep.benchmark.process_report import ProcessReport, place_of, threads_of
from lockstep.benchmark.schema import Learning
from lockstep.benchmark.training.apart import measure_apart
from lockstep.benchmark.training.epilogue import Epilogue
from lockstep.benchmark.training.exchanges import exchanges_of
from lockstep.benchmark.training.meter import Meter
from lockstep.benchmark.training.work import work_of
from lockstep.core import beats
from lockstep.core.errors import RunError, UsageError
from lockstep.core.interrupts import watch
from lockstep.distributed.stopping import ending_in_time
from lockstep.distributed.timeouts import alone_s
from lockstep.distributed.topology import from_environment
from lockstep.recipes.catalog import TASKS, make_task
from lockstep.session.film import check_rendering
from lockstep.session.framework import count_ranks

if TYPE_CHECKING:
    from lockstep.learn.config import TrainConfig
    from lockstep.learn.observer import Metrics
    from lockstep.session.framework import Learner


def benchmark_training(config: TrainConfig, options: Options, prepare: Prepare, finish: Finish) -> None:
    """Train, measure, and hand the bundle to ``finish`` on rank 0. All processes of the job call it.

    Args:
        config: of the training.
        options: of the benchmark.
        prepare: called on rank 0 before anything is built; raises what stands in the way of ``finish``.
        finish: writes and shows the bundle.

    Raises:
        UsageError: whatever can't work, found before anything is built.
        RunError: the training failed, or the disk refused.
    """
    options = _learning_by_then(config, options)
    config = config_for(config, options)
    _check_epilogue(config, options)
    if options.video:
        check_rendering(config, alone_s())
    with joined(config, prepare) as job:
        learner = job.framework.make_learner(config, job.team, job.resources)
        job.framework.seed(config.seed, job.team.comm.rank, 0)
        request = job.resources.enter_context(watch())
        job.resources.enter_context(ending_in_time())
        epilogue = Epilogue(config, options, job.framework)
        alone = _Alone(job, options)
        meter = Meter(
            lambda: learner.runner.own_times,
            job.team.comm.take_waits,
            job.meet,
            job.make_sampler(),
            warm_up=options.warm_up,
            iterations=options.iterations,
            prepare=alone.measure,
            stop=lambda: request.status,
            keep=epilogue.keep,
        )
        status = learner.runner.train(meter, learner.evaluation_env)
        if status != "finished":
            raise StoppedError(status)
        _require_all(meter, options)
        alone.measure()
        reports = job.share(_report(meter, job, learner.engine, alone.mean_s))
        about = Job("training", config, options.command, work_of(config, make_task(config)), _learning(meter.recorded))
        with beats.within("save"):
            job.team.comm.on_main(
                lambda: epilogue.finish(assemble(about, reports), meter.recorded[-1], finish), "bundle"
            )


def _learning_by_then(config: TrainConfig, options: Options) -> Options:
    """Return options whose warm-up lasts until the learner learns: before that its iterations are of another kind."""
    num_ranks = count_ranks(config, from_environment().world_size)
    before = config.agent.iterations_before_learning(sum(config.envs_by_rank(num_ranks)))
    return replace(options, warm_up=before + options.warm_up)


def _check_epilogue(config: TrainConfig, options: Options) -> None:
    """Refuse what other people's envs can't give once the training is measured."""
    suite = TASKS.get(config.task).suite
    if options.check_success and options.success_return is None and isinf(make_task(config).max_step_reward):
        raise UsageError(
            f"--check_success: task {config.task} does not say how much an episode can give; add --success_return R"
        )
    if options.capture_env_sensors and suite is not None and suite.framework != "torch":
        raise UsageError(
            f"--capture_env_sensors is not available: task {config.task} is stepped by {suite.framework} alone; leave "
            "it out"
        )


class _Alone:
    """The training of this process alone, where its own work can't be told otherwise: before and after the common one,
    half of its iterations each, so that a machine that becomes slower makes both slower.

    Args:
        job: this process of it.
        options: of the benchmark.
    """

    def __init__(self, job: Joined, options: Options) -> None:
        self._learner: Learner | None = job.framework.make_apart(job.config, job.team, job.resources)
        self._comm, self._options = job.team.comm, options
        self._seconds: list[float] = []

    def measure(self) -> None:
        """Train alone for a while."""
        if self._learner is not None:
            half = -(-self._options.iterations // 2)
            self._seconds += measure_apart(self._learner, self._comm, half, warm_up=max(2, self._options.warm_up))

    @property
    def mean_s(self) -> float | None:
        """Of an iteration alone; None if there was none."""
        return sum(self._seconds) / len(self._seconds) if self._seconds else None


def _require_all(meter: Meter, options: Options) -> None:
    """Refuse to report on a learner that has not done what it was to do.

    Raises:
        RunError: it has recorded fewer iterations.
    """
    if len(meter.iterations) < options.iterations:
        raise RunError(
            f"the learner has recorded {len(meter.recorded)} iterations, and {options.warm_up} to warm up and "
            f"{options.iterations} to measure were asked for; it must call record() once in each of max_iterations",
            shared=True,
        )


def _report(meter: Meter, job: Joined, engine: object, alone_s: float | None) -> ProcessReport:
    own = [iteration.own for iteration in meter.iterations]
    told = [times for times in own if times is not None]
    is_told = len(told) == len(own)
    exchanges, waits_s = exchanges_of(meter.iterations) if is_told else ((), ())
    return ProcessReport(
        **place_of(job.team.comm),
        ranks=job.ranks,
        threads=threads_of(job.team, engine),
        warm_up_iterations=meter.num_warm_up,
        warm_up_s=meter.warm_up_s,
        warm_up_steps=meter.warm_up_steps,
        compile_s=meter.compile_s,
        wall_s=meter.wall_s,
        env_steps=meter.env_steps,
        iteration_s=tuple(iteration.seconds for iteration in meter.iterations),
        phases_s={name: tuple(times.phases_s[name] for times in told) for name in told[0].phases_s} if is_told else {},
        exchanges=exchanges,
        waits_s=waits_s,
        alone_s=alone_s,
        intervals=meter.intervals(),
    )


def _learning(recorded: list[Metrics]) -> Learning:
    returns = [metrics.get("mean_return") for metrics in recorded]
    return Learning(
        env_steps=int(recorded[-1]["env_steps"] or 0),
        mean_return=next((value for value in reversed(returns) if value is not None), None),
        curve=tuple((int(metrics["env_steps"] or 0), metrics.get("mean_return")) for metrics in recorded),
        metrics=dict(recorded[-1]),
        success=None,
    )
