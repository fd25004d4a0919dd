"""A folder of its own for each rank's compiled kernels: ranks that share one crash on its lock."""

import contextlib
import fcntl
import os
import socket
import tempfile
import warnings
from collections.abc import Mapping, MutableMapping
from itertools import count
from pathlib import Path

_VARIABLES = {
    "WARP_CACHE_PATH": "warp",
    "QD_OFFLINE_CACHE_FILE_PATH": "quadrants",
    "TI_OFFLINE_CACHE_FILE_PATH": "taichi",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
}
# Not JAX_COMPILATION_CACHE_DIR: of several processes JAX lets one alone write there, for all to read the same.

_LOCK = ".lock"
_held: list[int] = []  # descriptors; the system unlocks them when the process ends, however it ends


def assign(environment: MutableMapping[str, str], local_rank: int) -> None:
    """Point every kernel compiler at ``<base>/<host>/rank_<local_rank>/<compiler>``.

    The base is the variable's own value if the user has set it, else the user's cache folder. The host is part of the
    path because several nodes may share one home. Where another living job on this host holds the rank's folder, the
    next free of ``rank_<local_rank>_2``, ``_3``, ... is taken, so that a warm cache is used again whenever it is free.
    """
    folders: dict[str, Path | None] = {}
    for variable, name in _VARIABLES.items():
        chosen = environment.get(variable, "")
        if chosen not in folders:
            folders[chosen] = _claim_or_temporary(_base(chosen, environment), local_rank)
        folder = folders[chosen]
        if folder is not None:
            (folder / name).mkdir(exist_ok=True)
            environment[variable] = str(folder / name)


def below(folder: Path) -> dict[str, str]:
    """Return the variables that point every kernel compiler at a folder of its own below this one; none is made.

    Args:
        folder: absolute, and no other process's.
    """
    return {variable: str(folder / name) for variable, name in _VARIABLES.items()}


def folder_of(compiler: str, environment: Mapping[str, str] = os.environ) -> Path | None:
    """Return a folder for the kernels of one compiler that no other living process has; None if none can be had.

    Args:
        compiler: a name.
        environment: of this process, which is the only one of its job.
    """
    folder = _claim_or_temporary(_base("", environment), 0)
    if folder is None:
        return None
    (folder / compiler).mkdir(exist_ok=True)
    return folder / compiler


def claim(base: Path, local_rank: int) -> Path:
    """Return a folder below ``base`` that no other living process holds; it is held until this process ends.

    Raises:
        OSError: ``base`` can't be written, or its file system has no locks.
    """
    for number in count(1):
        name = f"rank_{local_rank}" if number == 1 else f"rank_{local_rank}_{number}"
        folder = base / socket.gethostname() / name
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            continue
        except OSError:
            os.close(descriptor)
            raise
        _held.append(descriptor)
        return folder
    raise AssertionError("count() never ends")


def _base(chosen: str, environment: Mapping[str, str]) -> Path | None:
    """Return the absolute folder to work in, None if there is no home to put it."""
    with contextlib.suppress(RuntimeError):  # no home
        if chosen:
            return Path(chosen).expanduser().absolute()
        cache = environment.get("XDG_CACHE_HOME", "")
        return (Path(cache) if cache else Path.home() / ".cache").absolute() / "lockstep" / "kernels"
    return None


def _claim_or_temporary(base: Path | None, local_rank: int) -> Path | None:
    if base is not None:
        with contextlib.suppress(OSError):
            return claim(base, local_rank)
    try:
        return claim(_temporary_base(), local_rank)
    except OSError as error:
        warnings.warn(
            f"neither {base} nor {tempfile.gettempdir()} can hold this rank's compiled kernels ({error.strerror}); "
            "ranks share their caches and may get in each other's way",
            stacklevel=5,  # where lockstep is imported
        )
        return None


def _temporary_base() -> Path:
    """Return a folder below the system's temporary one that nobody else can put kernels into."""
    folder = Path(tempfile.gettempdir()) / f"lockstep-kernels-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    state = folder.lstat()
    if folder.is_symlink() or state.st_uid != os.getuid() or state.st_mode & 0o022:
        return Path(tempfile.mkdtemp(prefix="lockstep-kernels-"))
    return folder
