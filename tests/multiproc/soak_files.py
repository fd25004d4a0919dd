"""What a soak looks at on the disk: files that can be read at every instant, and what they hold in the end."""

import json
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from lockstep.core.errors import UsageError
from lockstep.learn.torch import checkpoint

TOLERANCE = 1e-9
_LOOK_S = 0.05
_TIMED = ("time/", "wall_s", "steps_per_s")


class FilesWatch:
    """Reads the files of all runs below a folder, again and again, in a thread.

    Args:
        folder: with the run directories; it need not be there yet.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._problems: list[str] = []
        self._read_before: dict[Path, tuple[int, int, int]] = {}
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="files", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._thread.join()

    def take_problems(self) -> list[str]:
        """Return what was found since the last call, one line each."""
        problems, self._problems = self._problems, []
        return problems

    def look_at_all(self) -> list[str]:
        """Stop watching, and return what is wrong once nothing changes any more."""
        self._is_over.set()
        self._thread.join()
        self._read_before.clear()
        self.look()
        leftovers = [f"{path} is left" for path in self._folder.rglob(".tmp-*")]
        return self.take_problems() + leftovers

    def look(self) -> None:
        """Read everything that has changed."""
        for run in self._folder.glob("[!.]*"):
            for name in ("run.json", "progress.json"):
                self._read(run / name, lambda path: json.loads(path.read_text()))
            if (run / "metrics.jsonl").exists():
                self._read(run / "metrics.jsonl", _records_seen_twice)
            for path in (run / "checkpoints").glob("model_*.pt"):
                self._read(path, checkpoint.load, may_go=True)

    def _watch(self) -> None:
        while not self._is_over.wait(_LOOK_S):
            self.look()

    def _read(self, path: Path, read: Callable[[Path], object], may_go: bool = False) -> None:
        try:
            status = path.stat()
            state = (status.st_ino, status.st_size, status.st_mtime_ns)
            if self._read_before.get(path) != state:
                self._read_before[path] = state
                read(path)
        except (OSError, ValueError, UsageError) as error:
            if path.exists() or not may_go:
                self._problems.append(f"{path}: {error}")


def records_of(run: Path) -> list[dict[str, Any]]:
    """Return what was recorded of every iteration.

    Raises:
        ValueError: a record is not whole.
    """
    path = run / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    if text and not text.endswith("\n"):
        raise ValueError(f"the last record ends with {text[-20:]!r}")
    return [json.loads(line) for line in text.splitlines()]


def _records_seen_twice(path: Path) -> None:
    """Read records that a training may be adding to: the kernel shows one that crosses a page in two steps."""
    try:
        records_of(path.parent)
    except ValueError:
        time.sleep(_LOOK_S)
        records_of(path.parent)


def compare(undisturbed: Path, run: Path, num_iterations: int) -> list[str]:
    """Return in what two runs differ that should have learned the same: the curve, and the state at the end."""
    curves = [records_of(path) for path in (undisturbed, run)]
    numbers = [record["iteration"] for record in curves[1]]
    if numbers != list(range(1, num_iterations + 1)):
        return [f"recorded were the iterations {numbers}"]
    for one, other in zip(*curves, strict=True):
        far = list(_far_apart(_untimed(one), _untimed(other), ""))
        if far:
            return [f"iteration {one['iteration']} differs in {', '.join(far)}"]
    one, other = (checkpoint.load(path / "checkpoints" / f"model_{num_iterations}.pt") for path in (undisturbed, run))
    return [
        f"the last checkpoint differs in {far}"
        for name in ("policy", "optimizer", "learning_rate", "env", "memory", "env_steps")
        for far in _far_apart(one[name], other[name], name)
    ]


def _untimed(record: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if not name.startswith(_TIMED)}


def _far_apart(one: Any, other: Any, name: str) -> Iterator[str]:
    """Yield the names of the entries of two nests that are further apart than rounding."""
    if isinstance(one, torch.Tensor):
        same = one.shape == other.shape and torch.allclose(
            one.double(), other.double(), rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True
        )
        if not same:
            yield name
    elif isinstance(one, Mapping):
        if one.keys() != other.keys():
            yield f"{name}: {one.keys() ^ other.keys()}"
        for key in one.keys() & other.keys():
            yield from _far_apart(one[key], other[key], f"{name}.{key}" if name else str(key))
    elif isinstance(one, Sequence) and not isinstance(one, str):
        if len(one) != len(other):
            yield name
        for index, (mine, theirs) in enumerate(zip(one, other, strict=False)):
            yield from _far_apart(mine, theirs, f"{name}.{index}")
    elif isinstance(one, float) and isinstance(other, float):
        if not math.isclose(one, other, rel_tol=TOLERANCE, abs_tol=TOLERANCE) and (one == one or other == other):
            yield name
    elif one != other:
        yield name
