"""How long a rank computes, as a sum of terms whose sizes are known and whose prices are fitted."""

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import minimize, nnls

from lockstep.benchmark.forecast.points import Point, Setting

ROLLOUT, UPDATE, WHOLE = "rollout", "update", "iteration"


@dataclass(frozen=True)
class Term:
    """Something that takes time.

    Attributes:
        phase: of the iteration that it belongs to.
        words: what it is.
        amount: how much of it there is in an iteration of one rank.
    """

    phase: str
    words: str
    amount: Callable[[Setting], float]

    @property
    def name(self) -> str:
        """What it is, of which phase."""
        return self.words if self.phase == WHOLE else f"{self.words} ({self.phase})"


def _samples(setting: Setting) -> float:
    return float(setting.num_envs * setting.work.num_steps_per_env)


def _updates(setting: Setting) -> float:
    return float(setting.work.num_learning_epochs * setting.work.num_mini_batches)


def _trained(setting: Setting) -> float:
    return _samples(setting) * setting.work.num_learning_epochs


TERMS = (
    Term(ROLLOUT, "env steps", _samples),
    Term(ROLLOUT, "calls per step", lambda it: float(it.work.num_steps_per_env)),
    Term(ROLLOUT, "products of the networks", lambda it: _samples(it) * it.work.flops_per_action),
    # A layer's activations grow as its width, its products as the square of that.
    Term(UPDATE, "activations", lambda it: _trained(it) * math.sqrt(it.work.flops_per_sample)),
    Term(UPDATE, "calls per minibatch", _updates),
    # Forward, and about twice that backward: by the activations and by the weights.
    Term(UPDATE, "products of the networks", lambda it: 3 * _trained(it) * it.work.flops_per_sample),
    Term(UPDATE, "optimizer steps", lambda it: _updates(it) * it.work.num_parameters),
    Term(UPDATE, "samples", _trained),
)
"""In the order in which they are believed: of those that can't be told apart, the first ones are taken. Networks of two
sizes can't tell samples from activations; where several sizes were measured, it was activations."""

_SAME = 1e-4  # two terms whose sizes keep the same proportion to within about 1 %
_WORTH = 0.9  # a further term must bring the error of the choice below this share of what it was
_GOOD_ENOUGH = 0.002  # errors that differ by less are the same


@dataclass(frozen=True)
class Price:
    """A term and the seconds that one of it takes."""

    term: Term
    seconds: float


@dataclass(frozen=True)
class ComputeModel:
    """Seconds that a rank computes in an iteration while it has its core.

    Attributes:
        prices: of the terms that are used.
        serial_share: of the work of a rank with one thread that a second thread does not make faster.
        slowdown: share by which a rank is slower when all other cores of the node are busy.
        left_out: each term that is not used, and why.
    """

    prices: tuple[Price, ...]
    serial_share: float
    slowdown: float
    left_out: tuple[tuple[str, str], ...]

    def alone_s(self, setting: Setting) -> float:
        """Return what a rank takes alone on its node."""
        whole = sum(price.seconds * price.term.amount(setting) for price in self.prices)
        return whole * _by_threads(self.serial_share, setting)

    def shared_memory_s(self, setting: Setting) -> float:
        """Return how much longer it takes beside the other ranks of its node, with a core for each of its threads."""
        return self.alone_s(setting) * self.slowdown * setting.busy_share


def _by_threads(serial_share: float, setting: Setting) -> float:
    """Return the share of one thread's time that is left with several (Amdahl 1967)."""
    return serial_share + (1 - serial_share) / setting.threads


def fit_compute(points: Sequence[Point]) -> ComputeModel:
    """Return the model that fits best.

    Prices are found by nonnegative least squares on relative residuals; which terms are used, by the error on points
    held back one by one and on the others, which a further term has to lower notably. How much busy cores and fewer
    threads cost is sought around that.

    Args:
        points: at least one. Those of more threads than cores are used only where there are no others.
    """
    points = [each for each in points if each.setting.load == 1] or list(points)
    threads = {each.setting.threads for each in points}
    shares = {each.setting.busy_share for each in points}
    pairs = {(each.setting.threads, each.setting.busy_share) for each in points}
    # With two kinds of points that differ in both, one of the two has to explain the difference.
    sought = ((len(threads) > 1 and len(pairs) > 2) or len(shares) == 1 < len(threads), len(shares) > 1)
    left_out: list[tuple[str, str]] = []
    all_terms = _told_apart(points, _terms_for(points), left_out)
    serial_share, slowdown = _seek(points, all_terms, sought)
    factors = [_factor(each.setting, serial_share, slowdown) for each in points]
    chosen = _choose(points, all_terms, factors, left_out)
    serial_share, slowdown = _seek(points, chosen, sought)
    prices, _ = _prices(points, chosen, [_factor(each.setting, serial_share, slowdown) for each in points])
    used = tuple(Price(term, float(seconds)) for term, seconds in zip(chosen, prices, strict=True) if seconds > 0)
    if len(threads) > 1 and not sought[0]:
        left_out.append(("threads of a rank", "can't be told from busy cores"))
    return ComputeModel(used, serial_share, slowdown, tuple(left_out))


def _terms_for(points: Sequence[Point]) -> list[Term]:
    if all(each.rollout_s is not None and each.update_s is not None for each in points):
        return list(TERMS)
    # What can't be measured apart is fitted as one; its terms keep their names.
    return [Term(WHOLE, term.name, term.amount) for term in TERMS]


