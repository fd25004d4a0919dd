"""The end of a rank that was told to end by SIGTERM and can't: its main thread is where no Python handler runs.

A handler waits until the main thread is back from a call into a library. One that waits for a rank that is gone is
never back; torchrun's agent would wait half a minute for it, and then kill it without a word.
"""

import contextlib
import math
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping

from lockstep.core import beats, saves
from lockstep.core.blame import where
from lockstep.core.interrupts import overheard
from lockstep.core.outcome import has_failed
from lockstep.distributed.heartbeat import Heartbeat, current
from lockstep.distributed.rank_exit import RankExit
from lockstep.distributed.timeouts import seconds

TIMEOUT = "LOCKSTEP_TERM_TIMEOUT_S"
"""Variable with the seconds that the main thread may stand still after SIGTERM."""
DEFAULT_TIMEOUT_S = 10.0

_LONGEST_S = 25.0  # torchrun's agent, and SLURM, kill what has not ended 30 s after SIGTERM
_SLACK = 1.5
_POLL_S = 0.1
_OUTER_PHASES = ("start", "end")


@contextlib.contextmanager
def ending_in_time(environment: Mapping[str, str] = os.environ) -> Iterator[None]:
    """End this rank, within this context, if it gets SIGTERM and does not come to the end of its iteration.

    It is ended once its main thread has stood still for LOCKSTEP_TERM_TIMEOUT_S seconds (10 if it is not set) since the
    signal. Whoever moves is not ended, however long the iteration takes: it is about to save. One that waits for others
    counts as moving while another rank of this host does. Where single steps have been slow before, or the learner is
    the user's own and beats only when it exchanges something, it may stand still for longer, but for no more than
    25 s: half a minute after SIGTERM torchrun and SLURM kill. A save under way is waited for.

    If another rank has failed there is nothing to wait for: the signal only means that. SIGUSR1, by which schedulers
    warn long before the end, starts nothing here. Without a heartbeat, as in a process that is alone, nothing happens.

    Raises:
        UsageError: LOCKSTEP_TERM_TIMEOUT_S is no number of seconds.
    """
    timeout_s, heartbeat = seconds(TIMEOUT, DEFAULT_TIMEOUT_S, environment), current()
    with contextlib.ExitStack() as resources:
        signals = None if heartbeat is None else resources.enter_context(overheard())
        if heartbeat is None or signals is None:
            yield
            return
        countdown = Countdown(signals, heartbeat, timeout_s, RankExit(environment).abort)
        thread = threading.Thread(target=countdown.run, name="lockstep-stopping", daemon=True)
        thread.start()
        try:
            yield
        finally:
            countdown.is_over.set()
            thread.join()


class Countdown:
    """What happens after SIGTERM, in a thread that learns of it without the main thread.

    Args:
        signals: where their numbers are read.
        heartbeat: of this process.
        timeout_s: how long the main thread may stand still, see ``ending_in_time``.
        abort: ends the process; called with the reason, and whether the user is to be told of it.
    """

    def __init__(
        self, signals: socket.socket, heartbeat: Heartbeat, timeout_s: float, abort: Callable[[str, bool], None]
    ) -> None:
        self.is_over = threading.Event()
        self._signals, self._heartbeat, self._timeout_s, self._abort = signals, heartbeat, timeout_s, abort

    def run(self) -> None:
        """Listen until it is over."""
        asked_s: float | None = None
        while not self.is_over.is_set():
            if select.select([self._signals], [], [], _POLL_S)[0] and signal.SIGTERM in self._signals.recv(4096):
                asked_s = asked_s or time.monotonic()
            if asked_s is not None:
                self.look(time.monotonic(), asked_s)

    def look(self, now_s: float, asked_s: float) -> None:
        """End the process if it is time to.

        Args:
            now_s: by ``time.monotonic``.
            asked_s: when SIGTERM came.
        """
        beat = beats.own_beat()
        if beat is None or beat.phase == "save" or saves.in_progress() or self.is_over.is_set():
            return
        if has_failed(self._heartbeat.folder, self._heartbeat.restart):
            self._abort("another rank failed", False)
        still_s = now_s - max(asked_s, self._moved_s(beat))
        if still_s >= self._patience_s(beat):
            self._abort(
                f"was asked to stop by SIGTERM and its main thread has not moved for {still_s:.0f} s, {where(beat)}; "
                "what it learned since the last checkpoint is lost",
                True,
            )

    def _moved_s(self, own: beats.Beat) -> float:
        if not own.exchange:
            return own.moved_s
        others = beats.read_beats(self._heartbeat.folder).values()
        moved_s = [beat.moved_s for beat in others if beat.restart == own.restart and beat.moved_s < math.inf]
        return max([own.moved_s, *moved_s])

    def _patience_s(self, own: beats.Beat) -> float:
        if own.phase in _OUTER_PHASES:
            return max(self._timeout_s, _LONGEST_S)
        return max(self._timeout_s, min(_LONGEST_S, _SLACK * beats.longest_pause_s()))
