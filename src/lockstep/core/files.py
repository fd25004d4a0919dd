"""Writing files so that a kill, a crash or a full disk leaves the old content or the new, never half of it."""

import contextlib
import errno
import json
import os
import secrets
import shutil
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lockstep.core.errors import RunError, UsageError

TEMPORARY_PREFIX = ".tmp-"
"""How the names of unfinished files begin; see ``remove_leftovers``."""

_MENDS = {
    errno.ENOSPC: "free some space there",
    errno.EDQUOT: "free some of your quota there",
    errno.EACCES: "make it writable",
    errno.EPERM: "make it writable",
    errno.EROFS: "make it writable",
    errno.EFBIG: "raise the limit on file sizes (ulimit -f)",
    errno.ENOENT: "its folder is gone; do not move or remove it while it is in use",
    errno.ENOTDIR: "one of its parent folders is a file; move the file",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.ENAMETOOLONG: "choose a shorter name",
}


MAX_JSON_BYTES = 64 * 2**20
"""More than ``run.json`` has after a thousand starts of a hundred ranks."""


# What pathlib asks raises, before Python 3.12, for a folder without permission and for a name that is too long.
def exists(path: Path | str) -> bool:
    """Return whether something is there, as far as this user can see."""
    return os.path.exists(path)  # noqa: PTH110


def is_file(path: Path | str) -> bool:
    """Return whether a regular file is there, as far as this user can see."""
    return os.path.isfile(path)  # noqa: PTH113


def is_folder(path: Path | str) -> bool:
    """Return whether a folder is there, as far as this user can see."""
    return os.path.isdir(path)  # noqa: PTH112


def why_unseen(path: Path | str) -> str:
    """Return `` (permission denied)`` or the like where that is why nothing is to be seen; "" if nothing is there."""
    try:
        Path(path).stat()
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return ""
    except OSError as error:
        return f" ({(error.strerror or str(error)).lower()})"
    return ""


def require_place(name: str, path: Path) -> None:
    """Refuse the absolute path of a folder that can't be made, or not be written to.

    Args:
        name: of the flag by which it is given.
        path: where it is to be, or is.

    Raises:
        UsageError: it can't.
    """
    there = next(folder for folder in (path, *path.parents) if exists(folder))
    if not is_folder(there):
        raise UsageError(f"{name} {path} can't be made, since {there} is no folder; choose another --{name}")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UsageError(f"{name} {path} can't be written, since {there} is not writable; choose another --{name}")
    # The first folder that is missing hides whether the names below it are too long.
    for new in [*(there / part for part in path.relative_to(there).parts), path]:
        try:
            new.lstat()
        except FileNotFoundError:
            continue
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise UsageError(f"{name} {path} can't be made ({reason}); choose another --{name}") from None


MAX_NAME_BYTES = 220
"""Of a file that is written atomically; of the 255 that file systems take, the rest is for the unfinished file's."""


def require_regular(name: str, path: Path) -> None:
    """Refuse the path of a file that can't be replaced as files are: a device, say, would be gone for everybody.

    Args:
        name: of the flag by which it is given.
        path: that need not be there.

    Raises:
        UsageError: something else than a regular file is there, or its name is too long.
    """
    if len(os.fsencode(path.name)) > MAX_NAME_BYTES:
        raise UsageError(f"{name} {path.name[:40]}...: the name is longer than {MAX_NAME_BYTES} bytes; shorten it")
    if exists(path) and not is_file(path):
        raise UsageError(f"{name} {path} is no regular file; give the path of a file")


def read_json(path: Path) -> Any:
    """Return what a JSON file holds.

    Raises:
        OSError: it can't be read.
        ValueError: it is no whole JSON, no regular file (one that never ends, say), or too large or too deep for a
            run's.
    """
    if exists(path) and not is_file(path):
        raise ValueError(f"{path} is no regular file")
    with path.open("rb") as file:
        content = file.read(MAX_JSON_BYTES + 1)
    if len(content) > MAX_JSON_BYTES:
        raise ValueError(f"{path} has more than {MAX_JSON_BYTES >> 20} MiB")
    try:
        return json.loads(content.decode())
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply") from None


def explain(error: OSError, path: Path) -> str:
    """Return one line for the user: what could not be written, why, and the mend."""
    reason = error.strerror or str(error) or type(error).__name__
    mend = _MENDS.get(error.errno or 0, "check the disk")
    return f"can't write {path}: {reason[:1].lower()}{reason[1:]}; {mend}"


def write_atomic(path: Path, content: bytes | str, durable: bool = True) -> None:
    """Make ``path`` hold ``content`` (text as UTF-8); see ``replace_atomic``."""
    data = content.encode() if isinstance(content, str) else content
    replace_atomic(path, lambda temporary: temporary.write_bytes(data), durable)


def replace_atomic(path: Path, write: Callable[[Path], object], durable: bool = True) -> None:
    """Replace the file ``path`` by what ``write`` puts at the temporary path it is given, in the same folder.

    ``durable`` waits until the disk has it, so that it also outlives a power cut. Without it, only a crash of the
    whole machine can lose content, and the call takes microseconds.

    Raises:
        RunError: the system refused to write (full disk, no permission, ...); the old content is untouched.
        Exception: whatever ``write`` raises, likewise.
    """
    with unfinished(path) as temporary:
        write(temporary)
        if durable:
            sync(temporary)
        temporary.replace(path)
        if durable:
            sync(path.parent)


