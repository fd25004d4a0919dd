"""The table of all ranks of a bundle: every figure that any of them has."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from lockstep.benchmark.amounts import NOTHING, Scale, bytes_scale, count, digits, seconds, seconds_scale, within
from lockstep.benchmark.report.content import Cell, Column, Row, Table
from lockstep.benchmark.report.plain import core_list
from lockstep.benchmark.schema import Bundle, RankFigures, Use

_Measure = Literal["seconds", "bytes", "percent"]


@dataclass(frozen=True)
class _Figure:
    """A field of ``RankFigures`` that is a ``Use``."""

    field: str
    name: str
    measure: _Measure
    explanation: str


_FIGURES = (
    _Figure("rollout_s", "rollout", "seconds", "acting and stepping the envs, without waiting"),
    _Figure("update_s", "update", "seconds", "learning, without waiting"),
    _Figure("compute_s", "own work", "seconds", "all work of its own, contention included"),
    _Figure("straggler_wait_s", "straggler wait", "seconds", "waiting in exchanges for ranks that came later"),
    _Figure("communication_s", "communication", "seconds", "in exchanges after the last rank had come"),
    _Figure("contention_s", "contention", "seconds", "ready to compute on a core, which something else had"),
    _Figure("cpu_s", "CPU time", "seconds", "of all its threads together"),
    _Figure("cpu_percent", "CPU", "percent", "of one core: 200 % is two cores"),
    _Figure("others_cpu_percent", "CPU of others", "percent", "what else kept the cores busy that it may run on"),
    _Figure("memory_bytes", "memory", "bytes", "resident in main memory"),
    _Figure("gpu_percent", "GPU", "percent", "share of the time in which a kernel ran"),
    _Figure("gpu_memory_bytes", "GPU memory", "bytes", "of this process where NVML tells, else of the whole GPU"),
)

_EXPLANATION = {
    "startup": "Times are of a mean start, below them those of the longest.",
    "runtime": "Times are of a mean iteration, below them the longest; else mean, and below it the peak.",
}


def rank_table(bundle: Bundle) -> Table:
    """Return a row for each rank, the slowest marked; what no rank has is left out."""
    ranks = bundle.ranks
    columns, cells_by_column = zip(*_columns(ranks), strict=True)
    marks = ["slowest" if rank.rank == bundle.slowest_rank and len(ranks) > 1 else "" for rank in ranks]
    rows = tuple(Row(tuple(cells), mark) for cells, mark in zip(zip(*cells_by_column, strict=True), marks, strict=True))
    explanation = _EXPLANATION["startup" if bundle.kind == "startup" else "runtime"]
    if any(marks):
        explanation += f" Rank {bundle.slowest_rank}, the slowest, is marked."
    spread = bundle.compute_spread
    if spread is not None and spread.num > 1:
        scale = seconds_scale(spread.p90)
        explanation += f" Own work over ranks: median {seconds(spread.median)}, p10 to p90 {within(spread, scale)}."
    return Table("All ranks, all figures", tuple(columns), rows, explanation)


def _columns(ranks: Sequence[RankFigures]) -> Iterator[tuple[Column, list[Cell]]]:
    """Yield each column that any rank has something in, and its cells."""
    # `each.rank` and what says where it is come first: who scrolls to the right still sees the rank.
    yield Column("rank"), [Cell(str(each.rank), each.rank) for each in ranks]
    yield Column("host", is_number=False), [Cell(each.host) for each in ranks]
    yield Column("device", is_number=False), [Cell(each.device) for each in ranks]
    yield Column("envs"), [Cell(count(each.num_envs), each.num_envs) for each in ranks]
    for figure in _FIGURES:
        uses: list[Use | None] = [getattr(each, figure.field) for each in ranks]
        known = [use for use in uses if use is not None]
        if known:
            scale = _scale(figure.measure, known)
            yield Column(figure.name, scale.unit, figure.explanation), [_use_cell(use, scale) for use in uses]
    longest = seconds_scale(max(each.wall_s for each in ranks))
    yield (
        Column("wall time", longest.unit, "in all that was measured"),
        [Cell(digits(each.wall_s / longest.size), each.wall_s) for each in ranks],
    )
    yield (
        Column("env steps", "", "of its envs, in all that was measured"),
        [Cell(count(each.env_steps), each.env_steps) for each in ranks],
    )
    yield from _place_columns(ranks)


def _place_columns(ranks: Sequence[RankFigures]) -> Iterator[tuple[Column, list[Cell]]]:
    yield Column("node"), [Cell(str(each.node), each.node) for each in ranks]
    yield Column("local rank", "", "within its node"), [Cell(str(each.local_rank), each.local_rank) for each in ranks]
    yield Column("process"), [Cell(str(each.process), each.process) for each in ranks]
    if any(each.threads is not None for each in ranks):
        yield (
            Column("threads", "", "that it keeps busy by itself"),
            [Cell(count(each.threads), each.threads) for each in ranks],
        )
    if any(each.cores for each in ranks):
        yield Column("cores", "", "it may run on", is_number=False), [Cell(core_list(each.cores)) for each in ranks]
    if any(each.gpu_uuid for each in ranks):
        yield Column("GPU UUID", is_number=False), [Cell(each.gpu_uuid or NOTHING) for each in ranks]
    if any(each.pci_bus_id for each in ranks):
        yield Column("PCI bus id", is_number=False), [Cell(each.pci_bus_id or NOTHING) for each in ranks]


def _scale(measure: _Measure, uses: Sequence[Use]) -> Scale:
    """Return one unit for a whole column, so that its numbers can be compared at a glance."""
    largest = max(use.mean for use in uses) or max(use.peak for use in uses)
    if measure == "percent":
        return Scale("%", 1.0)
    return seconds_scale(largest) if measure == "seconds" else bytes_scale(largest)


def _use_cell(use: Use | None, scale: Scale) -> Cell:
    if use is None:
        return Cell(NOTHING)
    return Cell(digits(use.mean / scale.size), use.mean, digits(use.peak / scale.size), use.peak)
