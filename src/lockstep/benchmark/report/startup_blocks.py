"""What a page says of how long a start took."""

from collections.abc import Iterator

from lockstep.benchmark.amounts import NOTHING, count, plural, seconds
from lockstep.benchmark.report.charts import Bars, Labels, bars_chart
from lockstep.benchmark.report.content import Block, Cell, Chart, Column, Key, Row, Table
from lockstep.benchmark.report.plain import without_empty
from lockstep.benchmark.schema import Spread, Startup, StartupPhase

_NOT_MEASURED = float("nan")


def startup_blocks(startup: Startup, prefix: str) -> Iterator[Block]:
    """Yield the phases as bars and as a table, and the functions that took longest."""
    parts = [phase for phase in startup.phases if phase.name != "total"] or list(startup.phases)
    has_cold = any(phase.cold_s for phase in parts)
    has_warm = any(phase.warm_s for phase in parts)
    roles = [("straggler", "cold", "with empty kernel caches")] * has_cold
    roles += [("compute", "warm", "with the caches of the cold start")] * has_warm
    if roles:
        bars = [Bars(phase.name, tuple(_medians(phase, has_cold, has_warm))) for phase in parts]
        words = "; ".join(f"{phase.name} cold {_median(phase.cold_s)}, warm {_median(phase.warm_s)}" for phase in parts)
        yield Chart(
            "Phases of a start",
            bars_chart(
                bars, [role for role, _, _ in roles], Labels("", x_unit="s"), f"Medians: {words}", f"{prefix}-phases"
            ),
            f"Median over ranks, all starting together; {plural(startup.repetitions, 'warm start')}.",
            tuple(Key(role, name, explanation=why) for role, name, why in roles),
        )
    yield _phase_table(startup)
    yield from _function_table(startup)


def _medians(phase: StartupPhase, has_cold: bool, has_warm: bool) -> Iterator[float]:
    if has_cold:
        yield phase.cold_s.median if phase.cold_s else _NOT_MEASURED
    if has_warm:
        yield phase.warm_s.median if phase.warm_s else _NOT_MEASURED


def _median(spread: Spread | None) -> str:
    return NOTHING if spread is None else seconds(spread.median)


def _phase_table(startup: Startup) -> Table:
    columns = (
        Column("phase", is_number=False),
        Column("cold", "", "median over ranks, with empty kernel caches; below it the longest"),
        Column(
            "warm", "", "median over ranks and repetitions, with the caches of the cold start; below it the longest"
        ),
        Column("p10", "", "of the warm starts"),
        Column("p90", "", "of the warm starts"),
        Column("slowest rank", "", "of the warm starts, or of the cold one where there is none"),
    )
    rows = tuple(
        Row(
            (
                Cell(phase.name),
                _with_longest(phase.cold_s),
                _with_longest(phase.warm_s),
                *(Cell(seconds(each), each) for each in _tenths(phase.warm_s)),
                Cell(str(phase.slowest_rank), phase.slowest_rank),
            )
        )
        for phase in startup.phases
    )
    return without_empty(Table("Phases, in figures", columns, rows, "Median, below it the longest.", wide=False))


def _tenths(spread: Spread | None) -> tuple[float | None, float | None]:
    return (None, None) if spread is None else (spread.p10, spread.p90)


def _with_longest(spread: Spread | None) -> Cell:
    if spread is None:
        return Cell(NOTHING)
    return Cell(seconds(spread.median), spread.median, seconds(spread.most), spread.most)


def _function_table(startup: Startup) -> Iterator[Table]:
    if not startup.functions:
        return
    columns = (
        Column("function", is_number=False),
        Column("phase", is_number=False),
        Column("calls"),
        Column("own time", "", "without what it called"),
        Column("total time", "", "with what it called"),
    )
    rows = tuple(
        Row(
            (
                Cell(each.function),
                Cell(each.phase),
                Cell(count(each.calls), each.calls),
                Cell(seconds(each.own_s), each.own_s),
                Cell(seconds(each.total_s), each.total_s),
            )
        )
        for each in startup.functions
    )
    yield Table(
        "Functions that take longest",
        columns,
        rows,
        "Of rank 0, by a profiler that slows all of them down: compare shares, not seconds.",
    )
