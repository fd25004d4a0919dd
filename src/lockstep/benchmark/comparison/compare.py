"""Comparing bundles: what was faster, where its time went, and what else was different.

Only figures of all ranks together are compared, and only of benchmarks that did the same work on each rank (or, asked
for, the same work in total): no figure of one rank is ever multiplied by a number of ranks.
"""

import math
from collections.abc import Sequence

from lockstep.benchmark.amounts import per_rank
from lockstep.benchmark.comparison.facts import Difference, differences_of
from lockstep.benchmark.schema import Bundle, Finding, Kind, Record, Spread, TimeSplit
from lockstep.core.errors import UsageError


class Ratio(Record):
    """What a bundle has over what the first has. ``low`` and ``high``: from the tenth of its slow iterations (p10) over
    the first's fast ones (p90), to the reverse; both are 1 of the first itself."""

    value: float
    low: float
    high: float

    @property
    def clear(self) -> bool:
        """Whether the spread leaves no doubt that they differ."""
        return not self.low <= 1 <= self.high


class Phase(Record):
    """A phase of a start: seconds of the median rank, and over the first bundle's; None: not measured."""

    name: str
    cold_s: float | None
    cold_ratio: float | None
    warm_s: float | None
    warm_ratio: float | None


class Entry(Record):
    """One of the bundles that are compared; of startup there are phases only, of all else everything but phases."""

    name: str
    world_size: int
    num_nodes: int
    num_envs_per_rank: int | tuple[int, ...]
    total_envs: int
    steps_per_s: float | None
    ratio: Ratio | None
    iteration_s: Spread | None
    iteration_rate: Spread | None
    split: TimeSplit | None
    shares: dict[str, float] | None
    findings: tuple[Finding, ...]
    phases: tuple[Phase, ...]


class Comparison(Record):
    """Bundles beside each other, the first being what the others are measured by."""

    kind: Kind
    task: str
    strong: bool
    entries: tuple[Entry, ...]
    differences: tuple[Difference, ...]
    flags: tuple[str, ...]


def compare(bundles: Sequence[Bundle], names: Sequence[str], strong: bool = False) -> Comparison:
    """Compare bundles with the first of them.

    Args:
        bundles: at least two.
        names: of each, as the user knows it.
        strong: require the same number of envs in total, however they are dealt, instead of the same on every rank.

    Raises:
        UsageError: they are of different kinds or tasks, or did not do the same work.
    """
    if len(bundles) < 2:
        raise UsageError("a comparison needs two bundles at least; give the files of two or more")
    first = bundles[0]
    for name, bundle in zip(names[1:], bundles[1:], strict=True):
        if bundle.kind != first.kind:
            raise UsageError(
                f"{name} is of kind {bundle.kind}, {names[0]} of kind {first.kind}; compare bundles of one kind"
            )
        if bundle.run.task != first.run.task:
            raise UsageError(
                f"{name} is of task {bundle.run.task}, {names[0]} of {first.run.task}; compare bundles of one task"
            )
    (_require_same_total if strong else _require_same_shares)(bundles, names)
    return Comparison(
        kind=first.kind,
        task=first.run.task,
        strong=strong,
        entries=tuple(_entry(bundle, name, first) for bundle, name in zip(bundles, names, strict=True)),
        differences=differences_of(bundles),
        flags=_flags(bundles, names),
    )


def _require_same_total(bundles: Sequence[Bundle], names: Sequence[str]) -> None:
    first = bundles[0]
    for name, bundle in zip(names[1:], bundles[1:], strict=True):
        if bundle.total_envs != first.total_envs:
            raise UsageError(
                f"{name} has {bundle.total_envs} envs in total, {names[0]} {first.total_envs}: --strong compares "
                f"equal totals; measure again with --total_envs {first.total_envs}"
            )


