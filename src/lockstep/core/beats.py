"""What a rank is doing, beaten into a small file that outlives it: who is stuck, stopped or dead is read from there.

A rank opens its file once. From then on ``enter``, ``exchange`` and ``at_iteration`` note where its main thread is, and
a thread of its own (``distributed.heartbeat``) calls ``alive``. Without an open file all of them do nothing. Times are
those of ``time.monotonic``, one clock for all processes of a host, which stands still while the host sleeps.
"""

import contextlib
import mmap
import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

Phase = Literal["start", "compile", "rollout", "update", "evaluate", "save", "end"]
PHASES: tuple[Phase, ...] = get_args(Phase)

# rank, restart, pid, alive_s, moved_s, iteration, number of exchanges, phase, exchange
_RECORD = struct.Struct("<8sIIqddqq16s56s")
_MAGIC = b"lockstep"
_ALIVE = struct.Struct("<d")
_ALIVE_AT = struct.calcsize("<8sIIq")


@dataclass(frozen=True)
class Beat:
    """Where a rank was when it last gave a sign."""

    rank: int
    restart: int
    """How often torchrun had restarted the ranks when this one started."""
    pid: int
    alive_s: float
    """When the process gave its last sign of life, whatever its main thread did."""
    moved_s: float
    """When its main thread entered this phase or exchange, or moved on in it."""
    iteration: int
    """Iterations that are complete."""
    num_exchanges: int
    """Exchanges between ranks that it has begun."""
    phase: Phase
    exchange: str
    """What is exchanged while it waits for other ranks, as in ``gradients``; else empty."""


class _Writer:
    """The file of this process."""

    def __init__(self, path: Path, rank: int, restart: int) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            # Room is taken now: a full disk would otherwise end the process when it writes (SIGBUS).
            os.posix_fallocate(descriptor, 0, _RECORD.size)
            self._memory = mmap.mmap(descriptor, _RECORD.size)
        finally:
            os.close(descriptor)
        self._rank, self._restart, self._pid = rank, restart, os.getpid()
        self.phase: Phase = "start"
        self.iteration = self.num_exchanges = 0
        self.write()

    def write(self, exchange: str = "") -> None:
        now_s = time.monotonic()
        _RECORD.pack_into(
            self._memory,
            0,
            _MAGIC,
            self._rank,
            self._restart,
            self._pid,
            now_s,
            now_s,
            self.iteration,
            self.num_exchanges,
            self.phase.encode(),
            exchange.encode()[:56],
        )

    def alive(self) -> None:
        _ALIVE.pack_into(self._memory, _ALIVE_AT, time.monotonic())


_writer: _Writer | None = None


def open_beats(folder: Path, rank: int, restart: int) -> bool:
    """Begin to beat into ``beat_<rank>`` of a folder; return whether the folder takes the file."""
    global _writer
    with contextlib.suppress(OSError):
        _writer = _Writer(folder / f"beat_{rank}", rank, restart)
        return True
    return False


def close_beats() -> None:
    """Beat no more; the file stays."""
    global _writer
    _writer = None


def enter(phase: Phase) -> None:
    """Note that the main thread enters a phase, or moves on in it."""
    if _writer is not None:
        _writer.phase = phase
        _writer.write()


def at_iteration(iteration: int) -> None:
    """Note how many iterations are complete."""
    if _writer is not None:
        _writer.iteration = iteration
        _writer.write()


@contextmanager
def exchange(tag: str) -> Iterator[None]:
    """Note that the main thread waits for other ranks, or for a device that does."""
    if _writer is None:
        yield
        return
    _writer.num_exchanges += 1
    _writer.write(tag)
    try:
        yield
    finally:
        _writer.write()


def alive() -> None:
    """Give a sign of life; for a thread of its own."""
    if _writer is not None:
        _writer.alive()


def read_beat(path: Path) -> Beat | None:
    """Return a rank's last beat; None if the file is not there or not whole."""
    try:
        magic, rank, restart, pid, alive_s, moved_s, iteration, num_exchanges, phase, tag = _RECORD.unpack(
            path.read_bytes()
        )
    except (OSError, struct.error):
        return None
    name = phase.rstrip(b"\0").decode(errors="replace")
    known = next((each for each in PHASES if each == name), None)
    if magic != _MAGIC or known is None:
        return None
    exchanged = tag.rstrip(b"\0").decode(errors="replace")
    return Beat(rank, restart, pid, alive_s, moved_s, iteration, num_exchanges, known, exchanged)


def read_beats(folder: Path) -> dict[int, Beat]:
    """Return the last beats of all ranks that have a file in a folder, by rank."""
    found = (read_beat(path) for path in folder.glob("beat_*"))
    return {beat.rank: beat for beat in found if beat is not None}
