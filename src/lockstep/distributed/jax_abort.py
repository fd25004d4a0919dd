"""The end of a process by JAX's coordination service, in words.

When process 0 ends, or another process gives no sign of life, JAX's C++ part aborts every process (SIGABRT), in a
thread of its own and whatever the main thread is at. To the launcher that would look like a failure worse than the
one it follows from, so the process tells first that it only follows.
"""

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

from lockstep.core.outcome import LOST_A_RANK
from lockstep.distributed.rank_exit import RankExit

ANSWER_S = 0.5
"""How long a healthy service may take to answer."""

_Handler = ctypes.CFUNCTYPE(None, ctypes.c_int)
_installed: Any = None  # C calls it, so it must not go


def explain(ask: Callable[[], object]) -> None:
    """Have the process end in words, with exit code 1, where JAX's service is what aborts it.

    Args:
        ask: asks the service for something; it raises an error of JAX's where the service has failed.
    """
    global _installed
    if _installed is not None or sys.platform != "linux":
        return

    def aborted(number: int) -> None:
        reason = _why_it_failed(ask)
        if reason is not None:
            RankExit().abort(
                f"{LOST_A_RANK} JAX's service ({reason}); it has ended or can't be reached: see what it says, and its "
                "log",
                is_said=True,
            )
        # Else it is no affair of the service. Once this returns the system ends the process as it would have.

    _installed = _Handler(aborted)
    ctypes.CDLL(None).signal(signal.SIGABRT, _installed)
    os.register_at_fork(after_in_child=_forget)


def _why_it_failed(ask: Callable[[], object]) -> str | None:
    """Return the first line of the service's error, None if it is well."""
    found: list[str | None] = []

    def look() -> None:
        try:
            ask()
            found.append(None)
        except Exception as error:
            found.append(str(error).strip().partition("\n")[0][:200])

    # What has failed may hold its lock.
    looking = threading.Thread(target=look, name="lockstep-abort", daemon=True)
    looking.start()
    looking.join(ANSWER_S)
    return found[0] if found else "it does not answer"


def _forget() -> None:
    signal.signal(signal.SIGABRT, signal.SIG_DFL)
