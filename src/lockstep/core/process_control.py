"""What the Linux kernel does for processes that belong together: end them together, and leave none without a parent."""

import contextlib
import ctypes
import os
import signal
from pathlib import Path

# prctl(2), linux/prctl.h
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def end_with_parent(number: signal.Signals, parent: int) -> None:
    """Have the kernel send this process a signal when its parent ends; at once if that is no longer ``parent``."""
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends, so that it can still be found."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def catches(pid: int, number: signal.Signals) -> bool:
    """Return whether a process has a handler for a signal; False for one that is gone."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def environment_of(pid: int) -> dict[str, str]:
    """Return the environment that a process was started with; nothing if it is gone or not ours to see."""
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    pairs = (os.fsdecode(entry).partition("=") for entry in entries)
    return {name: value for name, equals, value in pairs if equals}


def _prctl(option: int, argument: int) -> None:
    with contextlib.suppress(OSError, AttributeError):  # elsewhere than on Linux there is no such call
        ctypes.CDLL(None).prctl(option, ctypes.c_ulong(argument), 0, 0, 0)
