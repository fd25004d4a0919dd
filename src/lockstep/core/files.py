"""Writing files so that a kill, a crash or a full disk leaves the old content or the new, never half of it."""

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

from lockstep.core.errors import RunError

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
    temporary = path.with_name(f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}-{path.name}")
    try:
        try:
            write(temporary)
        except Exception:
            # Some libraries hide a full disk behind an error of their own (torch.save: "unexpected pos").
            _check_that_it_can_grow(temporary)
            raise
        if durable:
            sync(temporary)
        temporary.replace(path)
        if durable:
            sync(path.parent)
    except OSError as error:
        raise RunError(explain(error, path)) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def _check_that_it_can_grow(path: Path) -> None:
    """Raise ``OSError`` if the system takes no further 64 KiB at the end of a file."""
    if path.is_file():
        with path.open("ab", buffering=0) as file:
            rest = memoryview(bytes(65536))
            while rest:
                rest = rest[file.write(rest) :]
            os.fsync(file.fileno())


def replace_link(path: Path, target: str) -> None:
    """Make ``path`` a symbolic link to ``target`` (relative to its folder), whatever it was before, atomically."""
    replace_atomic(path, lambda temporary: temporary.symlink_to(target), durable=False)


def remove_leftovers(folder: Path) -> None:
    """Remove what a killed process left unfinished in ``folder``; only for a folder no other process writes to."""
    for leftover in folder.glob(f"{TEMPORARY_PREFIX}*"):
        if leftover.is_dir() and not leftover.is_symlink():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                leftover.unlink()


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

    After the first failure it stays quiet, so that cleaning up after a full disk does not fail a second time.

    Raises:
        RunError: on opening and on the first write that the system refuses.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._failed = False
        try:
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            raise RunError(explain(error, path)) from error

    def write(self, record: bytes) -> None:
        """Append one record; it is in the file (though not yet on the disk) when this returns."""
        if self._failed:
            return
        size = os.fstat(self._descriptor).st_size
        try:
            rest = memoryview(record)
            while rest:  # the second turn, if any, brings out why the first did not take everything
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError as error:
            self._failed = True
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, size)
            raise RunError(explain(error, self._path)) from error

    def close(self) -> None:
        """Close the file; further calls do nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            self._failed = True
