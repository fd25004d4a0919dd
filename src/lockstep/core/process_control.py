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


def signal_main_thread(pid: int, number: signal.Signals) -> None:
    """Send a signal to the main thread of a process; to whichever thread takes it, where the C library can't.

    Raises:
        OSError: the process is gone, or another user's.
    """
    try:
        tgkill = ctypes.CDLL(None, use_errno=True).tgkill
    except (OSError, AttributeError):
        os.kill(pid, number)
        return
    if tgkill(pid, pid, int(number)):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def is_gone(pid: int) -> bool:
    """Return whether there is no such process; one that has ended is there until its parent has noticed."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False


def parent_of(pid: int) -> int | None:
    """Return the parent of a process, None if it is gone."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("PPid:"):
                return int(line.split()[1])
    return None


def is_child_with(pid: int, parent: int, name: str, value: str) -> bool:
    """Return whether a process was started with a variable of this value.

    One that has written a title of its own over its environment, as setproctitle does, counts if it is a child of
    ``parent``.
    """
    found = environment_of(pid).get(name)
    return parent_of(pid) == parent if found is None else found == value


def signal_name(number: int) -> str:
    """Return the name of a signal, as in ``SIGKILL``."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


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
