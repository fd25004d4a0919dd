"""What follows a training, and how a training ends: the same for every framework."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from lockstep.core.interrupts import StopReason
from lockstep.core.types import Wait

Metrics = dict[str, float | int | None]
"""As ``core.metrics`` takes them, and still open for more."""
Status = Literal["finished"] | StopReason


class OwnTimes(NamedTuple):
    """What one process did in an iteration; for whoever measures it."""

    phases_s: Mapping[str, float]
    """Seconds by phase, without waits: ``rollout`` and ``update``, or ``step`` where the iteration is one program."""
    waits: tuple[Wait, ...]
    """Its exchanges with other ranks, in an order that is the same on all of them; empty where they can't be seen."""


class Observer(Protocol):
    """What follows a training: the run directory, the display, the stop signals."""

    @property
    def stop_requested(self) -> StopReason | None:
        """Why this rank's training should save and stop, or None; the ranks agree at the end of each iteration."""

    @property
    def save_due(self) -> bool:
        """Whether it is time for a checkpoint on this rank's clock; rank 0's decides for all."""

    def record(self, metrics: Metrics) -> None:
        """Take one iteration's metrics."""

    def save(self, iteration: int, content: dict[str, Any]) -> None:
        """Begin to keep a checkpoint; the content may change as soon as this returns."""

    def save_failure(self, iteration: int, content: dict[str, Any]) -> Path | None:
        """Keep the state of a training that can't go on, apart from the checkpoints; return where."""


def nobody_asks() -> StopReason | None:
    """Return None: there is no reason to stop."""
    return None


def no_clock() -> bool:
    """Return False: no checkpoint is ever due by the clock."""
    return False


class NonFiniteError(Exception):
    """A tensor was not finite; the message names it and its rank. Every rank raises the same."""


def nonfinite_in_words(iteration: int, cause: object, path: str) -> str:
    """Return the line that ends a training in which something was not finite.

    Args:
        iteration: in which that was.
        cause: what was not finite, and on which rank.
        path: where the state was saved; "" if it could not be.
    """
    where = f"the state is in {path}" if path else "the state could not be saved"
    return (
        f"not finite in iteration {iteration}: {cause}; {where}; "
        "a smaller agent.learning_rate or bounds on rewards and observations may help"
    )
