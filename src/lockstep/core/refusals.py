"""What a disk refuses while a training goes on: said once, tried again, or the end, as the config says."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from lockstep.core.errors import RunError

OnError = Literal["continue", "stop"]

FIRST_QUIET_S, LONGEST_QUIET_S = 5.0, 600.0
"""How long nothing more is said of what was just said something of: twice as long each time, up to the latter."""


@dataclass
class _Kind:
    """What was said of one kind of file."""

    said_to_fail: bool = False
    said_at_s: float = -math.inf
    quiet_s: float = FIRST_QUIET_S


class Refusals:
    """Judges every attempt to write a kind of file, and tells the user when it begins to fail and when it works again.

    A disk that is just about full takes one file and refuses the next, so of changes in quick succession only those
    that last are told.

    Args:
        on_error: ``stop`` raises what was refused, ``continue`` goes on.
        say: shows one line.
        clock: in seconds.
    """

    def __init__(
        self, on_error: OnError, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._on_error, self._say, self._clock = on_error, say, clock
        self._kinds: dict[str, _Kind] = {}

    def attempt(self, kind: str, work: Callable[[], object], meanwhile: str) -> None:
        """Do ``work``, which writes a file of a kind; see ``note``."""
        try:
            work()
        except RunError as error:
            self.note(kind, error, meanwhile)
        else:
            self.note(kind, None, meanwhile)

    def note(self, kind: str, error: RunError | None, meanwhile: str) -> None:
        """Take how an attempt ended.

        Args:
            kind: in the plural, as in ``checkpoints``.
            error: one line with the reason and the mend; None if it went well.
            meanwhile: what happens until it works again.

        Raises:
            RunError: the error, if an error is to stop the training.
        """
        if error is not None and self._on_error == "stop":
            raise error
        state = self._kinds.setdefault(kind, _Kind())
        now_s = self._clock()
        if (error is not None) == state.said_to_fail or now_s < state.said_at_s + state.quiet_s:
            return
        if state.said_at_s > -math.inf:
            state.quiet_s = min(2.0 * state.quiet_s, LONGEST_QUIET_S)
        state.said_to_fail, state.said_at_s = error is not None, now_s
        if error is None:
            self._say(f"lockstep: {kind} can be written again")
        else:
            self._say(f"lockstep: warning: {error}; {meanwhile}")
