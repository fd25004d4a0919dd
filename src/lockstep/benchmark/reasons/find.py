"""Why a job is not faster, in words: what costs a notable share of an iteration, each told apart from the others.

Time that a rank does not compute in goes to one of three things (``TimeSplit``): cores that something else had, ranks
that came later to an exchange, and the exchange itself. Each is looked into by itself; one that follows from another
says so.
"""

from collections.abc import Sequence

import numpy as np

from lockstep.benchmark.reasons.figures import (
    NOTABLE,
    SEEN,
    is_crowded,
    mean_of,
    mean_over,
    num_cores,
    num_threads,
    others_busy_percent,
    per_iteration,
    share,
)
from lockstep.benchmark.reasons.waits import find_waits
from lockstep.benchmark.schema import Exchange, Finding, NodeHardware, RankFigures, TimeSplit
from lockstep.benchmark.units import duration, percent, quantity
from lockstep.distributed.wording import name_ranks

BUSY = 0.8
"""Share of a core's time that a rank must use for it to be the rank that keeps the core busy."""
SMALL_MESSAGE_BYTES = 2**16
"""At 1 Gbit/s a message of this size takes half a millisecond: where smaller ones are slow, it is for their latency."""


def find_reasons(
    ranks: Sequence[RankFigures],
    split: TimeSplit,
    iteration_s: float,
    compute_s: np.ndarray,
    exchanges: Sequence[Exchange],
    hardware: Sequence[NodeHardware],
) -> tuple[Finding, ...]:
    """Return what keeps a job from being faster, the most expensive first; one finding at least.

    Args:
        ranks: every rank, in order.
        split: of a mean iteration, mean over ranks.
        iteration_s: the mean iteration, in seconds.
        compute_s: own work of each rank in each iteration, contention included, in seconds,
            ``(num_ranks, num_iterations)``; without iterations where it was not measured.
        exchanges: by tag; empty where they can't be seen one by one.
        hardware: of every node, in order.

    Returns:
        Findings that cost ``NOTABLE`` or more of an iteration, and more ranks than cores where that can't be told; if
        there are none, one that says that nothing is lost, or that no single reason costs much.
    """
    found = [
        *_busy_cores(ranks, iteration_s, hardware),
        *find_waits(ranks, split.straggler_wait_s, iteration_s, compute_s, hardware),
        *_slow_collective(ranks, split, iteration_s, exchanges),
    ]
    if not found:
        return (_nothing(ranks, split, iteration_s),)
    return tuple(sorted(found, key=lambda finding: finding.lost_share, reverse=True))


def _busy_cores(ranks: Sequence[RankFigures], iteration_s: float, hardware: Sequence[NodeHardware]) -> list[Finding]:
    """Return a finding for each node whose ranks lack cores: their own fault, or that of something else."""
    found = []
    for node in hardware:
        here = [each for each in ranks if each.node == node.node]
        if not here:
            continue
        crowded = is_crowded(node, here)
        if all(each.contention_s is None for each in here):
            if crowded and any(each.device.startswith("cpu") for each in here):
                found.append(_crowded(node, here, None, 0.0, 0.0))
            continue
        lost_s = [min(mean_of(each.contention_s), iteration_s) for each in here]
        lost_here = share(sum(lost_s) / len(here), iteration_s)
        if lost_here < NOTABLE:
            continue
        lost = share(sum(lost_s) / len(ranks), iteration_s)
        if crowded:
            found.append(_crowded(node, here, sum(lost_s) / len(here), lost_here, lost))
        elif _is_own_doing(node, here, lost_here):
            found.append(_too_busy(node, here, sum(lost_s) / len(here), lost_here, lost))
        else:
            found.append(_taken(node, here, lost_s, iteration_s, lost))
    return found


def _crowded(
    node: NodeHardware, here: Sequence[RankFigures], lost_s: float | None, share_here: float, lost: float
) -> Finding:
    threads, cores = num_threads(here), num_cores(node, here)
    each = "each" if len(here) > 1 else "it"
    cost = (
        f"how long {each} waits for a core was not measured"
        if lost_s is None
        else f"{each} is ready to compute without a core for {per_iteration(lost_s)} ({percent(share_here)})"
    )
    fewer = "" if threads == len(here) else ", let each keep fewer threads busy (--num_torch_threads)"
    words = (
        f"Node {node.node} ({node.host}) has more ranks than cores: {name_ranks(rank.rank for rank in here)} "
        f"keep{'' if len(here) > 1 else 's'} {threads} threads busy on {cores} allowed core{'s' if cores > 1 else ''}"
        f"; {cost}. Use as many ranks as fit ({max(1, cores * len(here) // threads)} here){fewer}, or allow the job "
        "more cores."
    )
    return Finding(reason="more_ranks_than_cores", rank=_single(here), lost_share=lost, words=words)


def _is_own_doing(node: NodeHardware, here: Sequence[RankFigures], lost: float) -> bool:
    """Return whether ranks keep all of their cores busy by themselves, and nothing else does."""
    own, others = mean_over(here, "cpu_percent"), others_busy_percent(here)
    cores = sum(len(each.cores) if each.cores else node.num_allowed_cores / len(here) for each in here) / len(here)
    if own is None or others is None:
        return False
    return own >= BUSY * 100 * cores and others < SEEN * 100 * lost


