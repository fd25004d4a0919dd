"""Checkpoints of JAX runs: folders that hold plain values in a JSON file and arrays as orbax writes them.

    model_100/lockstep.json   task, config, counters; size and SHA-256 of every other file, and of its own text
    model_100/arrays/         orbax: ``replicated`` and ``sharded``, nests of numpy arrays

The sums are checked before any library reads an array, so that damaged bytes are told and never interpreted.
"""

import hashlib
import json
import logging
import os
import re
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy

from lockstep.core.errors import UsageError
from lockstep.learn.jax.nests import Nest, leaves_of, put_into
from lockstep.learn.resuming import HEADER_FILE, DamagedError, other_framework, require_header

FORMAT = 1
ARRAYS = ("replicated", "sharded")
"""The parts of a checkpoint's content that are nests of arrays; all others are plain values."""

_REQUIRED = {
    "format": int,
    "ml_framework": str,
    "task": str,
    "config": dict,
    "iteration": int,
    "env_steps": int,
    "weights": list,
}
_ARRAYS_FOLDER = "arrays"
_OS_ERROR = re.compile(r"(?:os_error_code='|\[OS error )(\d+)")  # as tensorstore words a refusal of the system

_is_said_once = False


def load(path: Path) -> dict[str, Any]:
    """Return the content of a checkpoint folder, all arrays in numpy; nothing in it is executed.

    Raises:
        DamagedError: truncated or damaged.
        UsageError: missing, unreadable, or not a checkpoint of a JAX run.
    """
    if not os.path.isdir(path):  # noqa: PTH112 - pathlib raises for a name that is too long
        raise _not_a_folder(path)
    try:
        text = (path / HEADER_FILE).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UsageError(
            f"checkpoint {path} is not a lockstep checkpoint: it has no {HEADER_FILE}; name a folder such as "
            "checkpoints/model_100 of a JAX run"
        ) from None
    except UnicodeDecodeError:
        raise DamagedError(f"checkpoint {path} is damaged ({HEADER_FILE}); use an older one") from None
    except OSError as error:
        raise UsageError(f"checkpoint {path} can't be read: {(error.strerror or str(error)).lower()}") from None
    header = _read_header(text, path)
    files, empty = header.pop("files"), header.pop("empty", [])
    require_header(header, _REQUIRED, FORMAT, "jax", path)
    _check_files(path, files)
    arrays: Nest = {name: {} for name in ARRAYS}
    try:
        arrays |= _checkpointer().restore(path.absolute() / _ARRAYS_FOLDER)
        for names, dtype, shape in empty:
            put_into(arrays, names, numpy.zeros(shape, dtype))
    except Exception as error:  # what orbax may raise is not told anywhere
        reason = (str(error).splitlines() or [type(error).__name__])[0][:120]
        raise UsageError(f"checkpoint {path} can't be read ({reason}); use another one") from None
    return header | {name: arrays[name] for name in ARRAYS}


def save(content: dict[str, Any], path: Path) -> None:
    """Write a checkpoint folder; the path must be free.

    Raises:
        OSError: the system refused.
    """
    snapshot(content)(path)


def snapshot(content: dict[str, Any]) -> Callable[[Path], None]:
    """Copy a checkpoint's content to host memory of its own and return what writes the copy, in any thread.

    The content may change from then on. Numpy arrays that own their memory are taken as they are: ``state_dict`` has
    made them for this.
    """
    plain = {name: value for name, value in content.items() if name not in ARRAYS}
    arrays: Nest = {}
    empty: list[tuple[tuple[str, ...], str, list[int]]] = []
    for names, array in leaves_of({name: content[name] for name in ARRAYS}):
        if array.size:
            put_into(arrays, names, _own(array))
        else:  # which orbax does not take
            empty.append((names, array.dtype.name, list(array.shape)))

    def write(path: Path) -> None:
        path.mkdir()
        _save_arrays(path.absolute() / _ARRAYS_FOLDER, arrays)
        names = sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file())
        files = {name: {"bytes": (path / name).stat().st_size, "sha256": _digest(path / name)} for name in names}
        header = plain | {"empty": empty, "files": files}
        sealed = {"sha256": _digest_of_text(_canonical(header)), **header}
        (path / HEADER_FILE).write_text(json.dumps(sealed, indent=1), encoding="utf-8")

    return write


def _own(array: Any) -> numpy.ndarray:
    is_own = isinstance(array, numpy.ndarray) and array.flags.owndata
    return array if is_own else numpy.array(array, copy=True)


