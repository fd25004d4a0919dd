"""What follows a training: run directory, metrics, display and stop requests, as the training loop sees them."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from lockstep.core.errors import LockstepError
from lockstep.core.interrupts import StopReason, StopRequest
from lockstep.core.metrics import Metrics, MetricsWriter
from lockstep.core.null_run_directory import NullRunDirectory
from lockstep.core.progress import Progress
from lockstep.core.run_directory import RunDirectory, Status

if TYPE_CHECKING:
    from lockstep.learn.config import TrainConfig


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
    """

    def __init__(
        self,
        config: TrainConfig,
        run: RunDirectory | NullRunDirectory,
        progress: Progress,
        request: StopRequest,
        so_far: Metrics,
        command: str = "train",
    ) -> None:
        self._config, self._run, self._progress, self._request = config, run, progress, request
        self._last = so_far
        self._command = f"lockstep {command}"
        self._began_at = self._counters()[0]
        self._metrics = MetricsWriter()

    @property
    def stop_requested(self) -> StopReason | None:
        """Why the training should save and stop, or None."""
        return self._request.status

    def record(self, metrics: Metrics) -> None:
        """Write one iteration's metrics, show them, and say in ``progress.json`` how far the run is."""
        self._last = metrics
        self._metrics.record(metrics)
        iteration, env_steps, wall_s = self._counters()
        self._progress.update(metrics, iteration, self._config.max_iterations, env_steps, wall_s)
        self._write_progress("running")

    def save(self, iteration: int, content: dict[str, Any]) -> None:
        """Write a checkpoint."""
        from lockstep.learn.torch.checkpoint import save

        self._run.save_checkpoint(iteration, lambda path: save(content, path), self._config.checkpoints.keep)
        self._write_progress("running")

    def save_failure(self, iteration: int, content: dict[str, Any]) -> Path | None:
        """Write the state of a training that can't go on to ``failure_<iteration>.pt``."""
        from lockstep.learn.torch.checkpoint import save

        return self._run.save_failure(iteration, lambda path: save(content, path))

    def finish(self, status: Literal["finished"] | StopReason, warnings: Mapping[str, int]) -> None:
        """Note the end, draw the curve, and say how often the engine gave which warning."""
        self._write_progress(status)
        self._progress.stop()
        if warnings:
            counts = ", ".join(f"{name} {count} times" for name, count in warnings.items())
            self._progress.message(f"physics warnings: {counts}; see {self._run.mujoco_log_path}")
        try:
            self._run.draw_curve()
        except Exception as error:  # a picture, and whatever stands in its way, decides nothing
            reason = str(error).partition("\n")[0] or type(error).__name__
            self._progress.message(f"lockstep: warning: there is no curve.png: {reason}")
        self._progress.message(self._farewell(status))

    def _farewell(self, status: Literal["finished"] | StopReason) -> str:
        path, total = self._run.path, self._config.max_iterations
        if status != "finished":
            return f"{status} and saved: continue with {self._command} --resume {path}"
        if self._counters()[0] == self._began_at < total:
            return f"finished without an iteration: {path} is at {self._began_at} of {total}"
        if self._counters()[0] == self._began_at:
            return (
                f"nothing to do: {path} is at iteration {total} of {total}; go on with "
                f"{self._command} --resume {path} --max_iterations {2 * total}"
            )
        if self._config.runner:  # whose policy only its own code can play
            return f"finished: the checkpoints are in {path}"
        return f"finished: play it with lockstep play --run {path}"

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

    def _fail(self, error: BaseException) -> None:
        reason = str(error) if isinstance(error, LockstepError) else f"{type(error).__name__}: {error}"
        with contextlib.suppress(LockstepError):
            self._write_progress("failed", reason.partition("\n")[0])

    def _write_progress(self, status: Status, reason: str | None = None) -> None:
        iteration, env_steps, wall_s = self._counters()
        self._run.write_progress(iteration, self._config.max_iterations, env_steps, wall_s, status, reason)

    def _counters(self) -> tuple[int, int, float]:
        last = self._last
        return int(last["iteration"] or 0), int(last["env_steps"] or 0), float(last["wall_s"] or 0.0)