def _too_busy(
    node: NodeHardware, here: Sequence[RankFigures], lost_s: float, share_here: float, lost: float
) -> Finding:
    words = (
        f"Node {node.node} ({node.host}) has fewer cores than its ranks have threads that are ready: by themselves "
        f"{name_ranks(each.rank for each in here)} keep every core busy that they may run on, and something of theirs "
        f"is ready to compute without one for {per_iteration(lost_s)} ({percent(share_here)}). Use fewer ranks, or "
        "allow the job more cores."
    )
    return Finding(reason="more_ranks_than_cores", rank=_single(here), lost_share=lost, words=words)


def _taken(
    node: NodeHardware, here: Sequence[RankFigures], lost_s: Sequence[float], iteration_s: float, lost: float
) -> Finding:
    """Return the finding that something else keeps the cores busy that the ranks of a node should have."""
    hit = [each for each, seconds in zip(here, lost_s, strict=True) if share(seconds, iteration_s) >= NOTABLE]
    hit_s = sum(seconds for seconds in lost_s if share(seconds, iteration_s) >= NOTABLE) / len(hit)
    cores, threads = num_cores(node, here), num_threads(here)
    words = (
        f"Something else takes cores of node {node.node} ({node.host}): {name_ranks(each.rank for each in hit)} "
        f"{'is' if len(hit) == 1 else 'are'} ready to compute without a core for {per_iteration(hit_s)} "
        f"({percent(share(hit_s, iteration_s))}), though all ranks there keep only {threads} "
        f"thread{'s' if threads > 1 else ''} busy on {cores} allowed core{'s' if cores > 1 else ''}. "
        f"{_who(hit, share(hit_s, iteration_s))}"
    )
    return Finding(reason="host_contention", rank=_single(hit), lost_share=lost, words=words)


def _who(hit: Sequence[RankFigures], lost: float) -> str:
    """Say what else was busy on the cores of ranks that lost a share of their time to it."""
    busy = others_busy_percent(hit)
    if busy is None:
        return "What else ran there was not measured; end it, or give the job cores of its own."
    if busy < SEEN * 100 * lost:
        return (
            f"Other processes here keep only {busy:.0f} % of a core busy: a quota of the cgroup, or other guests of "
            "the same machine, may hold the cores back."
        )
    return (
        f"Other processes keep {busy:.0f} % of a core busy on the cores of {name_ranks(each.rank for each in hit)}; "
        "end them, or give the job cores of its own."
    )


def _slow_collective(
    ranks: Sequence[RankFigures], split: TimeSplit, iteration_s: float, exchanges: Sequence[Exchange]
) -> list[Finding]:
    lost = share(split.communication_s, iteration_s)
    if lost < NOTABLE:
        return []
    several_nodes = len({each.node for each in ranks}) > 1
    cost = f"{per_iteration(split.communication_s)} ({percent(lost)})"
    words = f"Exchanges between ranks take {cost} after the last rank has come"
    top = max(exchanges, key=lambda each: each.num * each.communication_s, default=None)
    if top is None or top.num * top.communication_s <= 0:
        words += f". {_mend(several_nodes, is_small=True)}"
    else:
        is_small = top.num_bytes <= SMALL_MESSAGE_BYTES
        each_s = duration(top.communication_s)
        words += (
            f": {duration(top.num * top.communication_s)} for {top.tag!r}, {top.num:.3g} times per iteration, {each_s} "
            f"each for {quantity(top.num_bytes, 'B')}, at {quantity(top.num_bytes / top.communication_s, 'B/s')}"
            f"{', where latency counts, not bandwidth' if is_small else ''}. {_mend(several_nodes, is_small)}"
        )
    crowd = share(split.contention_s, iteration_s)
    if crowd >= NOTABLE:
        words += " Ranks that lack a core exchange slowly too: see to the cores first."
    return [Finding(reason="slow_collective", rank=None, lost_share=lost, words=words)]


def _mend(several_nodes: bool, is_small: bool) -> str:
    network = (
        "Check that the nodes exchange over their fast network (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME)"
        if several_nodes
        else "Check what the ranks of this node exchange over (NVLink, PCIe or main memory)"
    )
    work = (
        "have fewer exchanges (a smaller agent.num_mini_batches or agent.num_learning_epochs)"
        if is_small
        else "send less (smaller networks, a smaller agent.num_mini_batches)"
    )
    return f"{network}, {work}, or more work between them (more envs per rank)."


def _nothing(ranks: Sequence[RankFigures], split: TimeSplit, iteration_s: float) -> Finding:
    """Return the one finding of a job in which nothing by itself costs a notable share."""
    parts = {
        "waiting for later ranks": split.straggler_wait_s,
        "in exchanges": split.communication_s,
        "without a core": split.contention_s,
    }
    lost = share(sum(parts.values()), iteration_s)
    listed = ", ".join(f"{percent(share(seconds, iteration_s))} {name}" for name, seconds in parts.items())
    unmeasured = all(each.contention_s is None for each in ranks)
    note = " Whether other processes took the cores was not measured." if unmeasured else ""
    if lost >= NOTABLE:
        words = f"No single reason costs much: of an iteration, {listed}.{note}"
        return Finding(reason="unknown", rank=None, lost_share=lost, words=words)
    who = "The rank computes" if len(ranks) == 1 else "The ranks compute"
    words = f"Nothing is lost: {who.lower()} in {percent(1 - lost)} of the time ({listed}).{note}"
    return Finding(reason="nothing_lost", rank=None, lost_share=lost, words=words)


def _single(ranks: Sequence[RankFigures]) -> int | None:
    return ranks[0].rank if len(ranks) == 1 else None