def _save_arrays(path: Path, arrays: dict[str, Any]) -> None:
    _say_once()
    try:
        _checkpointer().save(path, arrays)
    except Exception as error:
        refusal = _OS_ERROR.search(str(error))
        if refusal is None or isinstance(error, OSError):
            raise
        number = int(refusal[1])
        raise OSError(number, os.strerror(number)) from error


def _say_once() -> None:
    """Keep off the screen what the threads of a failing save say: ``save`` raises the cause, and that is told."""
    global _is_said_once
    if _is_said_once:
        return
    _is_said_once = True
    logging.getLogger("absl").addFilter(lambda record: "_SignalingThread.run()" not in str(record.msg))
    logging.getLogger("asyncio").addFilter(lambda record: not _is_of_a_refused_write(record))
    show = sys.unraisablehook

    def show_others(unraisable: Any) -> None:
        # Writes that were on their way when another one failed end after that, and find nobody who waits for them.
        if unraisable.object is not None or str(unraisable.exc_value) != "Event loop is closed":
            show(unraisable)

    sys.unraisablehook = show_others


def _is_of_a_refused_write(record: logging.LogRecord) -> bool:
    """Return whether asyncio tells of a write that the system has refused, and that nobody waited for any more."""
    error = record.exc_info[1] if record.exc_info else None
    return "exception was never retrieved" in record.getMessage() and _OS_ERROR.search(str(error)) is not None


def _checkpointer() -> Any:
    """Return an orbax checkpointer for this process alone: it waits for no other process."""
    # Imported where it is needed, which takes a second: for a save that is in a thread.
    from orbax.checkpoint import Checkpointer, PyTreeCheckpointHandler
    from orbax.checkpoint.options import MultiprocessingOptions

    own = jax.process_index()
    options = MultiprocessingOptions(
        primary_host=own, active_processes={own}, barrier_sync_key_prefix=f"lockstep_{own}"
    )
    return Checkpointer(PyTreeCheckpointHandler(multiprocessing_options=options), multiprocessing_options=options)


# --- what is wrong with one ------------------------------------------------------------------------------------------


def _not_a_folder(path: Path) -> UsageError:
    if not os.path.exists(path):  # noqa: PTH110
        return UsageError(
            f"checkpoint {path} does not exist; 'checkpoints/' of a JAX run's directory has folders model_<iteration>"
        )
    if zipfile.is_zipfile(path):
        return other_framework(path, "torch", "jax")
    return UsageError(f"checkpoint {path} is no folder; name one such as checkpoints/model_100 of a JAX run")


def _read_header(text: str, path: Path) -> dict[str, Any]:
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        raise DamagedError(f"checkpoint {path} is truncated or damaged ({HEADER_FILE}); use an older one") from None
    if not isinstance(header, dict) or not isinstance(header.get("files"), dict) or "sha256" not in header:
        raise UsageError(f"checkpoint {path} is not a lockstep checkpoint; it lacks what lockstep writes")
    if header.pop("sha256") != _digest_of_text(_canonical(header)):
        raise DamagedError(f"checkpoint {path} is damaged ({HEADER_FILE}); use an older one")
    return header


def _check_files(path: Path, files: dict[str, Any]) -> None:
    """Raise ``DamagedError`` unless these files are there as they were written, and no other that orbax might read."""
    found = {str(file.relative_to(path)): file for file in path.rglob("*") if not file.is_dir()}
    missing = sorted(files.keys() - found.keys())
    hidden = (name for name, file in found.items() if file.name.startswith("."))  # of a file browser, or of NFS
    arrays = {name for name in found if name.startswith(f"{_ARRAYS_FOLDER}/")}
    foreign = sorted(arrays - files.keys() - set(hidden))
    if missing:
        raise DamagedError(f"checkpoint {path} is damaged: it lacks {_some(missing)}; use an older one")
    if foreign:
        raise DamagedError(
            f"checkpoint {path} is damaged: {_some(foreign)} is not of it; remove that or use another one"
        )
    for name, expected in files.items():
        try:
            size, digest = (path / name).stat().st_size, _digest(path / name)
        except OSError as error:
            raise UsageError(f"checkpoint {path} can't be read: {name}: {(error.strerror or '').lower()}") from None
        if size != expected["bytes"]:
            raise DamagedError(
                f"checkpoint {path} is damaged: {name} has {size} bytes, not {expected['bytes']}; use an older one"
            )
        if digest != expected["sha256"]:
            raise DamagedError(f"checkpoint {path} is damaged ({name}); use an older one")


def _some(names: list[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest_of_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _canonical(header: dict[str, Any]) -> str:
    return json.dumps(header, sort_keys=True)
