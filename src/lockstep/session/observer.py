"""What follows a training: run directory, metrics, display and stop requests, as the training loop sees them."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from lockstep.core import beats
from lockstep.core.errors import LockstepError, RunError, in_one_line
from lockstep.core.interrupts import StopReason, StopRequest
from lockstep.core.metrics import Metrics, MetricsWriter
from lockstep.core.null_run_directory import NullRunDirectory
from lockstep.core.progress import Progress
from lockstep.core.refusals import Refusals
from lockstep.core.run_directory import RunDirectory, Status
from lockstep.core.saves import Saved, saving
from lockstep.distributed.topology import from_environment
from lockstep.session.attempts import RUN_KEY
from lockstep.session.framework import framework_of

if TYPE_CHECKING:
    from lockstep.learn.config import TrainConfig


RETRY_S = 60.0
"""When a checkpoint that the disk refused is tried again, if none is due before."""

_CHECKPOINTS_MEANWHILE = "the training goes on, and tries again with the next checkpoint"
_METRICS_MEANWHILE = "the training goes on, and keeps the numbers until they can be written"
_PROGRESS_MEANWHILE = "the training goes on, and tries again in each iteration"


class RunObserver:
    """Writes and shows one training; a context manager that notes in ``progress.json`` how it ended.

    Args:
        config: of the run.
        run: where everything goes.
        progress: the display.
        request: what the outside asked for.
        so_far: iteration, env_steps and wall_s that the training goes on after; what an earlier attempt recorded beyond
            is dropped.
        command: of lockstep, that goes on with such a job.
        clock: in seconds.
    """

    def __init__(
        self,
        config: TrainConfig,
        run: RunDirectory | NullRunDirectory,
        progress: Progress,
        request: StopRequest,
        so_far: Metrics,
        command: str = "train",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config, self._run, self._progress, self._request = config, run, progress, request
        self._last = so_far
        self._command = command
        self._began_at = self._counters()[0]
        self._metrics = MetricsWriter()
        self._clock, self._saved_at_s = clock, clock()
        self._refusals = Refusals(config.checkpoints.on_error, progress.message, clock)
        self._saver = run.saver(config.checkpoints.keep, self._name_checkpoint)
        self._failed_save: Saved | None = None
        self._writing_progress = threading.Lock()

    @property
    def stop_requested(self) -> StopReason | None:
        """Why the training should save and stop, or None."""
        return self._request.status

    @property
    def save_due(self) -> bool:
        """Whether the last checkpoint is ``checkpoints.interval_s`` old, or the disk refused it a minute ago."""
        age_s, interval_s = self._clock() - self._saved_at_s, self._config.checkpoints.interval_s
        return 0 < interval_s <= age_s or (self._failed_save is not None and age_s >= RETRY_S)

    def record(self, metrics: Metrics) -> None:
        """Write one iteration's metrics, show them, and say in ``progress.json`` how far the run is.

        Raises:
            RunError: the disk refuses, and the config says that this stops the training.
        """
        self._last = metrics
        self._look_at_saves()
        self._refusals.attempt("metrics", lambda: self._metrics.record(metrics), _METRICS_MEANWHILE)
        iteration, env_steps, wall_s = self._counters()
        self._progress.update(metrics, iteration, self._config.max_iterations, env_steps, wall_s)
        self._refusals.attempt("progress.json", lambda: self._write_progress("running"), _PROGRESS_MEANWHILE)

    def save(self, iteration: int, content: dict[str, Any]) -> None:
        """Begin to write a checkpoint, once the one before is written.

        Raises:
            RunError: the disk refused the one before, and the config says that this stops the training.
        """
        self._saver.wait()
        self._look_at_saves()
        self._saved_at_s = self._clock()
        self._saver.start(iteration, lambda: framework_of(self._config).snapshot(content))

    def settle(self) -> str:
        """Wait for the checkpoint under way; return the path of the newest, "" if there is none.

        Raises:
            RunError: the newest checkpoint could not be written, so that the state of the training is not on the disk.
        """
        self._saver.wait()
        self._look_at_saves()
        newest = next(iter(self._run.checkpoints()), None)
        if self._failed_save is None:
            return str(newest or "")
        kept = f"the newest on the disk is {newest.name}" if newest else "there is none on the disk"
        raise RunError(
            f"the checkpoint of iteration {self._failed_save.iteration} is not saved, {kept}: "
            f"{self._failed_save.error}; then continue with {self._resume_command()}"
        )

    def save_failure(self, iteration: int, content: dict[str, Any]) -> Path | None:
        """Write the state of a training that can't go on to ``failure_<iteration>`` (torch: with ``.pt``)."""
        return self._run.save_failure(iteration, lambda path: framework_of(self._config).save(content, path))

    def finish(self, status: Literal["finished"] | StopReason, warnings: Mapping[str, int]) -> None:
        """Note the end, draw the curve, and say how often the engine gave which warning.

        A preempted training draws none: it has seconds to be gone, and goes on elsewhere.
        """
        self._refusals.attempt("metrics", self._metrics.flush, "they are lost")
        self._write_progress(status)
        self._progress.stop()
        if self._metrics.num_missing:
            self._progress.message(f"lockstep: warning: the metrics of {self._metrics.num_missing} iterations are lost")
        if warnings:
            counts = ", ".join(f"{name} {count} times" for name, count in warnings.items())
            self._progress.message(f"physics warnings: {counts}; see {self._run.mujoco_log_path}")
        try:
            if status != "preempted":
                self._run.draw_curve()
        except Exception as error:  # a picture, and whatever stands in its way, decides nothing
            reason = str(error).partition("\n")[0] or type(error).__name__
            self._progress.message(f"lockstep: warning: there is no curve.png: {reason}")
        self._progress.message(self._farewell(status))

    def _farewell(self, status: Literal["finished"] | StopReason) -> str:
        path, total = self._run.path, self._config.max_iterations
        if status != "finished":
            if status == "preempted" and os.environ.get(RUN_KEY):
                return f"{status} and saved: {path} goes on when this job starts again"
            return f"{status} and saved: continue with {self._resume_command()}"
        if self._counters()[0] == self._began_at < total:
            return f"finished without an iteration: {path} is at {self._began_at} of {total}"
        if self._counters()[0] == self._began_at:
            return (
                f"nothing to do: {path} is at iteration {total} of {total}; go on with "
                f"{self._resume_command()} --max_iterations {2 * total}"
            )
        if self._config.runner:  # whose policy only its own code can play
            return f"finished: the checkpoints are in {path}"
        return f"finished: play it with lockstep play --run {path}"

    def _resume_command(self) -> str:
        """Return the command that goes on with the run; on CPU cores nothing else says how many ranks there are."""
        is_counted = self._command == "train_multigpu" and self._config.device == "cpu"
        ranks = f" --num_gpus {from_environment().local_world_size}" if is_counted else ""
        return f"lockstep {self._command} --resume {self._run.path}{ranks}"

    def __enter__(self) -> Self:
        try:
            iteration = self._counters()[0]
            config = self._config.model_dump(mode="json")
            self._metrics = self._run.open_metrics(self._config.logger, iteration, config)
            self._write_progress("running")
        except BaseException as error:
            self._fail(error)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._fail(error)
        self._metrics.close()

    def _look_at_saves(self) -> None:
        """Take how saves ended: what the disk refused is told or raised, any other error is raised."""
        for saved in self._saver.take_results():
            if saved.error is not None and not isinstance(saved.error, RunError):
                raise saved.error
            self._failed_save = saved if saved.error else None
            self._refusals.note("checkpoints", saved.error, _CHECKPOINTS_MEANWHILE)

    def _name_checkpoint(self) -> None:
        """Say in ``progress.json`` which checkpoint is the newest now; in the thread that has written it."""
        with contextlib.suppress(RunError):  # the next iteration tries again, and tells
            self._write_progress("running")

    def _fail(self, error: BaseException) -> None:
        with saving(), beats.within("save"):
            self._saver.wait()  # it may be whole in a moment, and is the last
        with contextlib.suppress(LockstepError):
            self._write_progress("failed", in_one_line(error))

    def _write_progress(self, status: Status, reason: str | None = None) -> None:
        with self._writing_progress:
            iteration, env_steps, wall_s = self._counters()
            self._run.write_progress(iteration, self._config.max_iterations, env_steps, wall_s, status, reason)

    def _counters(self) -> tuple[int, int, float]:
        last = self._last
        return int(last["iteration"] or 0), int(last["env_steps"] or 0), float(last["wall_s"] or 0.0)
