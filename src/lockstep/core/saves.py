"""Checkpoints written by a thread, so that the training loses only the time that a copy of its state takes."""

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

Write = Callable[[Path], object]
"""Makes a file, or a folder, at the path it is given."""

LINGER_S = 2.0

_lock = threading.Lock()
_num_saves = 0
_ended_s = -math.inf


def in_progress() -> bool:
    """Return whether this process saves, or waits for rank 0 to do so: whoever would end it should wait for that.

    For ``LINGER_S`` after a save it says so still, since between a last save and waiting for its end there is a moment
    without one.
    """
    return _num_saves > 0 or time.monotonic() < _ended_s + LINGER_S


@contextmanager
def saving() -> Iterator[None]:
    """Have ``in_progress`` say so; for any thread."""
    _count(1)
    try:
        yield
    finally:
        _count(-1)


def _count(change: int) -> None:
    global _num_saves, _ended_s
    with _lock:
        if change < 0:
            _ended_s = time.monotonic()  # first, so that there is no moment between the two
        _num_saves += change


@dataclass(frozen=True)
class Saved:
    """How the save of an iteration ended."""

    iteration: int
    error: Exception | None


class BackgroundSaver:
    """Saves in a thread, one checkpoint at a time.

    A save waits for the one before it. So there is one copy of the state in memory and not several, the newest one is
    the last one written, and a disk that is slower than the training is felt at once rather than when memory runs out.

    Args:
        save: called in the thread with the iteration and what makes the file.
        saved: called in the thread after a save that went well.
    """

    def __init__(self, save: Callable[[int, Write], object], saved: Callable[[], object] = lambda: None) -> None:
        self._save, self._saved = save, saved
        self._thread: threading.Thread | None = None
        self._results: list[Saved] = []

    def start(self, iteration: int, snapshot: Callable[[], Write]) -> None:
        """Begin to save; how it ends is among ``take_results`` some time later.

        Args:
            iteration: that the checkpoint is of.
            snapshot: copies the state and returns what writes the copy; called at once, in the caller's thread.
        """
        self.wait()
        write = snapshot()
        self._thread = threading.Thread(target=self._work, args=(iteration, write), name="checkpoint", daemon=True)
        _count(1)
        try:
            self._thread.start()
        except BaseException:
            self._thread = None
            _count(-1)
            raise

    def wait(self) -> None:
        """Wait for the save under way, if there is one."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def take_results(self) -> list[Saved]:
        """Return how those saves ended that have ended since the last call, in their order."""
        taken: list[Saved] = []
        while self._results:
            taken.append(self._results.pop(0))
        return taken

    def _work(self, iteration: int, write: Write) -> None:
        try:
            error: Exception | None = None
            try:
                self._save(iteration, write)
            except Exception as raised:  # whatever it is, the training is to hear of it
                error = raised
            self._results.append(Saved(iteration, error))
            if error is None:
                self._saved()
        finally:
            _count(-1)


class NullSaver(BackgroundSaver):
    """What ranks that write nothing get: no copy is taken and no thread started."""

    def __init__(self) -> None:
        super().__init__(lambda iteration, write: None)

    def start(self, iteration: int, snapshot: Callable[[], Write]) -> None:
        """Do nothing."""
