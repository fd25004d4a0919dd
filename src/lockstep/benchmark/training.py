"""The training benchmark: the learner's own loop, measured on every rank between two points that all pass together."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.benchmark.apart import measure_apart
from lockstep.benchmark.assemble import Job, assemble
from lockstep.benchmark.measuring import Meter, ProcessReport, make_sampler, own_ranks, report_of
from lockstep.benchmark.options import SUCCESS_SHARE, Options, config_for
from lockstep.benchmark.schema import Artifacts, Bundle, Learning, Success
from lockstep.benchmark.work import work_of
from lockstep.core import beats
from lockstep.core.errors import RunError
from lockstep.distributed import heartbeat
from lockstep.distributed.timeouts import alone_s
from lockstep.recipes.catalog import make_task
from lockstep.session import clip
from lockstep.session.env_sensors import capture_env_sensors
from lockstep.session.film import check_rendering
from lockstep.session.process import memory_errors_in_words
from lockstep.session.train import check_start, checked_shares, join_team

if TYPE_CHECKING:
    from lockstep.core.types import Peers
    from lockstep.learn.config import TrainConfig
    from lockstep.learn.observer import Metrics
    from lockstep.session.framework import Framework, Learner

Finish = Callable[[Bundle], None]


def benchmark_training(config: TrainConfig, options: Options, prepare: Callable[[], object], finish: Finish) -> None:
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
    config = config_for(config, options)
    framework = check_start(config)
    if options.video:
        check_rendering(config, alone_s())
    heartbeat.begin()
    with beats.training(), ExitStack() as resources:
        resources.enter_context(framework.running())
        team = join_team(framework, config, resources)
        team.comm.on_main(lambda: str(prepare() or ""), "output")
        shares = checked_shares(config, team.comm.num_ranks)
        resources.enter_context(memory_errors_in_words(max(shares)))
        framework.prepare(config, team.comm.rank)
        learner = framework.make_learner(config, team, resources)
        framework.seed(config.seed, team.comm.rank, 0)
        ranks = own_ranks(team, shares)
        epilogue = _Epilogue(config, options, framework)
        alone = _Alone(framework.make_apart(config, team, resources), team.comm, options)
        meter = Meter(
            lambda: learner.runner.own_times,
            alone.measure,
            make_sampler(ranks),
            options.warm_up,
            options.iterations,
            epilogue.keep,
        )
        learner.runner.train(meter, learner.evaluation_env)
        alone.measure()
        report = report_of(meter, team, ranks, alone.mean_s)
        reports = gather_reports(report, team.comm)
        job = Job("training", config, tuple(sys.argv), work_of(config, make_task(config)), _learning(meter.recorded))
        with beats.within("save"):
            team.comm.on_main(lambda: epilogue.finish(assemble(job, reports), meter.recorded[-1], finish), "bundle")
        beats.enter("end")


def gather_reports(report: ProcessReport, comm: Peers) -> list[ProcessReport]:
    """Return the reports of all processes, on each of them."""
    texts = comm.gather_text(report.model_dump_json(), "benchmark")
    return [ProcessReport.model_validate_json(text) for text in texts]


class _Alone:
    """The training of this process alone, where its own work can't be told otherwise: before and after the common one,
    half of its iterations each, so that a machine that becomes slower makes both slower.

    Args:
        learner: that trains alone; None where that is not needed.
        comm: all processes, which wait for one another in any case.
        options: of the benchmark.
    """

    def __init__(self, learner: Learner | None, comm: Peers, options: Options) -> None:
        self._learner, self._comm, self._options = learner, comm, options
        self._seconds: list[float] = []

    def measure(self) -> None:
        """Train alone for a while, and meet the others."""
        if self._learner is not None:
            half = -(-self._options.iterations // 2)
            self._seconds += measure_apart(self._learner, self._comm, half, warm_up=max(2, self._options.warm_up))
        self._comm.gather_text("", "benchmark")

    @property
    def mean_s(self) -> float | None:
        """Of an iteration alone; None if there was none."""
        return sum(self._seconds) / len(self._seconds) if self._seconds else None


def _learning(recorded: list[Metrics]) -> Learning:
    returns = [metrics.get("mean_return") for metrics in recorded]
    return Learning(
        env_steps=int(recorded[-1]["env_steps"] or 0),
        mean_return=next((value for value in reversed(returns) if value is not None), None),
        curve=tuple((int(metrics["env_steps"] or 0), metrics.get("mean_return")) for metrics in recorded),
        metrics=dict(recorded[-1]),
        success=None,
    )


class _Epilogue:
    """What is done with the policy after the measured part, by the one process that there is then."""

    def __init__(self, config: TrainConfig, options: Options, framework: Framework) -> None:
        self._config, self._options, self._framework = config, options, framework
        self._content: dict[str, Any] | None = None
        self._iteration = 0

    def keep(self, iteration: int, content: dict[str, Any]) -> None:
        """Take the state of the training at its end."""
        if self._options.has_epilogue:
            self._iteration, self._content = iteration, content

    def finish(self, bundle: Bundle, metrics: Metrics, finish: Finish) -> str:
        """Film, look at sensors, judge; then hand on the bundle with what came of it.

        Raises:
            RunError: there is no film, or the policy has not learned; the bundle is written all the same.
        """
        problems: list[str] = []
        if self._options.check_success:
            success = self._success(metrics)
            if not success.reached:
                problems.append(
                    f"the policy reached a mean return of {success.mean_return:.4g}, and --check_success asks for "
                    f"{success.needed_return:.4g}; train longer (--iterations N)"
                )
            learning = bundle.learning and bundle.learning.model_copy(update={"success": success})
            bundle = bundle.model_copy(update={"learning": learning})
        if self._content is not None and (self._options.video or self._options.capture_env_sensors):
            artifacts, problem = self._artifacts()
            bundle = bundle.model_copy(update={"artifacts": artifacts})
            problems += [problem] if problem else []
        finish(bundle)
        if problems:
            raise RunError("; ".join(problems))
        return ""

    def _success(self, metrics: Metrics) -> Success:
        task = make_task(self._config)
        most = task.max_step_reward * self._config.env.max_episode_steps
        needed = SUCCESS_SHARE * most if self._options.success_return is None else self._options.success_return
        reached = float(metrics.get("eval/mean_return") or 0.0)
        return Success(mean_return=reached, needed_return=needed, reached=reached >= needed)

    def _artifacts(self) -> tuple[Artifacts, str]:
        """Make the film and the file of sensors beside the bundle; return them, and what went wrong."""
        assert self._options.output is not None and self._content is not None
        stem = self._options.output.with_suffix("")
        video, sensors = Path(f"{stem}_video.mp4"), Path(f"{stem}_sensors.npz")
        made, problem = Artifacts(), ""
        with tempfile.TemporaryDirectory() as folder:
            suffix = ".pt" if self._framework.name == "torch" else ""
            checkpoint = Path(folder) / f"model_{self._iteration}{suffix}"
            self._framework.save(self._content, checkpoint)
            stem.parent.mkdir(parents=True, exist_ok=True)
            if self._options.capture_env_sensors:
                capture_env_sensors(checkpoint, sensors)
                made = made.model_copy(update={"env_sensors": str(sensors)})
            if self._options.video:
                problem = clip.make_clip(checkpoint, video, lambda: False)
                made = made if problem else made.model_copy(update={"video": str(video)})
        return made, f"there is no {video}: {problem}" if problem else ""
