"""What a forecast takes from bundles of trainings: how large each was, where it ran, and what one of its ranks took."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lockstep.benchmark.schema import Bundle, Exchange, NodeHardware, RankFigures, Work
from lockstep.core.config import show
from lockstep.core.errors import UsageError

LAGGING = 0.10
"""A rank that computes longer than the others by this share, over all measured iterations, lags for good."""


@dataclass(frozen=True)
class Setting:
    """A training, as a forecast sees it.

    Attributes:
        work: of one iteration.
        num_envs: of each rank.
        num_ranks: of the whole job.
        num_nodes: that they are on.
        ranks_per_node: on the fullest node.
        threads: that each rank keeps busy.
        allowed_cores: that the ranks of a node may keep busy together.
        node_cores: that a node has.
        on_gpu: whether each rank computes on a GPU of its own.
    """

    work: Work
    num_envs: int
    num_ranks: int
    num_nodes: int
    ranks_per_node: int
    threads: int
    allowed_cores: int
    node_cores: int
    on_gpu: bool

    @property
    def load(self) -> float:
        """Threads per core, never less than 1: what a rank's time is multiplied by when they take turns."""
        return 1.0 if self.on_gpu else max(1.0, self.ranks_per_node * self.threads / self.allowed_cores)

    @property
    def num_awaited(self) -> int:
        """How many other ranks of the node may be off their core when a rank comes to an exchange."""
        return self.ranks_per_node - 1 if self.load > 1 else 0

    @property
    def busy_share(self) -> float:
        """Share of the other cores that the job may use on a node that other ranks keep busy, 0 to 1."""
        if self.on_gpu or self.allowed_cores == 1:
            return 0.0
        busy = min(self.ranks_per_node * self.threads, self.allowed_cores)
        return max(0.0, (busy - min(self.threads, self.allowed_cores)) / (self.allowed_cores - 1))

    @property
    def env_steps(self) -> int:
        """Of all ranks in one iteration."""
        return self.num_ranks * self.num_envs * self.work.num_steps_per_env


@dataclass(frozen=True)
class Lagging:
    """A rank that computes longer than all others.

    Attributes:
        rank: its number.
        host: where it is.
        share: of the other ranks' computing, by which it takes longer.
    """

    rank: int
    host: str
    share: float


@dataclass(frozen=True)
class Point:
    """What was measured of one setting, by one bundle or several. Times are seconds of one iteration.

    Attributes:
        setting: what was measured.
        names: of the bundles.
        iteration_s: the median iteration; each counts with its slowest rank.
        rollout_s: own work of a rank in it, as if it always had its core; None where the two can't be told apart.
        update_s: likewise.
        own_s: both together.
        straggler_wait_s: mean over ranks; None where it can't be told.
        communication_s: in exchanges after the last rank had come; None where it can't be told.
        varies: standard deviation of an iteration from the next, as a share of the iteration.
        lagging: a rank that is slower than the others; ``own_s`` is then of the others.
        exchanges: one by one; without any where they can't be seen.
        disturbed: share of the cores that ranks may use which other processes kept busy.
    """

    setting: Setting
    names: tuple[str, ...]
    iteration_s: float
    rollout_s: float | None
    update_s: float | None
    own_s: float
    straggler_wait_s: float | None
    communication_s: float | None
    varies: float
    lagging: Lagging | None
    exchanges: tuple[Exchange, ...]
    disturbed: float


def read_points(bundles: Sequence[tuple[str, Bundle]]) -> list[Point]:
    """Return a point for each setting that was measured, in the order of the bundles.

    Args:
        bundles: with the name of each in messages.

    Raises:
        UsageError: one is of no training or has too little in it, or they are of different trainings or machines.
    """
    for name, bundle in bundles:
        _check_alone(name, bundle)
    for name, bundle in bundles[1:]:
        _check_together(*bundles[0], name, bundle)
    by_setting: dict[Setting, list[Point]] = {}
    for name, bundle in bundles:
        point = _point(name, bundle)
        by_setting.setdefault(point.setting, []).append(point)
    return [_merged(same) for same in by_setting.values()]


