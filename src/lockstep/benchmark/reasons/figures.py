"""What the search for reasons compares: shares of an iteration, means over ranks, and from where a loss is one."""

from collections.abc import Sequence

from lockstep.benchmark.schema import NodeHardware, RankFigures, Use
from lockstep.benchmark.units import duration
from lockstep.distributed.wording import name_ranks

NOTABLE = 0.05
"""Share of an iteration below which a loss is not worth a finding: repeated measurements differ by as much."""
SEEN = 0.5
"""Share of what was lost that a cause must account for to be named as it."""


def share(seconds: float, iteration_s: float) -> float:
    """Return what part of an iteration so many seconds are, between 0 and 1."""
    return min(1.0, max(0.0, seconds / iteration_s)) if iteration_s > 0 else 0.0


def mean_of(use: Use | None, otherwise: float = 0.0) -> float:
    """Return the mean of what was measured, or the other value where it was not."""
    return otherwise if use is None else use.mean


def mean_over(ranks: Sequence[RankFigures], name: str) -> float | None:
    """Return the mean over ranks of the mean of a ``Use``; None where it was not measured on every one."""
    uses = [getattr(each, name) for each in ranks]
    return sum(use.mean for use in uses) / len(uses) if uses and None not in uses else None


def per_iteration(seconds: float) -> str:
    """Return ``12 ms of each iteration``."""
    return f"{duration(seconds)} of each iteration"


def introduced(ranks: Sequence[RankFigures]) -> str:
    """Return ``Rank 3 (node-1, cuda:0)``, or the numbers of several ranks and the host where it is the same."""
    first = ranks[0]
    hosts = {each.host for each in ranks}
    place = f"{first.host}, {first.device}" if len(ranks) == 1 else first.host if len(hosts) == 1 else ""
    name = name_ranks(each.rank for each in ranks)
    return f"{name[:1].upper()}{name[1:]}{f' ({place})' if place else ''}"


def num_threads(ranks: Sequence[RankFigures]) -> int:
    """Return how many threads ranks keep busy together: of each process its own number, but one per rank at least."""
    by_process: dict[int, list[int]] = {}
    for each in ranks:
        by_process.setdefault(each.process, []).append(each.threads or 1)
    return sum(max(*threads, len(threads)) for threads in by_process.values())


def is_crowded(node: NodeHardware, ranks: Sequence[RankFigures]) -> bool:
    """Return whether the ranks of a node keep more threads busy than there are cores that they may run on."""
    here = [each for each in ranks if each.node == node.node]
    return num_threads(here) > num_cores(node, here)


def num_cores(node: NodeHardware, here: Sequence[RankFigures]) -> int:
    """Return how many cores the ranks of a node have between them: all may be bound to the same few."""
    bound: set[int] = set()
    for each in here:
        if each.cores is None:
            return node.num_allowed_cores
        bound |= set(each.cores)
    return min(node.num_allowed_cores, len(bound)) if bound else node.num_allowed_cores


def others_busy_percent(ranks: Sequence[RankFigures]) -> float | None:
    """Return how busy other processes keep the cores of ranks, in percent of one core; None: not measured.

    Ranks that may run on the same cores see the same others.
    """
    by_cores: dict[tuple[int, tuple[int, ...] | None], list[float]] = {}
    for each in ranks:
        if each.others_cpu_percent is not None:
            by_cores.setdefault((each.node, each.cores), []).append(each.others_cpu_percent.mean)
    return sum(sum(values) / len(values) for values in by_cores.values()) if by_cores else None
