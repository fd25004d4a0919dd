"""Where the main thread of a process is: written down by the process itself when another asks, also if it hangs."""

import contextlib
import faulthandler
import os
import signal
import time
from pathlib import Path
from typing import BinaryIO

from lockstep.core.process_control import catches, signal_main_thread

SIGNAL = signal.SIGUSR2
DUMP_S = 1.0
"""How long a process gets to write."""

_POLL_S = 0.05
_open_files: list[BinaryIO] = []  # the handler writes to the file's number


def stack_path(folder: Path, rank: int) -> Path:
    """Return where a rank writes, in the folder that it beats into."""
    return folder / f"stack_{rank}.txt"


def answer(path: Path) -> bool:
    """Have this process write its stack to a file whenever it gets SIGUSR2.

    The handler is one in C: it also runs in a long call of a library, and whoever has Python's lock. It writes the
    stack of the thread that it runs in alone, since others may go on meanwhile: reading the stack of one that does has
    crashed the process. So ``ask`` sends the signal to the main thread. Linux gives one that is sent to the whole
    process, as by ``kill``, to the main thread too, unless the process is stopped.

    Returns:
        False where somebody else has a handler for that signal, which stays, or the folder takes no file.
    """
    if signal.getsignal(SIGNAL) != signal.SIG_DFL or catches(os.getpid(), SIGNAL):
        return False
    with contextlib.suppress(OSError):
        _open_files.append(path.open("wb", buffering=0))
        faulthandler.register(SIGNAL, _open_files[-1], all_threads=False)
        return True
    return False


def ask(pid: int, path: Path) -> None:
    """Have a process of this host write its stack, if it answers; one that is stopped goes on for that."""
    if not catches(pid, SIGNAL):
        return
    before = size = _size(path)
    with contextlib.suppress(OSError):
        signal_main_thread(pid, SIGNAL)
        os.kill(pid, signal.SIGCONT)
    deadline = time.monotonic() + DUMP_S
    while time.monotonic() < deadline:
        time.sleep(_POLL_S)
        last, size = size, _size(path)
        if size == last > before:
            return


def read_main_thread(path: Path) -> list[str]:
    """Return the stack of the main thread from the last answer, the innermost call first; nothing without one."""
    lines: list[str] = []
    with contextlib.suppress(OSError):
        for line in path.read_text(errors="replace").splitlines():
            lines = [] if line.endswith("(most recent call first):") else [*lines, line]
    return lines


def _size(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.stat().st_size
    return 0
