"""Checkpoints on the disk: files (torch) or folders (JAX) that appear whole, are found again, and are cleared away."""

import contextlib
import errno
import re
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

from lockstep.core.files import TEMPORARY_PREFIX, sync, sync_tree, unfinished

_NAME = re.compile(r"model_(\d+)(\.pt)?")
_ASIDE_PREFIX = ".aside-"
"""How the name of a folder begins while a new one takes its place."""


def checkpoints_of(path: Path) -> list[Path]:
    """Return all whole checkpoints of a run, newest first."""
    whole = [entry for entry in _entries(path / "checkpoints") if _NAME.fullmatch(entry.name)]
    return sorted(whole, key=lambda entry: int(entry.stem.removeprefix("model_")), reverse=True)


def newest_checkpoint(path: Path) -> Path | None:
    """Return the checkpoint of a run that ``latest`` points to; without that link the one of the highest iteration."""
    latest = path / "checkpoints" / "latest"
    with contextlib.suppress(OSError):
        target = latest.with_name(latest.readlink().name or "nothing")
        if _NAME.fullmatch(target.name) and target.exists():
            return target
    return next(iter(checkpoints_of(path)), None)


def replace_checkpoint(stem: Path, write: Callable[[Path], object]) -> Path:
    """Put what ``write`` makes at the path it is given in the place of the file ``<stem>.pt`` or the folder ``<stem>``.

    It appears whole or not at all, and is on the disk when this returns.

    Returns:
        Where it is; whether that is a file or a folder follows from what ``write`` has made.

    Raises:
        RunError: the system refused to write (full disk, no permission, ...); what was there before still is.
        Exception: whatever ``write`` raises, likewise.
    """
    path = stem.with_name(f"{stem.name}.pt")
    with unfinished(path, folder=stem) as temporary:
        write(temporary)
        if temporary.is_dir():
            path = stem
            sync_tree(temporary)
            _move_folder(temporary, path)
        else:
            sync(temporary)
            temporary.replace(path)
        sync(path.parent)
    return path


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint, never so that a part of it looks like one; where the system refuses, it stays."""
    with contextlib.suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            path = path.rename(path.with_name(f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}-{path.name}"))
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def set_aside(path: Path) -> Path | None:
    """Give a damaged checkpoint a name that is none of a checkpoint; return it, None if the system refuses."""
    aside = path.with_name(f"damaged_{path.name}")
    remove_checkpoint(aside)
    with contextlib.suppress(OSError):
        return path.rename(aside)
    return None


def restore_aside(folder: Path) -> None:
    """Put back what a killed process had moved out of the way of a new checkpoint that did not come to be there."""
    for aside in folder.glob(f"{_ASIDE_PREFIX}*"):
        path = aside.with_name(aside.name.removeprefix(_ASIDE_PREFIX))
        if path.exists():
            remove_checkpoint(aside)
        else:
            with contextlib.suppress(OSError):
                aside.rename(path)


def _move_folder(temporary: Path, path: Path) -> None:
    """Rename a folder to ``path``; what is there makes way first, since no system replaces a folder in one step."""
    try:
        temporary.rename(path)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        aside = path.with_name(f"{_ASIDE_PREFIX}{path.name}")
        remove_checkpoint(aside)
        path.rename(aside)
        try:
            temporary.rename(path)
        except OSError:
            aside.rename(path)
            raise
        remove_checkpoint(aside)


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []
