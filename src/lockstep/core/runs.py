"""Finding runs below a log root, and reading what a run tells of itself; nothing is locked or written."""

import contextlib
import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from lockstep.core.checkpoint_files import checkpoints_of
from lockstep.core.errors import UsageError
from lockstep.core.files import is_file, read_json

_SECOND = re.compile(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d")


def runs_of(log_root: Path | str, task: str) -> Iterator[Path]:
    """Yield the directories of a task's runs, the newest first."""
    try:
        entries = list((Path(log_root) / task).iterdir())
    except OSError:
        return

    def second(path: Path) -> str:
        match = _SECOND.match(path.name)
        return match[0] if match else ""

    for began, runs in groupby(sorted(entries, key=second, reverse=True), key=second):
        if began:
            # Only runs of the same second are read to tell which is newer.
            yield from sorted((run for run in runs if is_file(run / "run.json")), key=_start_time, reverse=True)


def newest_run(log_root: Path | str, task: str) -> Path:
    """Return the directory of the task's newest run; ``UsageError`` when there is none."""
    newest = next(runs_of(log_root, task), None)
    if newest is None:
        raise UsageError(f"there is no run of {task} under {log_root} yet; train without --resume, or give --log_root")
    return newest


def run_info(path: Path) -> dict[str, Any]:
    """Return what ``run.json`` of a run says; nothing if it can't be read."""
    return _read(path / "run.json")


def progress_of(path: Path) -> dict[str, Any]:
    """Return what ``progress.json`` of a run says; nothing if it can't be read."""
    return _read(path / "progress.json")


def attempts_of(path: Path) -> list[dict[str, Any]]:
    """Return what ``run.json`` says of each attempt, the first first."""
    attempts = run_info(path).get("attempts")
    return [each for each in attempts if isinstance(each, dict)] if isinstance(attempts, list) else []


def newest_iteration(path: Path) -> int:
    """Return the iteration of a run's newest checkpoint; 0 if it has none."""
    newest = next(iter(checkpoints_of(path)), None)
    return 0 if newest is None else int(newest.stem.removeprefix("model_"))


def _start_time(path: Path) -> str:
    return str(next(iter(attempts_of(path)), {}).get("start_time", ""))


def _read(path: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        content = read_json(path)
        if isinstance(content, dict):
            return content
    return {}
