"""The charts of a bundle: where the time goes, rank by rank, how iterations are spread, what was learned."""

from collections.abc import Iterator

import numpy as np

from lockstep.benchmark.amounts import digits, plural, rate_scale, seconds, seconds_scale, share
from lockstep.benchmark.comparison.compare import shares_of
from lockstep.benchmark.comparison.screen import PARTS
from lockstep.benchmark.report.charts import Labels, Line, columns_chart, lines_chart, split_chart, spread_chart
from lockstep.benchmark.report.content import Block, Cell, Chart, Column, Key, Row, Table, Words
from lockstep.benchmark.report.plain import as_sentence
from lockstep.benchmark.schema import Bundle, RankFigures, Runtime

_ROLES = {
    "compute": "compute",
    "contention": "contention",
    "straggler_wait": "straggler",
    "communication": "communication",
}


def split_of_time(runtime: Runtime, prefix: str) -> Iterator[Block]:
    """Yield the parts of a mean iteration as one bar, or why they are not known."""
    if runtime.split is None:
        note = as_sentence(runtime.split_note or "the bundle does not tell")
        yield Words((("", note),), title="Where the time goes", tone="note")
        return
    shares, parts_s = shares_of(runtime.split), runtime.split.model_dump()
    words = ", ".join(f"{name.replace('_', ' ')} {share(value)}" for name, value in shares.items())
    note = "" if runtime.split_note is None else f" {as_sentence(runtime.split_note)}"
    yield Chart(
        "Where the time goes",
        split_chart(
            [(_ROLES[name], value) for name, value in shares.items()],
            f"Parts of a mean iteration: {words}",
            f"{prefix}-split",
        ),
        f"A mean iteration, mean over ranks.{note}",
        tuple(
            Key(
                _ROLES[name],
                name.replace("_", " "),
                (Cell(seconds(parts_s[f"{name}_s"]), parts_s[f"{name}_s"]), Cell(share(value))),
                PARTS[name],
            )
            for name, value in shares.items()
        ),
        wide=True,
    )


def rank_chart(bundle: Bundle, prefix: str) -> Iterator[Chart]:
    """Yield a column for each rank, if there are several and they were measured."""
    ranks = bundle.ranks
    if len(ranks) < 2 or bundle.slowest_rank is None or any(each.compute_s is None for each in ranks):
        return
    parts = {
        "compute": ("own work", _means(ranks, "compute_s"), "contention included"),
        "straggler": ("straggler wait", _means(ranks, "straggler_wait_s"), "for ranks that came later"),
        "communication": ("communication", _means(ranks, "communication_s"), "after the last had come"),
    }
    slowest = bundle.slowest_rank
    work = parts["compute"][1]
    label = (
        f"Time of a mean iteration on each of {len(ranks)} ranks: own work from {seconds(float(work.min()))} to "
        f"{seconds(float(work.max()))}; rank {slowest} is the slowest"
    )
    yield Chart(
        "Rank by rank",
        columns_chart(
            {role: values for role, (_, values, _) in parts.items()},
            Labels("rank", "time of a mean iteration", y_unit="s"),
            label,
            f"{prefix}-ranks",
        ),
        f"A column for each rank; rank {slowest} is the slowest.",
        tuple(Key(role, name, explanation=why) for role, (name, _, why) in parts.items()),
    )


def _means(ranks: tuple[RankFigures, ...], field: str) -> np.ndarray:
    uses = [getattr(each, field) for each in ranks]
    return np.asarray([0.0 if use is None else use.mean for use in uses])


def spread_of_iterations(runtime: Runtime, prefix: str) -> Chart:
    """Return how the measured iterations are spread, drawn and in figures."""
    times, rates = runtime.iteration_s, runtime.iteration_steps_per_s
    second, speed = seconds_scale(times.p90), rate_scale(rates.p90)
    heads = {"std": "std. dev."}
    fields = ("least", "p10", "median", "mean", "p90", "most", "std")
    rows = tuple(
        Row(
            (
                Cell(heads.get(field, field)),
                Cell(digits(getattr(times, field) / second.size), getattr(times, field)),
                Cell(digits(getattr(rates, field) / speed.size), getattr(rates, field)),
            )
        )
        for field in fields
    )
    return Chart(
        f"Spread of {plural(times.num, 'iteration')}",
        spread_chart(
            times,
            Labels("time of an iteration", x_unit="s"),
            f"Median iteration {seconds(times.median)}, p10 {seconds(times.p10)}, p90 {seconds(times.p90)}, "
            f"shortest {seconds(times.least)}, longest {seconds(times.most)}",
            f"{prefix}-spread",
        ),
        "Each counts with its slowest rank. Dot: median. Thick: p10 to p90, eight tenths of them. Thin: all.",
        table=Table(
            "Spread of iterations",
            (Column("of an iteration", is_number=False), Column("time", second.unit), Column("throughput", speed.unit)),
            rows,
        ),
    )


def learning_chart(bundle: Bundle, prefix: str) -> Iterator[Chart]:
    """Yield the mean return over env steps while it was measured, if anything was learned."""
    points = [] if bundle.learning is None else [point for point in bundle.learning.curve if point[1] is not None]
    if not points:
        return
    steps, returns = np.asarray(points, dtype=np.float64).T
    course = f"Mean return from {digits(float(returns[0]))} to {digits(float(returns[-1]))}"
    yield Chart(
        "Mean return",
        lines_chart(
            [Line("training", steps, returns, "series-1")],
            Labels("env steps"),
            f"{course} over env steps",
            f"{prefix}-return",
        ),
        f"{course}, of the episodes that ended in each measured iteration.",
    )
