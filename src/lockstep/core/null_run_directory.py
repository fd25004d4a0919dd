"""The run directory of a rank that writes nothing."""

import contextlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lockstep.core import metrics
from lockstep.core.progress import Progress
from lockstep.core.rank_log import RankLog
from lockstep.core.run_directory import Status
from lockstep.core.saves import BackgroundSaver, NullSaver

LOG_ALL_RANKS = "LOCKSTEP_LOG_ALL_RANKS"
"""Set to 1 by the launcher's ``--log_all_ranks``."""


class NullRunDirectory:
    """What ranks other than 0 get: the same calls, nothing written but the rank's own log."""

    config_path = mujoco_log_path = Path(os.devnull)
    named_checkpoint = None

    def __init__(self, path: Path) -> None:
        self.path = path

    def begin_attempt(
        self,
        config_yaml: str,
        ranks: list[dict[str, Any]] | None = None,
        attempt: Mapping[str, Any] | None = None,
    ) -> None:
        """Do nothing."""

    def rank_log(self, rank: int) -> RankLog:
        """Return a context that copies what this process prints into the rank's log, on this host's own disk."""
        with contextlib.suppress(OSError):  # a log that can't be written stops no training
            (self.path / "ranks").mkdir(parents=True, exist_ok=True)
        return RankLog(self.path / "ranks" / f"rank_{rank}.log")

    def progress(self, task: str, log: RankLog) -> Progress:
        """Return a display that writes to the log alone, unless all ranks are to be seen (``--log_all_ranks``)."""
        return Progress(task, self.path, log, on_screen=os.environ.get(LOG_ALL_RANKS) == "1")

    def open_metrics(
        self,
        logger: metrics.Logger,
        iteration: int = 0,
        config: Mapping[str, Any] | None = None,
    ) -> metrics.MetricsWriter:
        """Return a writer without sinks."""
        return metrics.MetricsWriter()

    def truncate_metrics(self, iteration: int) -> None:
        """Do nothing."""

    def draw_curve(self) -> None:
        """Do nothing."""

    def checkpoints(self) -> list[Path]:
        """Return nothing."""
        return []

    def save_checkpoint(self, iteration: int, write: Callable[[Path], object], keep: int = 5) -> None:
        """Do nothing; ``write`` is not called."""

    def saver(self, keep: int, saved: Callable[[], object]) -> BackgroundSaver:
        """Return one that saves nothing."""
        return NullSaver()

    def save_failure(self, iteration: int, write: Callable[[Path], object]) -> None:
        """Do nothing; ``write`` is not called."""

    def write_progress(
        self,
        iteration: int,
        max_iterations: int,
        env_steps: int,
        wall_s: float,
        status: Status = "running",
        reason: str | None = None,
    ) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""