@contextlib.contextmanager
def unfinished(path: Path, folder: Path | None = None) -> Iterator[Path]:
    """Yield a path in the folder of ``path``, where the new content is made; what is left there is removed.

    Args:
        path: what a refusal of the system is told of.
        folder: the same, if it is a folder that was made and not a file.

    Raises:
        RunError: the system refused to write, also where a library has hidden that behind an error of its own.
    """
    temporary = path.with_name(f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}-{path.name}")
    try:
        try:
            yield temporary
        except Exception:
            # Some libraries hide a full disk behind an error of their own (torch.save: "unexpected pos").
            _check_that_it_can_grow(temporary)
            raise
    except OSError as error:
        raise RunError(explain(error, folder if folder is not None and is_folder(temporary) else path)) from error
    finally:
        if is_folder(temporary) and not temporary.is_symlink():
            shutil.rmtree(temporary, ignore_errors=True)
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def _check_that_it_can_grow(path: Path) -> None:
    """Raise ``OSError`` if the system takes no further 64 KiB at the end of a file, or in a folder."""
    if path.is_dir():
        path = path / "probe"
    elif not path.is_file():
        return
    with path.open("ab", buffering=0) as file:
        rest = memoryview(bytes(65536))
        while rest:
            rest = rest[file.write(rest) :]
        os.fsync(file.fileno())


def replace_link(path: Path, target: str) -> None:
    """Make ``path`` a symbolic link to ``target`` (relative to its folder), whatever it was before, atomically.

    Where the system makes no link, for want of room or because the file system has none, there is none afterwards: no
    link says nothing, an old one something that is wrong.
    """
    try:
        replace_atomic(path, lambda temporary: temporary.symlink_to(target), durable=False)
    except RunError:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def remove_leftovers(folder: Path) -> None:
    """Remove what a killed process left unfinished in ``folder``; only for a folder no other process writes to."""
    for leftover in folder.glob(f"{TEMPORARY_PREFIX}*"):
        if leftover.is_dir() and not leftover.is_symlink():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                leftover.unlink()


def sync_tree(folder: Path) -> None:
    """Wait until a folder and everything in it is on the disk."""
    for parent, _, names in os.walk(folder):
        for name in names:
            sync(Path(parent) / name)
        sync(Path(parent))


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems cannot sync a folder
            raise
    finally:
        os.close(descriptor)


class AppendOnlyFile:
    """A file that only grows, by whole records: one write call each, and nothing of a record that did not fit.

    Records that the system refuses are kept in memory, up to ``MAX_WAITING_BYTES``, and written before the next one
    once it takes them again; beyond that the oldest are lost.

    Raises:
        RunError: on opening, and on every write that the system refuses.
    """

    MAX_WAITING_BYTES = 16 * 2**20

    def __init__(self, path: Path) -> None:
        self._path = path
        self._waiting: deque[bytes] = deque()
        self._num_waiting_bytes = self._num_lost = 0
        self._whole_size: int | None = None  # after a refusal: how far the file is whole, if half a record follows
        self._closed = False
        try:
            self._descriptor = self._open()
        except OSError as error:
            raise RunError(explain(error, path)) from error

    @property
    def num_missing(self) -> int:
        """How many records are not in the file, those that are lost for good included."""
        return self._num_lost + len(self._waiting)

    def write(self, record: bytes) -> None:
        """Append one record; it is in the file (though not yet on the disk) when this returns."""
        self._waiting.append(record)
        self._num_waiting_bytes += len(record)
        while self._num_waiting_bytes > self.MAX_WAITING_BYTES:
            self._num_waiting_bytes -= len(self._waiting.popleft())
            self._num_lost += 1
        self.flush()

    def flush(self) -> None:
        """Write what was refused before."""
        try:
            while self._waiting and not self._closed:
                self._append(self._waiting[0])
                self._num_waiting_bytes -= len(self._waiting.popleft())
        except OSError as error:
            raise RunError(explain(error, self._path)) from error

    def close(self) -> None:
        """Close the file, after a last attempt to write what was refused; further calls do nothing."""
        if not self._closed:
            with contextlib.suppress(RunError):
                self.flush()
            os.close(self._descriptor)
            self._closed = True

    def _append(self, record: bytes) -> None:
        state = os.fstat(self._descriptor)
        if self._whole_size is not None or state.st_nlink == 0:
            state = self._reopen(state.st_size if self._whole_size is None else self._whole_size)
        try:
            rest = memoryview(record)
            while rest:  # the second turn, if any, brings out why the first did not take everything
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError:
            self._whole_size = state.st_size
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, state.st_size)
            raise

    def _reopen(self, whole_size: int) -> os.stat_result:
        """Open the file anew by its name: it may have been removed, or be on a file system that was away."""
        descriptor = self._open()
        os.close(self._descriptor)
        self._descriptor = descriptor
        os.ftruncate(descriptor, min(whole_size, os.fstat(descriptor).st_size))
        self._whole_size = None
        return os.fstat(descriptor)

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
