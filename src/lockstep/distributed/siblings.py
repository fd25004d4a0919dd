"""The watch of ranks over one another where no launcher of ours has an eye on them, as under a bare torchrun.

torchrun sees only that a process has ended. If one is stopped or hangs, the others wait for it until they give up, and
torchrun then takes the first of those for the cause. So every rank looks at the beats of its host; the first that is
well ends the one that the others wait for, and says which it was and where.
"""

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from lockstep.core import stack_dump
from lockstep.core.beats import FILE_PREFIX, Beat, read_beats
from lockstep.core.blame import Kind, Limits, Verdict, judge, seen_since
from lockstep.core.outcome import note_failure
from lockstep.core.process_control import is_child_with, is_gone

LATE_S = 3.0
"""If a look comes this late, everything may have been late, and all start afresh."""
TURN_S = 3.0
"""How long each rank leaves it to those before it to act."""
_WELL_S = 5.0
_MAX_LINES = 40


class Siblings:
    """Looks at the ranks of this host, once a second.

    Args:
        folder: that they beat into.
        rank: of this process.
        restart: how often torchrun had restarted the ranks; beats of other attempts say nothing.
        world_size: of the job.
        limits: for how long nothing is no reason for blame.
        say: shows a line to the user.
    """

    def __init__(
        self, folder: Path, rank: int, restart: int, world_size: int, limits: Limits, say: Callable[[str], None]
    ) -> None:
        self._folder, self._rank, self._restart, self._world_size = folder, rank, restart, world_size
        self._limits, self._say = limits, say
        self._parent = os.getppid()
        self._let_alone: set[int] = set()
        self._looked_s = self._awake_since_s = self._began_s = time.monotonic()
        self._suspect: tuple[int, Kind] | None = None
        self._suspect_since_s = 0.0

    def look(self) -> None:
        """End the rank that keeps the others from going on, if there is one and it is this rank's turn."""
        now_s = time.monotonic()
        if now_s - self._looked_s > LATE_S:
            self._awake_since_s = now_s
            self._suspect = None
        self._looked_s = now_s
        beats = {
            rank: beat
            for rank, beat in read_beats(self._folder).items()
            if beat.restart == self._restart and rank < self._world_size and beat.pid not in self._let_alone
        }
        self._look_for_killed(beats)
        seen = {rank: seen_since(beat, self._awake_since_s) for rank, beat in beats.items()}
        verdict = judge(seen, now_s, self._limits, self._world_size)
        suspect = None if verdict is None else (verdict.pid, verdict.kind)
        if suspect != self._suspect:
            self._suspect, self._suspect_since_s = suspect, now_s
        elif verdict is not None and now_s - self._suspect_since_s >= self._turn_s(verdict, beats, now_s):
            self._end(verdict)
            self._suspect = None
            self._looked_s = time.monotonic()

    def _look_for_killed(self, beats: Mapping[int, Beat]) -> None:
        """Note the end of a rank that could not do so: torchrun is about to send SIGTERM to this one because of it."""
        for beat in beats.values():
            # A rank that ends well takes its beats away, and an earlier start may have left some.
            if beat.phase != "end" and beat.alive_s >= self._began_s and is_gone(beat.pid):
                self._let_alone.add(beat.pid)
                note_failure(self._folder, self._restart)

    def _turn_s(self, verdict: Verdict, beats: Mapping[int, Beat], now_s: float) -> float:
        """Return how long this rank waits before it acts: the lowest that is well acts at once, then the next."""
        well = sorted(rank for rank, beat in beats.items() if now_s - beat.alive_s < _WELL_S and rank != verdict.rank)
        return TURN_S * well.index(self._rank) if self._rank in well else float("inf")

    def _end(self, verdict: Verdict) -> None:
        """Have a rank write down where it is, say so, and kill it."""
        if not is_child_with(verdict.pid, self._parent, "RANK", str(verdict.rank)):
            self._let_alone.add(verdict.pid)  # the rank has ended, and its number is another process's by now
            return
        path = stack_dump.stack_path(self._folder, verdict.rank)
        stack_dump.ask(verdict.pid, path)
        # Before it ends: from then on torchrun may end this rank too, which is to know why.
        note_failure(self._folder, self._restart)
        self._say(
            f"lockstep: error: rank {verdict.rank} (on {socket.gethostname()}, pid {verdict.pid}) "
            f"{verdict.in_words()}, {verdict.where}; rank {self._rank} ends it, and with it the job"
        )
        for line in stack_dump.read_main_thread(path)[:_MAX_LINES]:
            self._say(f"  {line}")
        with contextlib.suppress(OSError):
            (self._folder / f"{FILE_PREFIX}{verdict.rank}").unlink()  # it keeps the folder in use no more
        with contextlib.suppress(OSError):
            os.kill(verdict.pid, signal.SIGKILL)
