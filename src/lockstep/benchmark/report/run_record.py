"""What a run directory holds, read with care: a training may be writing there, and a kill may have left half of it."""

import contextlib
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import yaml

from lockstep.core import metrics
from lockstep.core.files import is_file
from lockstep.core.run_directory import check_run_directory
from lockstep.core.runs import attempts_of, progress_of, run_info

_MAX_CONFIG_BYTES = 256 * 1024
_MAX_ITERATIONS = 2_000_000  # of which a page still shows a line; about a gigabyte of metrics


@dataclass(frozen=True)
class RunRecord:
    """One run; ``columns`` maps each metric to its values ``(num_iterations,)`` float64, NaN where there is none."""

    path: Path
    task: str
    config: str
    info: Mapping[str, Any]
    progress: Mapping[str, Any]
    attempts: tuple[Mapping[str, Any], ...]
    columns: Mapping[str, npt.NDArray[np.float64]]
    notes: tuple[str, ...]

    @property
    def num_iterations(self) -> int:
        """How many iterations have metrics."""
        return next(iter(self.columns.values())).size if self.columns else 0

    def last(self, name: str) -> float | None:
        """Return the newest value of a metric."""
        values = self.columns.get(name, np.empty(0))
        known = values[np.isfinite(values)]
        return float(known[-1]) if known.size else None

    def named(self, prefix: str) -> dict[str, npt.NDArray[np.float64]]:
        """Return the metrics whose names begin so and that have a value, by the rest of the name."""
        return {
            name.removeprefix(prefix): values
            for name, values in self.columns.items()
            if name.startswith(prefix) and np.isfinite(values).any()
        }


def read_run(path: Path) -> RunRecord:
    """Read a run directory; what is damaged of it is left out and noted.

    Raises:
        UsageError: it is no run directory.
    """
    check_run_directory(path)
    notes: list[str] = []
    config, task = _config(path, notes)
    progress = progress_of(path)
    if not progress:
        notes.append("progress.json is missing or damaged: how far the run came is taken from its metrics.")
    return RunRecord(
        path=path,
        task=task or path.resolve().parent.name,
        config=config,
        info=run_info(path),
        progress=progress,
        attempts=tuple(attempts_of(path)),
        columns=_columns(path / "metrics.jsonl", notes),
        notes=tuple(notes),
    )


def _config(path: Path, notes: list[str]) -> tuple[str, str]:
    """Return the config's text, and the task that it names."""
    text = ""
    with contextlib.suppress(OSError), (path / "config.yaml").open("rb") as file:
        text = file.read(_MAX_CONFIG_BYTES).decode(errors="replace")
    task = None
    with contextlib.suppress(yaml.YAMLError, RecursionError, ValueError):
        content = yaml.safe_load(text)
        task = content.get("task") if isinstance(content, dict) else None
    if not isinstance(task, str):
        notes.append("config.yaml is damaged or names no task.")
        return text, ""
    return text, task


def _columns(path: Path, notes: list[str]) -> dict[str, npt.NDArray[np.float64]]:
    if not is_file(path):
        notes.append("There is no metrics.jsonl: no iteration has ended yet, or the file is gone.")
        return {}
    found: dict[str, list[float]] = defaultdict(list)
    num_lines = num_records = 0
    try:
        with path.open("rb") as file:
            num_lines = sum(1 for line in file if line.strip())
        for record in metrics.read(path):
            if num_records == _MAX_ITERATIONS:
                notes.append(f"Only the first {_MAX_ITERATIONS:,} iterations are shown.")
                break
            for name, value in record.items():
                column = found[name]
                column.extend([math.nan] * (num_records - len(column)))
                column.append(_number(value))
            num_records += 1
    except OSError as error:
        notes.append(f"metrics.jsonl can't be read: {error.strerror}.")
        return {}
    if num_records < num_lines and num_records < _MAX_ITERATIONS:
        lost = num_lines - num_records
        notes.append(
            f"{lost:,} line{' of metrics.jsonl is' if lost == 1 else 's of metrics.jsonl are'} damaged and left out."
        )
    if not num_records:
        notes.append("The run has no whole iteration yet.")
    for column in found.values():
        column.extend([math.nan] * (num_records - len(column)))
    return {name: np.asarray(column, dtype=np.float64) for name, column in found.items()}


def _number(value: Any) -> float:
    """Return a metric as a float, NaN where it is no number or too large for one."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.nan
