"""The charts of a run: learning curves, reward terms, throughput, where the time of an iteration goes."""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from lockstep.benchmark.amounts import digits, rate, seconds
from lockstep.benchmark.report.charts import (
    MAX_POINTS,
    Labels,
    Line,
    areas_chart,
    lines_chart,
    small_lines_chart,
)
from lockstep.benchmark.report.content import Cell, Chart, Key
from lockstep.benchmark.report.run_record import RunRecord
from lockstep.benchmark.report.svg import series

Array = npt.NDArray[np.float64]

_MAX_SMALL = 24
_STEPS = Labels("env steps")

_PHASES = {
    "rollout": ("compute", "rollout", "acting and stepping the envs"),
    "update": ("communication", "update", "learning from what was collected"),
    "wait": ("straggler", "wait", "waiting for other ranks in exchanges"),
    "step": ("series-5", "step", "rollout and update, one compiled program with JAX"),
}


def learning_charts(run: RunRecord, prefix: str) -> Iterator[Chart]:
    """Yield returns, episode lengths, reward terms and other metrics of the task over env steps."""
    for name, title, explanation in (
        ("mean_return", "Mean return", "Sum of rewards of an episode, mean of the episodes that ended."),
        ("mean_episode_length", "Episode length", "Env steps of an episode, mean of the episodes that ended."),
    ):
        lines = [
            *_line(run, name, "training", "series-1"),
            *_line(run, f"eval/{name}", "evaluation", "series-2", with_points=True),
        ]
        if lines:
            svg = lines_chart(lines, _STEPS, _course(title, lines), f"{prefix}-{name}", zero="length" in name)
            keys = tuple(
                Key(line.role, line.name, (Cell(digits(_last(line)), _last(line)),), _MEANINGS[line.name])
                for line in lines
            )
            yield Chart(title, svg, f"{explanation}{_thinned(run)}", keys)
    yield from _small(run, "reward/", "Reward terms", f"{prefix}-reward", _REWARDS)
    yield from _small(run, "metric/", "Metrics of the task", f"{prefix}-metric", "What the task watches besides.")
    yield from _small(run, "loss/", "Losses", f"{prefix}-loss", "Means over the update, each on a scale of its own.")


_MEANINGS = {
    "training": "with exploration; the last value",
    "evaluation": "without exploration, on envs of its own; the last value",
}
_REWARDS = "Mean sum of each term over an episode, each on a scale of its own; together they are the mean return."


def speed_charts(run: RunRecord, prefix: str) -> Iterator[Chart]:
    """Yield throughput over time and the parts of an iteration."""
    rates, times = run.columns.get("steps_per_s"), run.columns.get("wall_s")
    if rates is not None and times is not None and (np.isfinite(rates) & np.isfinite(times)).any():
        unit, size = time_unit(float(np.nanmax(times)))
        line = Line("throughput", times / size, rates, "series-1")
        known = rates[np.isfinite(rates)]
        label = f"Throughput over time: median {rate(float(np.median(known)))} of {known.size} iterations"
        yield Chart(
            "Throughput over time",
            lines_chart([line], Labels(f"{unit} of training", "env steps/s"), label, f"{prefix}-rate", zero=True),
            f"Env steps of all ranks per second of rollout and update, by the slowest rank.{_thinned(run)}",
            (Key("series-1", "median iteration", (Cell(rate(float(np.median(known))), float(np.median(known))),)),),
        )
    yield from _split(run, prefix)


def time_unit(longest_s: float) -> tuple[str, float]:
    """Return a unit for an axis, in words, and how many seconds it has."""
    return ("seconds", 1.0) if longest_s < 180 else ("minutes", 60.0) if longest_s < 10_800 else ("hours", 3600.0)


def _split(run: RunRecord, prefix: str) -> Iterator[Chart]:
    iterations = run.columns.get("iteration")
    means = {phase: run.columns.get(f"time/{phase}_mean") for phase in _PHASES}
    known = {phase: values for phase, values in means.items() if values is not None and np.isfinite(values).any()}
    if iterations is None or not known:
        return
    layers = {_PHASES[phase][0]: values for phase, values in known.items()}
    labels = Labels("iteration", "time of an iteration", y_unit="s")
    mean_s = {phase: float(np.nanmean(values)) for phase, values in known.items()}
    total_s = sum(mean_s.values())
    words = ", ".join(f"{phase} {seconds(value)}" for phase, value in mean_s.items())
    yield Chart(
        "Where the time goes",
        areas_chart(
            iterations, layers, labels, f"Time of each iteration, in parts; on average {words}", f"{prefix}-split"
        ),
        f"Mean over ranks, in parts on top of one another.{_thinned(run)}",
        tuple(
            Key(
                _PHASES[phase][0],
                _PHASES[phase][1],
                (Cell(seconds(value), value), Cell(f"{value / total_s * 100:.0f} %" if total_s else "")),
                _PHASES[phase][2],
            )
            for phase, value in mean_s.items()
        ),
    )


def _line(run: RunRecord, name: str, title: str, role: str, with_points: bool = False) -> Iterator[Line]:
    values, steps = run.columns.get(name), run.columns.get("env_steps")
    if values is not None and steps is not None and (known := np.isfinite(values) & np.isfinite(steps)).any():
        yield Line(title, steps[known], values[known], role, with_points)


def _small(run: RunRecord, start: str, title: str, prefix: str, explanation: str) -> Iterator[Chart]:
    lines = [
        line
        for number, name in enumerate(run.named(start))
        for line in _line(run, f"{start}{name}", name, series(number))
    ]
    if not lines:
        return
    more = f" The first {_MAX_SMALL} of {len(lines)}." if len(lines) > _MAX_SMALL else ""
    lines = lines[:_MAX_SMALL]
    svg = small_lines_chart(lines, _STEPS, _course(title, lines), prefix)
    yield Chart(title, svg, f"{explanation} The number is the last value.{more}{_thinned(run)}")


def _course(title: str, lines: Sequence[Line]) -> str:
    """Return in words how lines go, for those who can't see them."""
    words = [f"{line.name} from {digits(float(line.y[0]))} to {digits(_last(line))}" for line in lines]
    return f"{title} over env steps: {'; '.join(words)}"


def _last(line: Line) -> float:
    return float(line.y[-1])


def _thinned(run: RunRecord) -> str:
    return " Points are means of neighbouring iterations." if run.num_iterations > MAX_POINTS else ""
