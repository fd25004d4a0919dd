"""The screen, which may be a pipe that nobody reads or a terminal that is held: the launcher does not wait for it.

What is to be shown is put into a queue and written by a thread of its own, straight to the descriptor: a call of
Python's own streams that hangs would keep the process from ending.
"""

import contextlib
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Self, TextIO

from lockstep.core.rank_log import TolerantStream
from lockstep.launch.logs import Say

MAX_LINES = 1000
"""How many lines may wait before no more are read from the ranks' logs."""
END_WAIT_S = 2.0
"""How long, at the end, the screen may take not a line."""
_POLL_S = 0.02


class Screen:
    """Shows lines in the order in which they are said. A context manager that gives what waits a chance at the end.

    Args:
        show: shows a line, and may hang in that.
    """

    def __init__(self, show: Say) -> None:
        self._show = show
        self._waiting: deque[tuple[str, bool]] = deque()
        self._changed = threading.Condition()
        self._num_shown = 0
        self._stalled_at: int | None = None
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="lockstep-screen", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._wait_for(0)
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def say(self, line: str, to_stderr: bool) -> None:
        """Have a line shown, on stderr if so asked; does not wait for that."""
        with self._changed:
            self._waiting.append((line, to_stderr))
            self._changed.notify_all()

    def has_room(self, patiently: bool = False) -> bool:
        """Return whether lines that can wait where they are, as those in a log, should be said now.

        Args:
            patiently: whether to wait for room, as long as the screen takes a line now and then.
        """
        return self._wait_for(MAX_LINES - 1) if patiently else len(self._waiting) < MAX_LINES

    def _wait_for(self, num_waiting: int) -> bool:
        """Wait until no more lines than that wait; return False if the screen takes none."""
        seen, deadline = self._num_shown, time.monotonic() + END_WAIT_S
        while len(self._waiting) > num_waiting:
            if self._num_shown != seen:
                seen, deadline = self._num_shown, time.monotonic() + END_WAIT_S
            if self._num_shown == self._stalled_at or time.monotonic() > deadline:
                self._stalled_at = self._num_shown  # who waits for it again need not wait long
                return False
            time.sleep(_POLL_S)
        return True

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting:
                    if self._is_over:
                        return
                    self._changed.wait()
                line = self._waiting[0]
            self._show(*line)
            self._waiting.popleft()  # not before: what is being shown has not been shown
            self._num_shown += 1


def shows_on(stdout: TextIO | None, stderr: TextIO | None) -> Say:
    """Return what shows lines on two streams; one that goes away is no reason to end a training, and is left alone."""
    writers = _writer_to(stdout), _writer_to(stderr)

    def show(line: str, to_stderr: bool) -> None:
        writers[to_stderr](f"{line}\n")

    return show


def _writer_to(stream: TextIO | None) -> Callable[[str], None]:
    try:
        descriptor = -1 if stream is None else stream.fileno()
    except (OSError, ValueError):  # a stream in memory, which does not hang
        return _writer_to_memory(stream)
    encoding = getattr(stream, "encoding", None) or "utf-8"
    is_there = stream is not None

    def write(text: str) -> None:
        nonlocal is_there
        if is_there:
            is_there = _write_whole(descriptor, text.encode(encoding, "replace"))

    return write


def _writer_to_memory(stream: TextIO | None) -> Callable[[str], None]:
    tolerant = TolerantStream(stream)

    def write(text: str) -> None:
        tolerant.write(text)
        tolerant.flush()

    return write


def _write_whole(descriptor: int, content: bytes) -> bool:
    """Write all of it, however long that takes; return False if the other end has gone."""
    while content:
        try:
            content = content[os.write(descriptor, content) :]
        except BlockingIOError:  # somebody else has set it so, as programs at the other end of a terminal do
            with contextlib.suppress(OSError):
                select.select([], [descriptor], [], 1.0)
        except OSError:
            return False
    return True
