"""What a rank is doing, beaten into a small file that outlives it: who is stuck, stopped or dead is read from there.

A rank opens its file once. From then on ``enter``, ``exchange`` and ``at_iteration`` note where its main thread is, and
a thread of its own (``distributed.heartbeat``) calls ``alive``. Without an open file all of them do nothing. Times are
those of ``time.monotonic``, one clock for all processes of a host, which stands still while the host sleeps.

A process may be stopped between any two instructions, and its last beat must be whole all the same. So there are two
places for what the main thread notes, filled by turns, and a count whose last bit says which one is valid.
"""

import contextlib
import math
import mmap
import os
import struct
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

Phase = Literal["start", "compile", "rollout", "update", "step", "evaluate", "save", "end"]
PHASES: tuple[Phase, ...] = get_args(Phase)
FILE_PREFIX = "beat_"
"""How the names of the files begin; the rank follows."""
DEVICE = "device"
"""What a rank notes as the exchange when it waits for its device, which may wait for other ranks."""

_OUTER: tuple[Phase, ...] = ("start", "end")
_MAY_COMPILE: tuple[Phase, ...] = ("rollout", "update", "step", "evaluate")

_HEAD = struct.Struct("@8sIIqdq")  # magic, rank, restart, pid, alive_s, count of notes
_NOTE = struct.Struct("@dqq?15s56s")  # moved_s, iteration, number of exchanges, is behind others, phase, exchange
_NOTES_AT = (_HEAD.size, _HEAD.size + _NOTE.size)
_SIZE = _HEAD.size + 2 * _NOTE.size
_MAGIC = b"lockstep"
_ALIVE_WORD, _COUNT_WORD = 3, 4  # of 8 bytes each
_TAG_BYTES = 56
_MAX_READS = 5


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
    """When its main thread entered this phase or exchange, or moved on in it; infinite once the training that it was in
    has failed and whoever called it has the main thread again."""
    iteration: int
    """Iterations that are complete."""
    num_exchanges: int
    """Exchanges between ranks that it has begun to wait in."""
    phase: Phase
    exchange: str
    """What is exchanged while it waits for other ranks, as in ``gradients``; else empty."""
    is_behind_others: bool = False
    """Whether its device has been given exchanges that it has not been seen to complete. A device takes only so many
    orders ahead: who can give no more of them waits for other ranks without saying so."""


class _Writer:
    """The file of this process."""

    def __init__(self, path: Path, rank: int, restart: int) -> None:
        path.unlink(missing_ok=True)  # a process of an earlier attempt may still beat into that one
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            # Room is taken now: a full disk would otherwise end the process when it writes (SIGBUS).
            os.posix_fallocate(descriptor, 0, _SIZE)
            self._memory = mmap.mmap(descriptor, _SIZE)
        finally:
            os.close(descriptor)
        words = memoryview(self._memory)[: _HEAD.size]
        # A word is written at once, where struct may write its bytes one after the other.
        self._times, self._counts = words.cast("d"), words.cast("q")
        self._count = 0
        self.phase: Phase = "start"
        self.in_training = True
        self.tag = ""
        self.is_behind_others = False
        self.iteration = self.num_exchanges = 0
        self.moved_s = time.monotonic()
        self.longest_pause_s = 0.0
        self._entered: set[Phase] = set()
        self._is_warm: set[Phase] = set()
        _HEAD.pack_into(self._memory, 0, bytes(8), rank, restart, os.getpid(), self.moved_s, 0)
        self.note("")
        self._memory[: len(_MAGIC)] = _MAGIC  # from here on it is read

    def note(self, tag: str) -> None:
        """Write where the main thread is now."""
        now_s = time.monotonic()
        if now_s - self.moved_s > self.longest_pause_s and self.phase in self._is_warm:
            self.longest_pause_s = now_s - self.moved_s
        if not self.in_training and self.phase not in _OUTER:
            self.phase = "end"
        self._write(tag, now_s)

    def _write(self, tag: str, moved_s: float) -> None:
        self.moved_s = moved_s
        self._count += 1
        _NOTE.pack_into(
            self._memory,
            _NOTES_AT[self._count & 1],
            moved_s,
            self.iteration,
            self.num_exchanges,
            self.is_behind_others,
            self.phase.encode(),
            tag.encode()[:_TAG_BYTES],
        )
        self._counts[_COUNT_WORD] = self._count

    def begin_training(self) -> None:
        self.in_training = True
        self._entered.clear()
        self._is_warm.clear()
        self.enter("start")

    def end_training(self, has_failed: bool) -> None:
        if has_failed:
            self._write(self.tag, math.inf)
        else:
            self.enter("end")
        self.in_training = False

    def enter(self, phase: Phase) -> None:
        if not self.in_training:
            self.note(self.tag)  # what else goes through phases, as an evaluation by itself, is not to be timed
            return
        if phase in _MAY_COMPILE and phase not in self._is_warm:
            self._entered.add(phase)
            phase = "compile"
        if phase != self.phase:
            self.note(self.tag)  # the pause up to here is one of the phase before
            self.phase = phase
        self.note(self.tag)

    def at_iteration(self, iteration: int) -> None:
        self._is_warm |= self._entered
        self.iteration = iteration
        self.note(self.tag)

    def alive(self) -> None:
        self._times[_ALIVE_WORD] = time.monotonic()

    def content(self) -> bytes:
        return self._memory[:]


