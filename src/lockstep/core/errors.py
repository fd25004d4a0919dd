"""The errors a user can meet, each one line: what is wrong, the value seen, and the mend."""

import difflib
from collections.abc import Iterable


class LockstepError(Exception):
    """Base of all errors worded for the user; ``exit_code`` is what the command line returns.

    Args:
        message: one line: what is wrong, the value seen, and the mend.
        shared: the same error was raised on every rank, so one of them says it for all.
    """

    exit_code = 1

    def __init__(self, message: str = "", *, shared: bool = False) -> None:
        super().__init__(message)
        self.shared = shared


class UsageError(LockstepError):
    """Wrong usage or configuration, found before anything was written (exit code 2)."""

    exit_code = 2


class RunError(LockstepError):
    """A failure at run time (exit code 1)."""

    exit_code = 1


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the known name most like ``name``, or ``""`` when none is close."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean '{matches[0]}'?" if matches else ""


def in_one_line(error: BaseException) -> str:
    """Return an error in one line: lockstep's own words, or the kind and the first line of any other's.

    Where the rest of a message is another error's traceback (a callback of JAX), its last line says what happened.
    """
    first, _, rest = str(error).strip().partition("\n")
    if isinstance(error, LockstepError):
        return first
    words = f"{type(error).__name__}: {first}"
    if first.endswith("Traceback (most recent call last):") and rest.strip():
        cause = rest.strip().rpartition("\n")[2].strip()
        return f"{words.removesuffix('Traceback (most recent call last):').rstrip(': ')}: {cause}"
    return words
