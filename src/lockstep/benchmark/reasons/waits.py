"""Why ranks wait for one another: always for the same ones, or for each other in turn.

Of the wait of an iteration, which is the time of the last rank less the mean of all, that part is lost to stragglers
which would be there if every rank always took its typical time; the rest is lost to how iterations differ.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from lockstep.benchmark.reasons.figures import NOTABLE, SEEN, mean_over, per_iteration, share
from lockstep.benchmark.reasons.stragglers import Stragglers
from lockstep.benchmark.schema import Finding, NodeHardware, RankFigures
from lockstep.benchmark.units import duration, percent
from lockstep.distributed.wording import name_ranks

SURE = 4.0
"""Standard errors that a rank must be behind to be a straggler: the unluckiest of 128 equal ranks is 2.6 behind."""
MOSTLY_ONE = 0.75
"""Share of waiting in turn that must be for one rank for its name to be worth saying."""

_STANDARD_ERROR_OF_MEDIAN = 1.2533 * 1.4826
"""Of normal values, times their median absolute deviation over the root of their number."""


def find_waits(
    ranks: Sequence[RankFigures],
    wait_s: float,
    iteration_s: float,
    compute_s: np.ndarray,
    hardware: Sequence[NodeHardware],
) -> list[Finding]:
    """Return findings about waiting for stragglers, none to two.

    Args:
        ranks: every rank, in order.
        wait_s: of a mean iteration, mean over ranks, in seconds.
        iteration_s: the mean iteration, in seconds.
        compute_s: own work of each rank in each iteration, ``(num_ranks, num_iterations)``.
        hardware: of every node.
    """
    if len(ranks) < 2 or share(wait_s, iteration_s) < NOTABLE:
        return []
    means = [each.compute_s.mean for each in ranks if each.compute_s is not None]
    if not compute_s.size and len(means) == len(ranks):
        compute_s = np.asarray(means)[:, None]
    if not compute_s.size:
        words = (
            f"Ranks wait for one another for {per_iteration(wait_s)} ({percent(share(wait_s, iteration_s))}), but "
            "how long each one computes was not measured."
        )
        return [Finding(reason="unknown", rank=None, lost_share=share(wait_s, iteration_s), words=words)]
    behind = compute_s - compute_s.mean(axis=0)
    slow, steady_s = _stragglers(behind)
    steady_s = min(steady_s, wait_s)
    found = []
    if slow and share(steady_s, iteration_s) >= NOTABLE:
        stragglers = Stragglers(ranks, slow, compute_s, iteration_s, hardware)
        found.append(stragglers.finding(share(steady_s, iteration_s)))
    else:
        steady_s = 0.0
    if share(wait_s - steady_s, iteration_s) >= NOTABLE:
        found.append(_taking_turns(ranks, wait_s - steady_s, iteration_s, behind, bool(found)))
    return found


def _stragglers(behind: np.ndarray) -> tuple[list[int], float]:
    """Return the ranks that are typically last, and what all wait for them in a typical iteration, mean over ranks.

    Medians, so that one long iteration makes no straggler; no rank where the difference may well be chance.

    Args:
        behind: seconds by which each rank computes longer than the mean, ``(num_ranks, num_iterations)``.
    """
    typical = np.median(behind, axis=1)
    deviation = np.median(np.abs(behind - typical[:, None]))
    error_s = _STANDARD_ERROR_OF_MEDIAN * deviation / np.sqrt(behind.shape[1])
    most = float(typical.max() - typical.mean())
    if most <= SURE * error_s:
        return [], 0.0
    return [int(rank) for rank in np.flatnonzero(typical - typical.mean() >= most / 2)], most


def _taking_turns(
    ranks: Sequence[RankFigures], rest_s: float, iteration_s: float, behind: np.ndarray, has_straggler: bool
) -> Finding:
    """Return the finding about waits that no rank causes all the time."""
    lost = share(rest_s, iteration_s)
    cost = f"{per_iteration(rest_s)} ({percent(lost)})"
    words = f"Ranks{' besides' if has_straggler else ''} take turns at being late, and the others wait {cost}"
    phases = _late_by_phase(ranks, rest_s)
    if phases:
        return Finding(reason="taking_turns", rank=None, lost_share=lost, words=f"{words}: {phases}.")
    lack_s = mean_over(ranks, "contention_s") or 0.0
    if share(lack_s, iteration_s) >= NOTABLE:
        words += ". Ranks that lack a core are late in turn: see to the cores first."
        return Finding(reason="taking_turns", rank=None, lost_share=lost, words=words)
    last = behind.argmax(axis=0)
    caused_s = np.bincount(last, weights=behind.max(axis=0), minlength=len(ranks))
    top = int(caused_s.argmax())
    if not has_straggler and behind.shape[1] > 1 and caused_s[top] >= MOSTLY_ONE * caused_s.sum() > 0:
        words = (
            f"No rank is always the last, but the others wait {cost}, nearly all of it for rank {top} "
            f"({ranks[top].host}, {ranks[top].device}), which is much later than usual now and then. See what slows it "
            "then: resets, a disk, another process."
        )
        return Finding(reason="taking_turns", rank=top, lost_share=lost, words=words)
    rank, count = Counter(last.tolist()).most_common(1)[0]
    often = f"most often rank {rank}, in {count} of {len(last)} iterations"
    words += (
        f"; none is always the last{f' ({often})' if len(last) > 1 else ''}. More work between exchanges evens it out: "
        "more envs per rank, more steps, fewer minibatches."
    )
    return Finding(reason="taking_turns", rank=None, lost_share=lost, words=words)


def _late_by_phase(ranks: Sequence[RankFigures], rest_s: float) -> str:
    """Return which rank is late in which phase, if different ones are and most of the wait comes from that."""
    times = [[getattr(each, name) for each in ranks] for name in ("rollout_s", "update_s")]
    if any(use is None for uses in times for use in uses):
        return ""
    means = np.array([[use.mean for use in uses] for uses in times])  # (2, num_ranks)
    first, second = (int(rank) for rank in means.argmax(axis=1))
    late_s = means.max(axis=1) - means.mean(axis=1)
    both_s = float(late_s.sum() - (means.sum(axis=0).max() - means.sum(axis=0).mean()))
    if first == second or both_s < SEEN * rest_s:
        return ""
    return (
        f"{name_ranks([first])} is the last in the rollout (by {duration(late_s[0])} against the mean), "
        f"{name_ranks([second])} in the update (by {duration(late_s[1])})"
    )
