"""One training, one directory: what is in it, and how it stays whole whatever happens to the process."""

import contextlib
import errno
import fcntl
import json
import os
import secrets
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import IO, Any, Literal

from lockstep.core import metrics
from lockstep.core.checkpoint_files import (
    checkpoints_of,
    newest_checkpoint,
    remove_checkpoint,
    replace_checkpoint,
    restore_aside,
)
from lockstep.core.curve import draw_curve
from lockstep.core.errors import RunError, UsageError
from lockstep.core.files import (
    exists,
    explain,
    is_file,
    is_folder,
    read_json,
    remove_leftovers,
    replace_link,
    sync,
    why_unseen,
    write_atomic,
)
from lockstep.core.progress import Progress
from lockstep.core.rank_log import RankLog
from lockstep.core.saves import BackgroundSaver

Status = Literal["running", "finished", "failed", "preempted", "interrupted"]

_UNPUBLISHED_PREFIX = ".new-"
_ABANDONED_AFTER_S = 60.0


class RunInUseError(UsageError):
    """Another process trains in the run directory."""


class RunDirectory:
    """The directory of one run, locked for this process until ``close`` or the process's death.

    Make one with ``create`` or ``open``. All writing methods raise ``RunError`` when the disk refuses.
    """

    def __init__(self, path: Path, lock: IO[str]) -> None:
        self.path = path
        self._lock = lock
        self._checkpoint = newest_checkpoint(path)

    @classmethod
    def create(
        cls,
        log_root: Path | str,
        task: str,
        run_name: str,
        config_yaml: str,
        run_info: Mapping[str, Any],
        max_iterations: int = 0,
        attempt: Mapping[str, Any] | None = None,
    ) -> "RunDirectory":
        """Make ``<log_root>/<task>/<time>[_run_name]``: it appears whole, or not at all.

        Raises:
            UsageError: a bad run name, or a log root that can't be written to; nothing is left behind.
        """
        _check_name("run_name", run_name)
        for part in task.split("/"):  # a folder for each part of such as gymnasium/HalfCheetah-v5
            _check_name("task", part)
        parent = Path(log_root) / task
        hidden = parent / f"{_UNPUBLISHED_PREFIX}{secrets.token_hex(8)}"
        with _nothing_left_behind(parent, hidden):
            parent.mkdir(parents=True, exist_ok=True)
            _remove_abandoned(parent)
            hidden.mkdir()
            lock = _lock(hidden)
            (hidden / "checkpoints").mkdir()
            (hidden / "ranks").mkdir()
            write_atomic(hidden / "config.yaml", config_yaml)
            attempts = [_attempt(run_info.get("ranks"), attempt)]
            run = {"run_id": secrets.token_hex(8), **run_info, "attempts": attempts}
            write_atomic(hidden / "run.json", _json(run))
            made = cls(hidden, lock)
            made.write_progress(0, max_iterations, 0, 0.0)
            made.path = _publish(hidden, datetime.now().strftime("%Y-%m-%d_%H-%M-%S") + (run_name and f"_{run_name}"))
        return made

    @classmethod
    def open(cls, path: Path | str) -> "RunDirectory":
        """Take up an existing run: lock it and clean up after a killed process; ``begin_attempt`` comes next.

        Raises:
            UsageError: not a run directory, no permission, or another process is training in it.
        """
        path = check_run_directory(path)
        for name in ("progress.json", "metrics.jsonl"):
            if exists(path / name) and not is_file(path / name):
                raise UsageError(f"{path / name} is no regular file; move it away, or resume another run")
        try:
            lock = _lock(path)
            for folder in (path / "checkpoints", path / "ranks"):
                folder.mkdir(exist_ok=True)  # somebody may have tidied up
            restore_aside(path / "checkpoints")
            for folder in (path, path / "checkpoints"):
                remove_leftovers(folder)
        except OSError as error:
            raise UsageError(explain(error, path)) from error
        except RunError as error:
            raise UsageError(str(error)) from error
        return cls(path, lock)

    def begin_attempt(
        self,
        config_yaml: str,
        ranks: list[dict[str, Any]] | None = None,
        attempt: Mapping[str, Any] | None = None,
    ) -> None:
        """Note in ``run.json`` that another process, or several ``ranks``, go on by this configuration.

        ``attempt`` is what else is to be noted of it; its ``launch_id`` is the run's from now on.
        """
        run = read_json(self.path / "run.json")
        attempts = run.get("attempts")
        new = _attempt(ranks, attempt)
        run["attempts"] = [*(attempts if isinstance(attempts, list) else []), new]
        run["launch_id"] = new.get("launch_id")
        write_atomic(self.path / "run.json", _json(run))
        write_atomic(self.config_path, config_yaml)

    @property
    def named_checkpoint(self) -> str | None:
        """The checkpoint that ``progress.json`` names, whether or not it is still there."""
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            name = read_json(self.path / "progress.json")["checkpoint"]
            return None if name is None else str(name)
        return None

    @property
    def config_path(self) -> Path:
        """The resolved configuration."""
        return self.path / "config.yaml"

    @property
    def mujoco_log_path(self) -> Path:
        """Where MuJoCo's warnings belong; hand it to ``mujoco.MjLogConfig`` as ``logfile``."""
        return self.path / "MUJOCO_LOG.TXT"

    def rank_log(self, rank: int) -> RankLog:
        """Return a context that copies what this process prints into ``ranks/rank_<rank>.log``."""
        return RankLog(self.path / "ranks" / f"rank_{rank}.log")

    def progress(self, task: str, log: RankLog) -> Progress:
        """Return the display of a training in this directory."""
        return Progress(task, self.path, log)

    def open_metrics(
        self, logger: metrics.Logger, iteration: int = 0, config: Mapping[str, Any] | None = None
    ) -> metrics.MetricsWriter:
        """Open the metrics of a run that goes on after ``iteration``; what it recorded beyond is forgotten."""
        self.truncate_metrics(iteration)
        return metrics.open_metrics(self.path, logger, iteration, config)

    def truncate_metrics(self, iteration: int) -> None:
        """Keep only the whole lines of ``metrics.jsonl`` up to and including ``iteration``."""
        metrics.truncate(self.path / "metrics.jsonl", iteration)

    def draw_curve(self) -> None:
        """Draw ``curve.png`` from ``metrics.jsonl``."""
        draw_curve(self.path / "metrics.jsonl", self.path / "curve.png", f"{self.path.parent.name}   {self.path.name}")

    def checkpoints(self) -> list[Path]:
        """Return all whole checkpoints, newest first."""
        return checkpoints_of(self.path)

    def save_checkpoint(self, iteration: int, write: Callable[[Path], object], keep: int = 5) -> Path:
        """Let ``write`` make ``checkpoints/model_<iteration>.pt``, or a folder without the ``.pt`` (at the temporary
        path it is given), point ``latest`` to it, then remove all but the ``keep`` newest. A kill at any instant leaves
        a loadable latest."""
        folder = self.path / "checkpoints"
        with contextlib.suppress(OSError):
            folder.mkdir(exist_ok=True)  # somebody may have tidied up
            remove_leftovers(folder)  # of a save that failed while a library's threads still wrote
        path = replace_checkpoint(folder / f"model_{iteration}", write)
        replace_link(folder / "latest", path.name)  # without it the newest file counts
        self._checkpoint = path
        for old in [checkpoint for checkpoint in self.checkpoints() if checkpoint != path][max(keep - 1, 0) :]:
            remove_checkpoint(old)  # one too many does no harm
        return path

    def saver(self, keep: int, saved: Callable[[], object]) -> BackgroundSaver:
        """Return what makes checkpoints in a thread, where it calls ``saved`` after each; ``keep`` newest stay."""
        return BackgroundSaver(lambda iteration, write: self.save_checkpoint(iteration, write, keep), saved)

    def save_failure(self, iteration: int, write: Callable[[Path], object]) -> Path | None:
        """Let ``write`` make ``failure_<iteration>.pt``, or a folder without the ``.pt``, apart from the checkpoints;
        return where it is, None if the disk refuses."""
        try:
            return replace_checkpoint(self.path / f"failure_{iteration}", write)
        except RunError:
            return None

    def write_progress(
        self,
        iteration: int,
        max_iterations: int,
        env_steps: int,
        wall_s: float,
        status: Status = "running",
        reason: str | None = None,
    ) -> None:
        """Replace ``progress.json``; it names the newest checkpoint itself. Waits for the disk unless running."""
        progress = {
            "iteration": iteration,
            "max_iterations": max_iterations,
            "env_steps": env_steps,
            "wall_s": wall_s,
            "status": status,
            "reason": reason,
            "checkpoint": self._checkpoint and f"checkpoints/{self._checkpoint.name}",
        }
        try:
            write_atomic(self.path / "progress.json", _json(progress), durable=status != "running")
        except RunError:
            if status == "running":
                raise
            # A full disk has no room for a second file, but the first one's is there: the end must be told.
            with contextlib.suppress(OSError), (self.path / "progress.json").open("r+b") as file:
                file.write(_json(progress).encode())
                file.truncate()

    def close(self) -> None:
        """Let other processes have the directory."""
        self._lock.close()


