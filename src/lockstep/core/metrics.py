"""Where the numbers of each iteration go: ``metrics.jsonl`` always, TensorBoard or Weights & Biases besides."""

import importlib
import json
import math
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, Protocol

import numpy as np

from lockstep.core.errors import RunError, UsageError
from lockstep.core.files import AppendOnlyFile, replace_atomic

Metrics = Mapping[str, float | int | None]
"""One iteration's numbers by name; ``"iteration"`` is always among them, None stands for "there was nothing"."""

Logger = Literal["tensorboard", "wandb", "none"]


class Sink(Protocol):
    """Takes one iteration's metrics at a time; they are cleaned: no NaN, no infinity."""

    @property
    def num_missing(self) -> int:
        """Records that the disk refused and still lacks."""

    def record(self, metrics: Metrics) -> None:
        """Store them; raises ``RunError`` while the disk refuses, and keeps them until it takes them again."""

    def flush(self) -> None:
        """Store what was refused before; raises ``RunError`` while the disk refuses."""

    def close(self) -> None:
        """Finish."""


class MetricsWriter:
    """Hands each iteration's metrics to all sinks; without sinks it does nothing."""

    def __init__(self, sinks: Sequence[Sink] = ()) -> None:
        self._sinks = sinks

    @property
    def num_missing(self) -> int:
        """Iterations that the disk refused and some sink still lacks."""
        return max((sink.num_missing for sink in self._sinks), default=0)

    def record(self, metrics: Metrics) -> None:
        """Record one iteration; NaN and infinities are stored as missing.

        Raises:
            RunError: the disk refuses. What it refuses is kept, up to 16 MiB, and written with a later iteration.
        """
        clean = cleaned(metrics)
        self._on_all(lambda sink: sink.record(clean))

    def flush(self) -> None:
        """Write what the disk has refused so far.

        Raises:
            RunError: it refuses still.
        """
        self._on_all(lambda sink: sink.flush())

    def _on_all(self, work: Callable[[Sink], None]) -> None:
        """Do something with every sink, whatever the one before it says, and raise the first error."""
        first: RunError | None = None
        for sink in self._sinks:
            try:
                work(sink)
            except RunError as error:
                first = first or error
        if first is not None:
            raise first

    def close(self) -> None:
        """Close all sinks."""
        for sink in self._sinks:
            sink.close()


def open_metrics(
    run_path: Path, logger: Logger, iteration: int = 0, config: Mapping[str, Any] | None = None
) -> MetricsWriter:
    """Open the sinks of a run that goes on after ``iteration``; ``config`` is shown by Weights & Biases.

    ``metrics.jsonl`` must have been cut back to ``iteration`` before (``truncate``).
    """
    sinks: list[Sink] = [_JsonLines(run_path / "metrics.jsonl")]
    if logger == "tensorboard":
        sinks.append(_TensorBoard(run_path, iteration))
    elif logger == "wandb":
        sinks.append(_WeightsAndBiases(run_path, config or {}))
    return MetricsWriter(sinks)


def require_logger(logger: Logger) -> None:
    """Raise ``UsageError`` if what ``logger`` needs is not installed; call it before anything is written."""
    if logger == "wandb":
        _import_wandb()


def truncate(path: Path, iteration: int) -> None:
    """Keep of a ``metrics.jsonl`` only the whole lines up to and including ``iteration``, atomically."""
    if not path.exists():
        return

    def write(temporary: Path) -> None:
        with temporary.open("w", encoding="utf-8") as file:
            for record in read(path):
                if record["iteration"] <= iteration:
                    file.write(json.dumps(record) + "\n")

    replace_atomic(path, write)


def read(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a ``metrics.jsonl``; a half-written line, as a kill may leave, is passed over."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(record, dict) and isinstance(record.get("iteration"), int):
                yield record


def cleaned(metrics: Metrics) -> dict[str, float | int | None]:
    """Return metrics as sinks take them: what is not finite is None."""
    return {name: _clean(value) for name, value in metrics.items()}


def _clean(value: float | int | None) -> float | int | None:
    if value is None:
        return None
    if isinstance(value, int | np.integer):
        return int(value)
    number = float(value)
    return number if math.isfinite(number) else None


class _JsonLines:
    def __init__(self, path: Path) -> None:
        self._file = AppendOnlyFile(path)

    @property
    def num_missing(self) -> int:
        return self._file.num_missing

    def record(self, metrics: Metrics) -> None:
        self._file.write(json.dumps(metrics).encode() + b"\n")

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class _TensorBoard:
    """Event files, written in the caller's thread: ``tensorboard.summary.Writer`` writes in one of its own, where a
    full disk shows as a stray traceback, and it cannot say that a run was resumed."""

    def __init__(self, run_path: Path, iteration: int) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2  # type: ignore[import-untyped]
        from tensorboard.summary.writer.record_writer import RecordWriter  # type: ignore[import-untyped]

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        # TensorBoard reads a folder's event files in the order of their names, which must be that of the attempts.
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self._file = AppendOnlyFile(run_path / name)
        self._records = RecordWriter(self._file)
        self._add(file_version="brain.Event:2")
        # Every START but a folder's first makes TensorBoard forget what it has seen from this step on.
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._add(step=iteration + 1, session_log=start)

    @property
    def num_missing(self) -> int:
        return self._file.num_missing

    def record(self, metrics: Metrics) -> None:
        values = [
            self._summary.Value(tag=name, simple_value=value)
            for name, value in metrics.items()
            if value is not None and name != "iteration"
        ]
        self._add(step=metrics["iteration"], summary=self._summary(value=values))

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _add(self, **fields: Any) -> None:
        self._records.write(self._event(wall_time=time.time(), **fields).SerializeToString())


class _WeightsAndBiases:
    num_missing = 0  # it has threads, files and retries of its own

    def __init__(self, run_path: Path, config: Mapping[str, Any]) -> None:
        wandb = _import_wandb()
        try:
            # The id is the run's own: a resumed run goes on in the same W&B run, which ignores iterations it has.
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "lockstep"),
                group=run_path.parent.name,
                name=run_path.name,
                id=json.loads((run_path / "run.json").read_text())["run_id"],
                resume="allow",
                dir=str(run_path),
                config=dict(config),
            )
        except wandb.Error as error:
            reason = str(error).partition("\n")[0]
            raise RunError(
                f"Weights & Biases did not start: {reason}; run 'wandb login', set WANDB_MODE=offline, "
                "or use --logger tensorboard"
            ) from error

    def record(self, metrics: Metrics) -> None:
        values = {name: value for name, value in metrics.items() if value is not None}
        self._run.log(values, step=metrics["iteration"])

    def flush(self) -> None:
        """There is nothing to do."""

    def close(self) -> None:
        self._run.finish()


def _import_wandb() -> ModuleType:
    try:
        return importlib.import_module("wandb")
    except ImportError as error:
        raise UsageError(
            "--logger wandb needs the package wandb; install it with: pip install 'lockstep-rl[wandb]', "
            "or use --logger tensorboard"
        ) from error
