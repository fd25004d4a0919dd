"""Where the throughput went that a larger job should have had, and why, in words."""

from lockstep.benchmark.amounts import plural
from lockstep.benchmark.reasons.figures import NOTABLE, SEEN, is_crowded, share
from lockstep.benchmark.scaling.result import Interval, Losses
from lockstep.benchmark.schema import Bundle, Finding, TimeSplit
from lockstep.benchmark.units import duration, percent

SAID = 0.005
"""Share of the ideal throughput from which a loss is worth a word."""
PART_WORDS = {
    "compute": "computing",
    "contention": "ready ranks without a core",
    "straggler_wait": "waiting for later ranks",
    "communication": "communication",
}
"""What the parts of ``Losses`` are called."""


def losses_of(split: TimeSplit, smallest: TimeSplit, work: float, total: float) -> Losses:
    """Return what each part of the iteration takes of the ideal throughput.

    The ideal iteration is that of the smallest job, for a rank's share of the work. What an iteration takes longer, as
    a share of it, is what is missing of the ideal rate; the parts of the iteration share it out.

    Args:
        split: of the job.
        smallest: of the smallest job.
        work: of a rank, over that of a rank of the smallest job.
        total: what is missing, by the rates: 1 less the efficiency.
    """
    now, ideal = split.model_dump(), {name: work * seconds for name, seconds in smallest.model_dump().items()}
    iteration_s = sum(now.values())
    parts = {name.removesuffix("_s"): (now[name] - ideal[name]) / iteration_s for name in now}
    return Losses(total=total, rest=total - sum(parts.values()), **parts)


def reasons_at(
    bundle: Bundle,
    smallest: Bundle,
    losses: Losses | None,
    split: TimeSplit | None,
    more_cpu_s: float | None,
    is_strong: bool,
) -> tuple[Finding, ...]:
    """Return why a job is not faster: what its bundle says, and why its ranks compute longer than in the smallest job.

    Args:
        bundle: of the job.
        smallest: of the smallest job.
        losses: beside the smallest job; None if this is that.
        split: of the mean iteration.
        more_cpu_s: CPU time of a rank in a mean iteration, less that of the smallest job for the same work; None where
            it was not measured.
        is_strong: whether the work of a rank is smaller than in the smallest job.
    """
    if losses is None or split is None or losses.compute < NOTABLE:
        return bundle.findings
    slower = _slower(bundle, smallest, losses, sum(split.model_dump().values()), more_cpu_s, is_strong)
    others = [each for each in bundle.findings if each.reason != "nothing_lost"]
    return tuple(sorted([slower, *others], key=lambda each: each.lost_share, reverse=True))


def _fewer_threads(bundle: Bundle, smallest: Bundle) -> str:
    """Return in words that a rank has fewer threads to compute with than in the smallest job; "" if it has not."""
    now, then = (each.ranks[0].threads for each in (bundle, smallest))
    if now is None or then is None or now >= then:
        return ""
    return f"each has {now} of the {then} threads that a rank of that job has, since the ranks share the node's cores"


def _slower(
    bundle: Bundle, smallest: Bundle, losses: Losses, iteration_s: float, more_cpu_s: float | None, is_strong: bool
) -> Finding:
    """Return the finding that ranks compute longer beside one another."""
    more_s = losses.compute * iteration_s
    lost = share(more_s, iteration_s)
    cost = f"{duration(more_s)} longer per iteration ({percent(lost)})"
    if is_strong:
        words = (
            f"Each rank computes {cost} than its part of the smallest job's work should take: what it does "
            "does not shrink with its envs (small batches are less efficient), or the ranks slow one another down; a "
            "sweep without --strong tells the two apart."
        )
        return Finding(reason="unknown", rank=None, lost_share=lost, words=words)
    fewer = _fewer_threads(bundle, smallest)
    has_cores = not fewer and not any(is_crowded(node, bundle.ranks) for node in bundle.hardware)
    is_cpu = bundle.ranks[0].device.startswith("cpu")
    if is_cpu and has_cores and more_cpu_s is not None and more_cpu_s >= SEEN * more_s:
        words = (
            f"The ranks share a memory system: the same work takes each {cost} than in the smallest job, "
            f"with {duration(more_cpu_s)} more CPU time, though every rank has cores of its own. Memory bandwidth, the "
            "last cache, a physical core's two hardware threads or the clock of the package are what they share; use "
            "fewer ranks per socket, or fewer envs per rank."
        )
        return Finding(reason="shared_memory_system", rank=None, lost_share=lost, words=words)
    why = fewer or (
        "its ranks are more than there are cores for"
        if is_cpu and not has_cores
        else "CPU times don't say why"
        if is_cpu
        else "the GPUs share power, PCIe and the cores that start their kernels; compare clocks and gpu_percent"
    )
    words = f"The same work takes each rank {cost} than in the smallest job: {why}."
    return Finding(reason="unknown", rank=None, lost_share=lost, words=words)


def verdict_of(world_size: int, smallest: int, efficiency: Interval, losses: Losses | None) -> str:
    """Return how a job did in words: its efficiency, and where the rest went, the largest part first."""
    ranks = plural(world_size, "rank")
    if world_size == smallest:
        return f"{ranks}: what the others are compared with."
    between = (
        " (one round: no interval)"
        if efficiency.low is None or efficiency.high is None
        else f" ({100 * efficiency.low:.1f} to {100 * efficiency.high:.1f} %)"
    )
    ideal = f"{world_size / smallest:.3g} times the throughput of {smallest}"
    words = f"{ranks} reach {100 * efficiency.mean:.1f} %{between} of {ideal}."
    if losses is None:
        return f"{words} Where the rest went can't be told."
    parts = {name: getattr(losses, part) for part, name in PART_WORDS.items()}
    more = sorted(((value, name) for name, value in parts.items() if value >= SAID), reverse=True)
    less = sorted((value, name) for name, value in parts.items() if value <= -SAID)
    told = [
        f"{way} goes to {', '.join(f'{name} ({percent(abs(value))})' for value, name in found)}"
        for way, found in (("more time", more), ("less", less))
        if found
    ]
    if abs(losses.rest) >= NOTABLE:
        told.append(f"{percent(losses.rest)} is in no part of the mean iteration")
    return f"{words} Of the ideal, {'; '.join(told)}." if told else words