def _check_alone(name: str, bundle: Bundle) -> None:
    if bundle.kind != "training" or bundle.runtime is None:
        raise UsageError(
            f"bundle {name} is of lockstep benchmark {bundle.kind}; a forecast is made from lockstep benchmark training"
        )
    if isinstance(bundle.num_envs_per_rank, tuple):
        raise UsageError(
            f"bundle {name} has num_envs {show(bundle.num_envs_per_rank)} by rank; a forecast needs as many on each"
        )
    if bundle.work is None:
        raise UsageError(
            f"bundle {name} does not say what an iteration consists of, as its learner ({bundle.run.rl_library}, "
            f"{bundle.run.algorithm}) does not tell; there is no forecast for it"
        )
    uuids = [each.gpu_uuid for each in bundle.ranks if each.gpu_uuid is not None]
    if len(set(uuids)) < len(uuids):
        raise UsageError(f"bundle {name} has two ranks on one GPU; a forecast needs a GPU for each")
    if len({_machine(node) for node in bundle.hardware}) > 1:
        raise UsageError(f"bundle {name} was measured on nodes that differ; a forecast needs equal ones")


def _check_together(first_name: str, first: Bundle, name: str, bundle: Bundle) -> None:
    for field in ("task", "ml_framework", "rl_library", "algorithm", "engine", "dtype"):
        one, other = getattr(first.run, field), getattr(bundle.run, field)
        if one != other:
            raise UsageError(
                f"bundles of different trainings: {field} is {one} in {first_name} and {other} in {name}; "
                "a forecast is made from those of one"
            )
    if _on_gpu(first) != _on_gpu(bundle):
        raise UsageError(f"of {first_name} and {name}, one was measured on GPUs and the other on CPU cores; keep one")
    one_machine, other_machine = _machine(first.hardware[0]), _machine(bundle.hardware[0])
    if one_machine != other_machine:
        raise UsageError(
            f"bundles of different hardware: {' '.join(map(str, one_machine))} in {first_name} and "
            f"{' '.join(map(str, other_machine))} in {name}; a forecast is made from those of one kind of node"
        )


def _machine(node: NodeHardware) -> tuple[object, ...]:
    """Return what makes nodes equal; how many GPUs a job may see of one is its own affair."""
    names = sorted({gpu.name for gpu in node.gpus})
    return (node.cpu or "unknown CPU", f"with {node.num_cores} cores", *names)


def _on_gpu(bundle: Bundle) -> bool:
    return bundle.ranks[0].gpu_uuid is not None or bundle.ranks[0].device.startswith(("cuda", "gpu"))