def _seconds(point: Point, phase: str) -> float:
    seconds = {ROLLOUT: point.rollout_s, UPDATE: point.update_s, WHOLE: point.own_s}[phase]
    assert seconds is not None
    return seconds


def _told_apart(points: Sequence[Point], terms: Sequence[Term], left_out: list[tuple[str, str]]) -> list[Term]:
    """Return the terms whose sizes do not all rise and fall together over the points."""
    kept: list[Term] = []
    for term in terms:
        column = _direction(points, term)
        same = [other for other in kept if other.phase == term.phase and _close(column, _direction(points, other))]
        if same:
            left_out.append((term.name, f"can't be told from {same[0].name}"))
        else:
            kept.append(term)
    return kept


def _direction(points: Sequence[Point], term: Term) -> np.ndarray:
    column = np.array([term.amount(each.setting) / max(_seconds(each, term.phase), 1e-12) for each in points])
    length = float(np.linalg.norm(column))
    return column / length if length else column


def _close(one: np.ndarray, other: np.ndarray) -> bool:
    return bool(1 - one @ other < _SAME) or not other.any() or not one.any()


def _factor(setting: Setting, serial_share: float, slowdown: float) -> float:
    return _by_threads(serial_share, setting) * (1 + slowdown * setting.busy_share)


def _prices(points: Sequence[Point], terms: Sequence[Term], factors: Sequence[float]) -> tuple[np.ndarray, float]:
    """Return the price of each term, and the mean square of the relative residuals."""
    prices, squares = np.zeros(len(terms)), 0.0
    for phase in dict.fromkeys(term.phase for term in terms):
        own = [index for index, term in enumerate(terms) if term.phase == phase]
        columns = _columns(points, [terms[index] for index in own], factors)
        # Columns differ by many orders of magnitude: nnls stops by an absolute tolerance.
        sizes = np.linalg.norm(columns, axis=0)
        sizes[sizes == 0] = 1.0
        found, residual = nnls(columns / sizes, np.ones(len(points)))
        prices[own] = found / sizes
        squares += float(residual) ** 2 / len(points)
    return prices, squares


def _columns(points: Sequence[Point], terms: Sequence[Term], factors: Sequence[float]) -> np.ndarray:
    """Return ``(num_points, num_terms)``: the amount of each term for each second that was measured."""
    return np.array(
        [
            [term.amount(each.setting) * factor / max(_seconds(each, term.phase), 1e-12) for term in terms]
            for each, factor in zip(points, factors, strict=True)
        ]
    )


def _seek(points: Sequence[Point], terms: Sequence[Term], sought: tuple[bool, bool]) -> tuple[float, float]:
    """Return serial share and slowdown with the least residuals; 1 and 0 where they are not sought."""
    if not any(sought):
        return 1.0, 0.0

    def full(values: np.ndarray) -> tuple[float, float]:
        given = iter(values)
        serial = float(np.clip(next(given), 0, 1)) if sought[0] else 1.0
        slowdown = float(np.clip(next(given), 0, 10)) if sought[1] else 0.0
        return serial, slowdown

    def residual(values: np.ndarray) -> float:
        return _prices(points, terms, [_factor(each.setting, *full(values)) for each in points])[1]

    start = np.array([value for value, wanted in zip((0.7, 0.1), sought, strict=True) if wanted])
    found = minimize(residual, start, method="Nelder-Mead", options={"xatol": 1e-5, "fatol": 1e-12, "maxiter": 400})
    return full(found.x)


def _choose(
    points: Sequence[Point], terms: Sequence[Term], factors: Sequence[float], left_out: list[tuple[str, str]]
) -> list[Term]:
    """Return, phase by phase, the fewest terms that predict points which the fit has not seen about as well as any."""
    chosen: list[Term] = []
    for phase in dict.fromkeys(term.phase for term in terms):
        own = [term for term in terms if term.phase == phase]
        best: tuple[Term, ...] = ()
        best_error = math.inf
        for size in range(1, min(len(own), max(1, len(points) - 1)) + 1):
            tried = [(_error(points, subset, factors), subset) for subset in itertools.combinations(own, size)]
            least = min(error for error, _ in tried)
            error, subset = next(each for each in tried if each[0] <= least + _GOOD_ENOUGH)
            if error < _WORTH * best_error - _GOOD_ENOUGH or not best:
                best, best_error = subset, error
        chosen += best
        left_out += [(term.name, "without which it fits as well") for term in own if term not in best]
    return chosen


def _error(points: Sequence[Point], terms: Sequence[Term], factors: Sequence[float]) -> float:
    """Return the mean error, as a logarithm, on points left out of the fit one by one, and on those that it has.

    The first alone would take too few terms where a point is the only one of its size: without it there is nothing
    that tells more terms apart, so that the fewest do best there, however badly they fit the rest.
    """
    if len(points) == 1:
        return 0.0
    own = _columns(points, terms, factors)
    errors = _logarithms(own @ _prices(points, terms, factors)[0])
    for index in range(len(points)):
        rest = [other for other in range(len(points)) if other != index]
        prices, _ = _prices([points[other] for other in rest], terms, [factors[other] for other in rest])
        errors += _logarithms(own[index : index + 1] @ prices)
    return statistics.fmean(errors)


def _logarithms(ratios: np.ndarray) -> list[float]:
    return [abs(math.log(max(float(ratio), 1e-3))) for ratio in ratios]
