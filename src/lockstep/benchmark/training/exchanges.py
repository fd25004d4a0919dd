"""The exchanges of measured iterations, in a table that has the same columns on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lockstep.benchmark.process_report import OwnExchange

if TYPE_CHECKING:
    from lockstep.benchmark.training.meter import Iteration

OTHERS = "others"
"""The column of exchanges that are no part of an iteration's own, taken together."""

Waits = tuple[tuple[float, ...], ...]
"""``(num_iterations, num_exchanges)``, in seconds."""


def exchanges_of(iterations: Sequence[Iteration]) -> tuple[tuple[OwnExchange, ...], Waits]:
    """Return the exchanges that every iteration has, in their order, and the wait of each.

    Those between iterations (comparing replicated state, every now and then) are one more column; in iterations without
    any its entry is 0. Nothing is returned where iterations had different exchanges, or none that can be seen.
    """
    own = [iteration.own for iteration in iterations if iteration.own is not None]
    if not own or len(own) < len(iterations) or not own[0].waits:
        return (), ()
    if len({tuple(wait.tag for wait in times.waits) for times in own}) > 1:
        return (), ()
    columns = tuple(OwnExchange(tag=wait.tag, num_bytes=wait.num_bytes) for wait in own[0].waits)
    rows = [tuple(wait.seconds for wait in times.waits) for times in own]
    if not any(iteration.other_waits_s for iteration in iterations):
        return columns, tuple(rows)
    rows = [(*row, iteration.other_waits_s) for row, iteration in zip(rows, iterations, strict=True)]
    return (*columns, OwnExchange(tag=OTHERS, num_bytes=0)), tuple(rows)
