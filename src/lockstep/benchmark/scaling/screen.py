"""The result of a sweep in a terminal."""

from collections.abc import Iterator

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lockstep.benchmark.amounts import NOTHING, per_rank, plural, quantity, seconds
from lockstep.benchmark.scaling.result import CountResult, ScalingResult
from lockstep.benchmark.schema import TimeSplit

PARTS = {
    "compute_s": "compute",
    "contention_s": "no core",
    "straggler_wait_s": "waiting",
    "communication_s": "communication",
}
"""Headings of the parts of an iteration."""


def render(result: ScalingResult, is_terminal: bool) -> RenderableType:
    """Return what a terminal, or a file, is to show of a result; print it on a console without markup."""
    return Group(*_parts(result, is_terminal))


def _parts(result: ScalingResult, is_terminal: bool) -> Iterator[RenderableType]:
    envs = (
        f"{result.counts[0].total_envs:,} envs in all"
        if result.mode == "strong"
        else (f"{per_rank(result.counts[0].num_envs_per_rank)} envs per rank")
    )
    yield Text(
        f"{result.mode} scaling of {result.task}: {result.ml_framework}, {result.rl_library} {result.algorithm}, "
        f"{envs}, on {result.device}, {plural(len(result.order), 'round')}"
    )
    yield _table(result, is_terminal)
    for count in result.counts:
        yield Text(count.verdict)
        for finding in count.findings:
            if finding.reason != "nothing_lost":
                yield Text(f"  {finding.words}")


def _table(result: ScalingResult, is_terminal: bool) -> Table:
    table = Table(box=box.SIMPLE_HEAD if is_terminal else None, pad_edge=False)
    interval = f"efficiency ({100 * result.confidence:.0f} %)" if len(result.order) > 1 else "efficiency"
    for heading in ("ranks", "envs/rank", "env steps/s", "ideal", interval, "iteration", *PARTS.values()):
        table.add_column(heading, justify="right", no_wrap=True)
    for count in result.counts:
        table.add_row(
            str(count.world_size),
            per_rank(count.num_envs_per_rank, at_most=2),
            quantity(count.mean_steps_per_s),
            quantity(count.ideal_steps_per_s),
            _efficiency(count),
            *_times(count.split),
        )
    return table


def _efficiency(count: CountResult) -> str:
    found = count.efficiency
    mean = f"{100 * found.mean:.1f} %"
    if found.low is None or found.high is None or found.low == found.high:
        return mean
    return f"{mean} ({100 * found.low:.1f} to {100 * found.high:.1f})"


def _times(split: TimeSplit | None) -> list[str]:
    if split is None:
        return [NOTHING] * (1 + len(PARTS))
    iteration_s = sum(split.model_dump().values())
    return [
        seconds(iteration_s),
        *(f"{100 * getattr(split, name) / iteration_s:.1f} %" if iteration_s > 0 else NOTHING for name in PARTS),
    ]