def _require_same_shares(bundles: Sequence[Bundle], names: Sequence[str]) -> None:
    totals_agree = len({bundle.total_envs for bundle in bundles}) == 1
    way_on = "add --strong to compare equal totals, or " if totals_agree else ""
    for name, bundle in zip(names, bundles, strict=True):
        if not isinstance(bundle.num_envs_per_rank, int):
            raise UsageError(
                f"{name} has different numbers of envs on its ranks ({per_rank(bundle.num_envs_per_rank)}); "
                f"{way_on}measure again with the same --num_envs on every rank"
            )
    first = bundles[0]
    for name, bundle in zip(names[1:], bundles[1:], strict=True):
        if bundle.num_envs_per_rank != first.num_envs_per_rank:
            raise UsageError(
                f"{name} has {bundle.num_envs_per_rank} envs on each rank, {names[0]} {first.num_envs_per_rank}; "
                f"{way_on}measure again with --num_envs {first.num_envs_per_rank}"
            )


def _entry(bundle: Bundle, name: str, first: Bundle) -> Entry:
    runtime = bundle.runtime
    return Entry(
        name=name,
        world_size=bundle.world_size,
        num_nodes=bundle.num_nodes,
        num_envs_per_rank=bundle.num_envs_per_rank,
        total_envs=bundle.total_envs,
        steps_per_s=runtime and runtime.steps_per_s,
        ratio=_ratio(bundle, first),
        iteration_s=runtime and runtime.iteration_s,
        iteration_rate=runtime and runtime.iteration_steps_per_s,
        split=runtime and runtime.split,
        shares=None if runtime is None or runtime.split is None else shares_of(runtime.split),
        findings=bundle.findings,
        phases=_phases(bundle, first),
    )


def _ratio(bundle: Bundle, first: Bundle) -> Ratio | None:
    if bundle.runtime is None or first.runtime is None:
        return None
    if bundle is first:
        return Ratio(value=1.0, low=1.0, high=1.0)
    own, other = bundle.runtime.iteration_steps_per_s, first.runtime.iteration_steps_per_s
    value = _over(bundle.runtime.steps_per_s, first.runtime.steps_per_s)
    low, high = _over(own.p10, other.p90), _over(own.p90, other.p10)
    if value is None or low is None or high is None:
        return None
    return Ratio(value=value, low=low, high=high)


def shares_of(split: TimeSplit) -> dict[str, float]:
    """Return which share of a mean iteration each part of a split is, by the part's name; together they are 1."""
    parts = {name.removesuffix("_s"): value for name, value in split.model_dump().items()}
    total = sum(parts.values())
    return {name: value / total if total else 0.0 for name, value in parts.items()}


def _phases(bundle: Bundle, first: Bundle) -> tuple[Phase, ...]:
    if bundle.startup is None or first.startup is None:
        return ()
    cold = {phase.name: phase.cold_s for phase in first.startup.phases}
    warm = {phase.name: phase.warm_s for phase in first.startup.phases}
    return tuple(
        Phase(
            name=phase.name,
            cold_s=phase.cold_s and phase.cold_s.median,
            cold_ratio=_median_over(phase.cold_s, cold.get(phase.name)),
            warm_s=phase.warm_s and phase.warm_s.median,
            warm_ratio=_median_over(phase.warm_s, warm.get(phase.name)),
        )
        for phase in bundle.startup.phases
    )


def _median_over(own: Spread | None, other: Spread | None) -> float | None:
    return None if own is None or other is None else _over(own.median, other.median)


def _over(own: float, other: float) -> float | None:
    """Return a ratio; None where there is none, as of a file that somebody has changed."""
    ratio = own / other if other else math.inf
    return ratio if math.isfinite(ratio) else None


def _flags(bundles: Sequence[Bundle], names: Sequence[str]) -> tuple[str, ...]:
    """Return in words what makes a comparison less than fair."""
    return tuple(
        f"{name} has different numbers of envs on its ranks ({per_rank(bundle.num_envs_per_rank)}): "
        "the ranks with fewer wait for the others."
        for name, bundle in zip(names, bundles, strict=True)
        if not isinstance(bundle.num_envs_per_rank, int)
    )
