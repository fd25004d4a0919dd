"""Ctrl-C and termination requests as flags that a training loop looks at between iterations."""

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Literal

StopReason = Literal["interrupted", "preempted"]
EXIT_CODES: dict[StopReason, int] = {"interrupted": 130, "preempted": 75}
"""What a process that stopped for such a reason, after saving, returns."""

_PREEMPTING = (signal.SIGTERM, signal.SIGUSR1)
_SHOW_CURSOR = b"\x1b[?25h"


class StopRequest:
    """What the outside asked for so far; ``status`` is None while nothing was asked, and the first request stays."""

    def __init__(self) -> None:
        self.status: StopReason | None = None

    @property
    def exit_code(self) -> int:
        """The exit code after saving: 130 interrupted, 75 preempted, 0 when nothing was asked."""
        return EXIT_CODES[self.status] if self.status else 0

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Note a signal; a Python signal handler."""
        self.status = self.status or ("interrupted" if number == signal.SIGINT else "preempted")
        if number == signal.SIGINT:
            # From here on the kernel ends the process at the next Ctrl-C, even inside a long C call. Nobody could
            # then give the cursor back that a live panel hides, so do it now.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            with contextlib.suppress(OSError):
                if os.isatty(1):
                    os.write(1, _SHOW_CURSOR)


_heard_through: socket.socket | None = None


@contextlib.contextmanager
def overheard() -> Iterator[socket.socket | None]:
    """Have the numbers of signals that have a Python handler written to a socket, as bytes, at once.

    The handler itself runs in the main thread, and only when that is back from whatever function in C it is in. None
    outside the main thread, where this can't be set up, and where somebody else is told already, as asyncio.
    """
    global _heard_through
    if threading.current_thread() is not threading.main_thread():
        yield None
        return
    reader, writer = socket.socketpair()
    with reader, writer:
        writer.setblocking(False)
        before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        if before != -1:
            signal.set_wakeup_fd(before)
            yield None
            return
        _heard_through = writer
        try:
            yield reader
        finally:
            _stop_listening(writer)


def _stop_listening(writer: socket.socket) -> None:
    global _heard_through
    _heard_through = None
    listening = signal.set_wakeup_fd(-1)
    if listening != writer.fileno():  # somebody else has begun to listen
        signal.set_wakeup_fd(listening)


def _leave_signals_to_the_parent() -> None:
    """Keep a forked child, which has its parent's handlers, from telling the parent of its own signals."""
    if _heard_through is not None:
        with contextlib.suppress(ValueError):  # forked by another thread than the main one, which is gone in the child
            _stop_listening(_heard_through)


os.register_at_fork(after_in_child=_leave_signals_to_the_parent)


@contextlib.contextmanager
def watch() -> Iterator[StopRequest]:
    """Turn the first SIGINT, and any SIGTERM or SIGUSR1, into a ``StopRequest``; a second SIGINT kills at once.

    The handlers of before are put back at the end. Outside the main thread, where Python allows no handlers, the
    request simply stays empty.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    numbers = (signal.SIGINT, *_PREEMPTING)
    previous = {number: signal.signal(number, request.handle) for number in numbers}
    try:
        yield request
    finally:
        for number, handler in previous.items():
            # None: a handler that was not installed from Python, which Python cannot put back either
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
