"""Who is the odd one out among ranks, or processes, that should have the same, and how messages say so."""

from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any


def usual(values: Sequence[Any]) -> int:
    """Return the first rank that has what most ranks have; of equally many, what the lowest rank has."""
    return values.index(Counter(values).most_common(1)[0][0])


def odd(values: Sequence[Any]) -> list[int]:
    """Return the ranks whose value is not the usual one."""
    expected = values[usual(values)]
    return [rank for rank, value in enumerate(values) if value != expected]


def first_difference(listings: Sequence[Sequence[str]], odd_rank: int, usual_rank: int, whose: str = "rank") -> str:
    """Say in words where two listings, which differ, part.

    Args:
        listings: of every rank, lines ``name`` or ``name<tab>kind``.
        odd_rank, usual_rank: whose listings differ.
        whose: what the numbers count, as ``process``.
    """
    pairs = zip_longest(listings[odd_rank], listings[usual_rank], fillvalue="nothing")
    one, other = next((one, other) for one, other in pairs if one != other)
    return f"{whose} {odd_rank} has {_in_words(one)} where {whose} {usual_rank} has {_in_words(other)}"


def others_in_words(count: int, noun: str) -> str:
    """Return whether so many others differ too, as what follows the first in a sentence."""
    if count == 1:
        return f"and so does 1 other {noun}"
    return f"and so do {count} other {noun}s" if count else f"and no other {noun} does"


def _in_words(line: str) -> str:
    name, _, kind = line.partition("\t")
    return f"{name} ({kind})" if kind else name or "nothing"
