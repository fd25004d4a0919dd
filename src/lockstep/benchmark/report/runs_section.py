"""The section of a report that puts runs of one task beside each other."""

from collections.abc import Iterator, Sequence

import numpy as np

from lockstep.benchmark.amounts import NOTHING, count, digits, duration, plural, quantity
from lockstep.benchmark.report.charts import Labels, Line, lines_chart
from lockstep.benchmark.report.content import Block, Cell, Chart, Column, Key, Row, Section, Table
from lockstep.benchmark.report.plain import number_in
from lockstep.benchmark.report.run_charts import time_unit
from lockstep.benchmark.report.run_record import RunRecord
from lockstep.benchmark.report.run_section import env_steps_of, throughput_of, wall_s_of
from lockstep.benchmark.report.svg import series

_MAX_LINES = 8  # of which each has a colour of its own


def runs_sections(runs: Sequence[RunRecord]) -> Iterator[Section]:
    """Yield a comparison for each task of which there are several runs."""
    by_task: dict[str, list[RunRecord]] = {}
    for run in runs:
        by_task.setdefault(run.task, []).append(run)
    for number, (task, members) in enumerate((each for each in by_task.items() if len(each[1]) > 1), 1):
        yield Section(
            f"runs-{number}",
            f"{task}: {plural(len(members), 'run')} beside each other",
            ", ".join(_name(run) for run in members),
            blocks=tuple(_blocks(members, f"runs-{number}")),
        )


def _name(run: RunRecord) -> str:
    return run.path.name or str(run.path)


def _blocks(runs: Sequence[RunRecord], prefix: str) -> Iterator[Block]:
    longest_s = max((wall_s_of(run) or 0.0 for run in runs), default=0.0)
    unit, size = time_unit(longest_s)
    yield from _chart(runs, "env_steps", 1.0, "env steps", "Mean return by env steps", f"{prefix}-steps")
    yield from _chart(runs, "wall_s", size, f"{unit} of training", "Mean return by time", f"{prefix}-time")
    yield _table(runs)


def _chart(
    runs: Sequence[RunRecord], x_name: str, x_size: float, x_label: str, title: str, prefix: str
) -> Iterator[Chart]:
    lines = []
    for number, run in enumerate(runs[:_MAX_LINES]):
        x, y = run.columns.get(x_name), run.columns.get("mean_return")
        if x is not None and y is not None and (known := np.isfinite(x) & np.isfinite(y)).any():
            lines.append(Line(_name(run), x[known] / x_size, y[known], series(number)))
    if not lines:
        return
    more = f" The first {_MAX_LINES} of {len(runs)} runs." if len(runs) > _MAX_LINES else ""
    words = "; ".join(f"{line.name} reaches {digits(float(line.y[-1]))}" for line in lines)
    yield Chart(
        title,
        lines_chart(lines, Labels(x_label), f"{title}: {words}", prefix),
        f"Sum of rewards of an episode, mean of the episodes that ended.{more}",
        tuple(Key(line.role, line.name, (Cell(digits(float(line.y[-1])), float(line.y[-1])),)) for line in lines),
    )


def _table(runs: Sequence[RunRecord]) -> Table:
    columns = (
        Column("run", is_number=False),
        Column("status", is_number=False),
        Column("mean return", "", "of the episodes that ended last, with exploration"),
        Column("evaluation", "", "the last mean return without exploration"),
        Column("throughput", "", "env steps per second, all env steps over all rollouts and updates"),
        Column("iterations"),
        Column("env steps"),
        Column("time"),
        Column("ranks"),
    )
    return Table("Runs, in figures", columns, tuple(_row(run) for run in runs))


def _row(run: RunRecord) -> Row:
    reached, evaluated = run.last("mean_return"), run.last("eval/mean_return")
    speed, steps, wall_s = throughput_of(run), env_steps_of(run), wall_s_of(run)
    iteration, world_size = run.last("iteration"), number_in(run.info, "world_size")
    return Row(
        (
            Cell(_name(run)),
            Cell(str(run.progress.get("status", NOTHING))),
            Cell(NOTHING if reached is None else digits(reached), reached),
            Cell(NOTHING if evaluated is None else digits(evaluated), evaluated),
            Cell(quantity(speed), speed),
            Cell(count(None if iteration is None else int(iteration)), iteration),
            Cell(quantity(steps), steps),
            Cell(duration(wall_s), wall_s),
            Cell(count(None if world_size is None else int(world_size)), world_size),
        )
    )