def check_run_directory(path: Path | str) -> Path:
    """Return ``path`` if it is a run directory, to read from; otherwise raise ``UsageError``."""
    path = Path(path)
    if is_file(path):
        raise UsageError(f"{path} is a file, not a run directory; a checkpoint is given with --checkpoint")
    if not is_folder(path):
        raise UsageError(f"there is no run directory {path}{why_unseen(path)}; runs are <log_root>/<task>/<time>")
    missing = [name for name in ("config.yaml", "run.json") if not is_file(path / name)]
    if missing:
        raise UsageError(f"{path} is not a run directory: it has no {missing[0]}; runs are <log_root>/<task>/<time>")
    try:
        whole = isinstance(read_json(path / "run.json"), dict)
    except OSError as error:
        raise UsageError(f"can't read {path}/run.json: {error.strerror}; make it readable") from error
    except ValueError:
        whole = False
    if not whole:
        raise UsageError(f"{path}/run.json is damaged; put a whole one there or resume another run")
    return path


def mark_failed(path: Path, reason: str, consequences: tuple[str, ...] = (), status: Status = "failed") -> bool:
    """Say in ``progress.json`` that a run has failed whose process could not say so itself; all else in it stays.

    Args:
        path: the run directory, which no process trains in any more.
        reason: in one line.
        consequences: how reasons begin that the run may have told itself and that only follow from this one.
        status: how it has ended, if it was ended on purpose.

    Returns:
        Whether it said so: not if the run has told its end itself, or the file can't be read or written.
    """
    try:
        progress = read_json(path / "progress.json")
        follows = progress["status"] == "failed" and str(progress["reason"]).startswith(consequences)
        if progress["status"] != "running" and not follows:
            return False
        write_atomic(path / "progress.json", _json(progress | {"status": status, "reason": reason}))
    except (OSError, ValueError, LookupError, TypeError, RunError):
        return False
    return True


