"""How long ranks wait for the slowest of them: by chance, a little more with every rank; and for one that lags."""

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtr

from lockstep.benchmark.forecast.points import Lagging, Point

_GRID = np.linspace(-12.0, 12.0, 4801)  # beyond, a normal distribution has nothing that a double could hold


@dataclass(frozen=True)
class Stragglers:
    """How ranks differ.

    Attributes:
        deviation: standard deviation between ranks, by chance, as a share of what they compute.
        is_measured: whether it comes from several ranks; else from how iterations of one rank vary, which is more than
            ranks differ if all vary together.
        lagging: a rank that was slower than the others whenever it was measured; None: there is none.
    """

    deviation: float
    is_measured: bool
    lagging: Lagging | None

    def by_chance_s(self, num_ranks: int, compute_s: float) -> float:
        """Return how much longer the slowest of ranks takes than their mean, if they differ by chance alone."""
        return self.deviation * compute_s * expected_maximum(num_ranks)

    def by_lagging_s(self, num_ranks: int, compute_s: float) -> float:
        """Return how much longer the lagging rank takes, in a job of several ranks that it belongs to."""
        belongs = self.lagging is not None and num_ranks > max(1, self.lagging.rank)
        return self.lagging.share * compute_s if self.lagging is not None and belongs else 0.0


def expected_maximum(num_ranks: int) -> float:
    """Return the expected maximum of so many standard normal values (David and Nagaraja 2003, Order Statistics).

    The maximum of P independent values has the distribution function F = Phi^P, and the mean of what has F and stays
    below b is b less the integral of F up to there.
    """
    if num_ranks == 1:
        return 0.0
    return float(_GRID[-1] - np.trapezoid(ndtr(_GRID) ** num_ranks, _GRID))


def fit_stragglers(points: Sequence[Point]) -> Stragglers:
    """Return how ranks differ in these points; those of more threads than cores say nothing about it."""
    quiet = [each for each in points if each.setting.load == 1] or list(points)
    several = [each for each in quiet if each.setting.num_ranks > 1 and each.straggler_wait_s is not None]
    lagging = _lagging_in(several)
    if several:
        return Stragglers(statistics.median(_deviation(each) for each in several), True, lagging)
    return Stragglers(statistics.median(each.varies for each in quiet), False, None)


def _lagging_in(points: Sequence[Point]) -> Lagging | None:
    found = [each.lagging for each in points if each.lagging is not None]
    if not found:
        return None
    (rank, host), times = Counter((each.rank, each.host) for each in found).most_common(1)[0]
    if times <= sum(rank < each.setting.num_ranks for each in points) / 2:
        return None
    shares = [each.share for each in found if (each.rank, each.host) == (rank, host)]
    return Lagging(rank, host, statistics.median(shares))


def _deviation(point: Point) -> float:
    """Return the deviation that explains the mean wait of a point, less what its lagging rank explains."""
    num_ranks, wait_s = point.setting.num_ranks, point.straggler_wait_s or 0.0
    if point.lagging is not None:
        wait_s -= point.lagging.share * point.own_s * (num_ranks - 1) / num_ranks
    return max(0.0, wait_s) / expected_maximum(num_ranks) / max(point.own_s, 1e-12)