class _Exchange:
    """Notes the wait for an exchange; one inside another gives way to the outer one again."""

    def __init__(self, writer: _Writer, tag: str) -> None:
        self._writer, self._tag, self._outer = writer, tag, writer.tag

    def __enter__(self) -> None:
        self._writer.num_exchanges += 1
        self._writer.tag = self._tag
        self._writer.note(self._tag)

    def __exit__(self, *error: object) -> None:
        self._writer.tag = self._outer
        if self._tag == DEVICE:
            self._writer.is_behind_others = False
        self._writer.note(self._outer)


_writer: _Writer | None = None
_NO_EXCHANGE = nullcontext()


def open_beats(folder: Path, rank: int, restart: int, in_training: bool = True) -> bool:
    """Begin to beat into ``beat_<rank>`` of a folder; return whether the folder takes the file.

    Args:
        folder: that is there.
        rank: of this process.
        restart: how often torchrun had restarted the ranks.
        in_training: False to stay in the phase ``start`` until ``training`` begins.
    """
    global _writer
    with contextlib.suppress(OSError):
        _writer = _Writer(folder / f"{FILE_PREFIX}{rank}", rank, restart)
        _writer.in_training = in_training
        return True
    return False


def close_beats() -> None:
    """Beat no more; the file stays."""
    global _writer
    _writer = None


os.register_at_fork(after_in_child=close_beats)  # the file is that of the parent


@contextmanager
def training() -> Iterator[None]:
    """Note that the main thread is in a training; outside of one, nobody expects it to move.

    After a training that has failed the phase stays, to tell where that was, until the main thread moves again.
    """
    writer = _writer
    if writer is None:
        yield
        return
    writer.begin_training()
    try:
        yield
    except BaseException:
        writer.end_training(has_failed=True)
        raise
    writer.end_training(has_failed=False)


def enter(phase: Phase) -> None:
    """Note that the main thread enters a phase, or moves on in it.

    ``step`` is an iteration that is one compiled program. The first rollout, update, step and evaluation of a process
    count as ``compile``: there kernels may be built.
    """
    if _writer is not None:
        _writer.enter(phase)


@contextmanager
def within(phase: Phase) -> Iterator[None]:
    """Note that the main thread is in a phase, and then in the one of before again."""
    writer = _writer
    if writer is None:
        yield
        return
    before = writer.phase
    writer.enter(phase)
    try:
        yield
    finally:
        writer.enter(before)


def at_iteration(iteration: int) -> None:
    """Note how many iterations are complete."""
    if _writer is not None:
        _writer.at_iteration(iteration)


def exchange(tag: str) -> AbstractContextManager[None]:
    """Note, within this context, that the main thread waits for other ranks, or for a device that does.

    Args:
        tag: what is exchanged, or ``device``.
    """
    return _NO_EXCHANGE if _writer is None else _Exchange(_writer, tag)


def exchanges_on_device(tag: str) -> None:
    """Note that from here on until it moves the main thread may wait for a device that waits for other ranks.

    That the device is behind others stays noted until the main thread has waited for it, in ``exchange("device")``.

    Args:
        tag: what is exchanged.
    """
    if _writer is not None:
        _writer.num_exchanges += 1
        _writer.is_behind_others = True
        _writer.note(tag)


def alive() -> None:
    """Give a sign of life; for a thread of its own."""
    if _writer is not None:
        _writer.alive()


def own_beat() -> Beat | None:
    """Return the last beat of this process; None if it has no file open."""
    return None if _writer is None else _decode(_writer.content())


def longest_pause_s() -> float:
    """Return for how long the main thread has not moved at most, in seconds.

    Phases that a process goes through for the first time, starts, ends and checkpoints do not count.
    """
    return 0.0 if _writer is None else _writer.longest_pause_s


def read_beat(path: Path) -> Beat | None:
    """Return a rank's last beat; None if the file is not there or not whole."""
    try:
        content = path.read_bytes()
        for _ in range(_MAX_READS):
            # While a note is valid only the other place is written to. A rank that is faster than that moves anyway.
            before, content = content, path.read_bytes()
            if _count_of(content) == _count_of(before):
                break
    except (OSError, struct.error):
        return None
    return _decode(before)


def _count_of(content: bytes) -> int:
    count: int = _HEAD.unpack_from(content)[-1]
    return count


def _decode(content: bytes) -> Beat | None:
    try:
        magic, rank, restart, pid, alive_s, count = _HEAD.unpack_from(content)
        moved_s, iteration, num_exchanges, is_behind, phase, tag = _NOTE.unpack_from(content, _NOTES_AT[count & 1])
    except struct.error:
        return None
    name = phase.rstrip(b"\0").decode(errors="replace")
    known = next((each for each in PHASES if each == name), None)
    if magic != _MAGIC or known is None:
        return None
    exchanged = tag.rstrip(b"\0").decode(errors="replace")
    # A main thread that moves is alive, whatever keeps the other thread from saying so; infinite is no such time.
    alive_s = alive_s if math.isinf(moved_s) else max(alive_s, moved_s)
    return Beat(rank, restart, pid, alive_s, moved_s, iteration, num_exchanges, known, exchanged, is_behind)


def read_beats(folder: Path) -> dict[int, Beat]:
    """Return the last beats of all ranks that have a file in a folder, by rank."""
    found = (read_beat(path) for path in folder.glob(f"{FILE_PREFIX}*"))
    return {beat.rank: beat for beat in found if beat is not None}