def latest_checkpoint(path: Path | str) -> Path:
    """Return the newest whole checkpoint of a run; ``UsageError`` when there is none."""
    path = check_run_directory(path)
    checkpoint = newest_checkpoint(path)
    if checkpoint is None:
        raise UsageError(f"{path} holds no checkpoint yet; start a new run without --resume or take another one")
    return checkpoint


def _check_name(field: str, name: str) -> None:
    """Refuse what could not be one plain part of a path."""
    wrong = (
        "is longer than 100 bytes; shorten it"
        if len(name.encode(errors="replace")) > 100
        else "must not contain '/', '\\' or '..'; use letters, digits, '-', '_' and '.'"
        if "/" in name or "\\" in name or ".." in name or name == "."
        else "contains unprintable characters; use letters, digits, '-', '_' and '.'"
        if not name.isprintable()
        else None
    )
    if wrong:
        raise UsageError(f"{field} {name[:120]!r} {wrong}")


def _attempt(ranks: list[dict[str, Any]] | None, more: Mapping[str, Any] | None) -> dict[str, Any]:
    return {
        "start_time": datetime.now().astimezone().isoformat(timespec="microseconds"),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "command": sys.argv,
        "world_size": len(ranks) if ranks else 1,
        "ranks": ranks,
        **(more or {}),
    }


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, default=str) + "\n"


def _publish(hidden: Path, name: str) -> Path:
    """Rename a complete directory to the first free of ``name``, ``name_2``, ...; other processes do the same."""
    number = 1
    while True:
        path = hidden.with_name(name if number == 1 else f"{name}_{number}")
        try:
            # The system refuses to rename onto a directory that has anything in it, in one step: no race.
            hidden.rename(path)
            sync(path.parent)
            return path
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
        number += 1


@contextlib.contextmanager
def _nothing_left_behind(parent: Path, hidden: Path) -> Iterator[None]:
    """Turn failures into ``UsageError`` and remove what was made: the hidden directory and new, empty parents."""
    new_parents = [folder for folder in (parent, *parent.parents) if not exists(folder)]
    try:
        yield
    except BaseException as error:
        shutil.rmtree(hidden, ignore_errors=True)
        for folder in new_parents:
            with contextlib.suppress(OSError):
                folder.rmdir()
        cause = error.__cause__ if isinstance(error, RunError) else error
        if isinstance(cause, OSError):
            raise UsageError(f"{explain(cause, parent)}, or give another --log_root") from error
        raise


def _remove_abandoned(parent: Path) -> None:
    """Remove what processes killed while creating a run left; a living one holds the lock or is very young."""
    for hidden in parent.glob(f"{_UNPUBLISHED_PREFIX}*"):
        with contextlib.suppress(OSError, UsageError):
            if time.time() - hidden.stat().st_mtime > _ABANDONED_AFTER_S:
                with _lock(hidden):
                    shutil.rmtree(hidden, ignore_errors=True)


def _lock(path: Path) -> IO[str]:
    """Lock a run directory for this process; the kernel releases it with the returned file or with the process."""
    file = (path / ".lock").open("a+", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read().strip() or "another process"
        file.close()
        raise RunInUseError(
            f"{path} is in use by {holder}; wait for it or stop it, or start a new run without --resume"
        ) from None
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP):
            file.close()
            raise
        # Some network file systems have no locks; a run without protection is better than none.
    file.truncate(0)
    file.write(f"pid {os.getpid()} on {socket.gethostname()}")
    file.flush()
    return file
