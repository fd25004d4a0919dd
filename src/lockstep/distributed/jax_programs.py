"""The folder in which a process that is alone keeps what JAX has compiled for it.

Compiling takes much longer than starting: 8 s for PPO on one core, against 1 s once it is kept. With several processes
JAX lets process 0 alone write, and all must find the same there, or those that compile wait for those that don't: there
only JAX_COMPILATION_CACHE_DIR, a folder that all of them see, makes it keep anything.
"""

import contextlib
import os
from pathlib import Path
from typing import Any

import jax

from lockstep.distributed import kernel_caches

MAX_BYTES = 1 << 30
"""Beyond this the oldest programs go."""
_MIN_COMPILE_S = 0.3


def keep() -> None:
    """Have JAX keep compiled programs for this user, on this host, unless the user has chosen where, or not to."""
    options: Any = jax.config  # which makes its attributes up as it goes
    if options.jax_compilation_cache_dir is not None or not options.jax_enable_compilation_cache:
        return
    folder = kernel_caches.folder_of("jax")
    if folder is not None:
        remove_oldest(folder)
        options.update("jax_compilation_cache_dir", str(folder))
        options.update("jax_persistent_cache_min_compile_time_secs", _MIN_COMPILE_S)


def remove_oldest(folder: Path, max_bytes: int = MAX_BYTES) -> None:
    """Remove the files of a folder that were written first, until the others are no more than so many bytes."""
    total = 0
    with contextlib.suppress(OSError):
        entries = [(entry.stat(), Path(entry.path)) for entry in os.scandir(folder) if entry.is_file()]
        for status, path in sorted(entries, key=lambda entry: -entry[0].st_mtime):
            total += status.st_size
            if total > max_bytes:
                path.unlink()