def _setting(bundle: Bundle) -> Setting:
    assert bundle.work is not None and isinstance(bundle.num_envs_per_rank, int)
    by_node = [sum(each.node == node.node for each in bundle.ranks) for node in bundle.hardware]
    node = bundle.hardware[0]
    # Several devices of one JAX process share its threads.
    here = max(1, len({each.process for each in bundle.ranks if each.node == node.node}))
    threads = bundle.ranks[0].threads or max(1, node.num_allowed_cores // here)
    on_gpu = _on_gpu(bundle)
    return Setting(
        work=bundle.work,
        num_envs=bundle.num_envs_per_rank,
        num_ranks=bundle.world_size,
        num_nodes=bundle.num_nodes,
        ranks_per_node=max(by_node),
        threads=1 if on_gpu else max(1, threads * here // max(by_node)),
        allowed_cores=0 if on_gpu else node.num_allowed_cores,
        node_cores=node.num_cores,
        on_gpu=on_gpu,
    )


def _point(name: str, bundle: Bundle) -> Point:
    assert bundle.runtime is not None
    runtime, setting = bundle.runtime, _setting(bundle)
    iteration, split = runtime.iteration_s, runtime.split
    waits_s = None if split is None else split.straggler_wait_s
    communication_s = None if split is None else split.communication_s
    own = _own_s(bundle)
    known = [seconds for seconds in own if seconds is not None]
    if len(known) == len(own):
        lagging = find_lagging(known, [each.host for each in bundle.ranks])
        typical = [rank for rank in range(len(known)) if lagging is None or rank != lagging.rank]
        own_s = statistics.fmean(known[rank] for rank in typical)
        rollout_s, update_s = _parts(own_s, [bundle.ranks[rank] for rank in typical])
    else:
        lagging, rollout_s, update_s = None, None, None
        own_s = max(0.0, iteration.median - (waits_s or 0.0) - (communication_s or 0.0)) / setting.load
    return Point(
        setting=setting,
        names=(name,),
        iteration_s=iteration.median,
        rollout_s=rollout_s,
        update_s=update_s,
        own_s=own_s,
        straggler_wait_s=waits_s,
        communication_s=communication_s,
        # Of a normal distribution, nine tenths lie 1.28 standard deviations above the middle; outliers don't count.
        varies=(iteration.p90 - iteration.p10) / 2.563 / iteration.median,
        lagging=lagging,
        exchanges=runtime.exchanges,
        disturbed=_disturbed(bundle),
    )


def _disturbed(bundle: Bundle) -> float:
    """Return the largest share of a rank's cores that something else kept busy; 0 where nobody counted."""
    shares = [
        each.others_cpu_percent.mean / 100 / len(each.cores)
        for each in bundle.ranks
        if each.others_cpu_percent is not None and each.cores
    ]
    return max(shares, default=0.0)


def _own_s(bundle: Bundle) -> list[float | None]:
    """Return the own work of each rank, without the time in which its core was taken by others."""
    assert bundle.runtime is not None
    computed = [each.compute_s.mean for each in bundle.ranks if each.compute_s is not None]
    taken = [each.contention_s.mean for each in bundle.ranks if each.contention_s is not None]
    split, iteration = bundle.runtime.split, bundle.runtime.iteration_s
    if len(computed) < len(bundle.ranks):
        return [None] * len(bundle.ranks)
    if len(taken) < len(computed) or split is None:
        return [seconds * min(1.0, iteration.median / iteration.mean) for seconds in computed]
    # A rank also lacks its core while it waits for others, which its own work does not hold.
    in_own_work_s = statistics.fmean(computed) - split.compute_s
    elsewhere_s = max(0.0, statistics.fmean(taken) - in_own_work_s)
    own = [max(0.0, seconds - max(0.0, lost - elsewhere_s)) for seconds, lost in zip(computed, taken, strict=True)]
    return [_at_least_on_cores(each, seconds) for each, seconds in zip(bundle.ranks, own, strict=True)]


def _at_least_on_cores(rank: RankFigures, own_s: float) -> float:
    """Return own work, and no less than what the rank's threads were on cores.

    A thread that was ready without a core counts as a rank without one, also if it is one that nothing waits for, as
    those that move messages while the rank computes.
    """
    if rank.cpu_s is None or rank.compute_s is None or rank.gpu_uuid is not None:
        return own_s
    return min(rank.compute_s.mean, max(own_s, rank.cpu_s.mean / (rank.threads or 1)))


def _parts(own_s: float, ranks: Sequence[RankFigures]) -> tuple[float | None, float | None]:
    rollouts = [each.rollout_s.mean for each in ranks if each.rollout_s is not None]
    updates = [each.update_s.mean for each in ranks if each.update_s is not None]
    both = sum(rollouts) + sum(updates)
    if len(rollouts) < len(ranks) or len(updates) < len(ranks) or both <= 0:
        return None, None
    return own_s * sum(rollouts) / both, own_s * sum(updates) / both


def find_lagging(own_s: Sequence[float], hosts: Sequence[str]) -> Lagging | None:
    """Return the rank that computes longer than all others by ``LAGGING`` or more, None if there is none.

    Args:
        own_s: seconds that each rank computes in a mean iteration.
        hosts: of each rank.
    """
    if len(own_s) < 2:
        return None
    rank = max(range(len(own_s)), key=own_s.__getitem__)
    others = [seconds for other, seconds in enumerate(own_s) if other != rank]
    slowest, typical = max(others), statistics.fmean(others)
    if typical <= 0 or own_s[rank] < (1 + LAGGING) * slowest:
        return None
    return Lagging(rank, hosts[rank], own_s[rank] / typical - 1)


def _merged(points: Sequence[Point]) -> Point:
    """Return one point of several measurements of one setting: the median of each figure."""
    first = points[0]
    if len(points) == 1:
        return first
    lagging = [each.lagging for each in points if each.lagging is not None]
    return replace(
        first,
        names=tuple(name for each in points for name in each.names),
        iteration_s=statistics.median(each.iteration_s for each in points),
        rollout_s=_median([each.rollout_s for each in points]),
        update_s=_median([each.update_s for each in points]),
        own_s=statistics.median(each.own_s for each in points),
        straggler_wait_s=_median([each.straggler_wait_s for each in points]),
        communication_s=_median([each.communication_s for each in points]),
        varies=statistics.median(each.varies for each in points),
        # Once in a few measurements is chance, not a slow rank.
        lagging=lagging[0] if len(lagging) > len(points) / 2 else None,
        exchanges=_merged_exchanges(points),
        disturbed=statistics.median(each.disturbed for each in points),
    )


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if len(known) == len(values) else None


def _merged_exchanges(points: Sequence[Point]) -> tuple[Exchange, ...]:
    by_tag: dict[str, list[Exchange]] = {}
    for point in points:
        for exchange in point.exchanges:
            by_tag.setdefault(exchange.tag, []).append(exchange)
    return tuple(
        same[0].model_copy(update={"communication_s": statistics.median(each.communication_s for each in same)})
        for same in by_tag.values()
    )
