"""The shapes of charts that a report draws: lines, small lines below one another, stacked areas, bars."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
from markupsafe import Markup

from lockstep.benchmark.report.svg import WIDTH_INCHES, color, drawing, inline, series
from lockstep.benchmark.schema import Spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import Formatter

Array = npt.NDArray[np.float64]

MAX_POINTS = 240
"""Of a line; more would not be told apart, and make the page heavy."""

_STEPS = (1, 2, 2.5, 5, 10)  # between ticks
_LARGEST = 1e100  # beyond, matplotlib's own arithmetic overflows


class Line(NamedTuple):
    """A course to draw; points that are not finite are left out."""

    name: str
    x: Array
    y: Array
    role: str
    with_points: bool = False


class Bars(NamedTuple):
    """A name and the lengths of its bars; not a number: none."""

    name: str
    lengths: tuple[float, ...]


class Range(NamedTuple):
    """A name, a value, and where eight tenths of what it stands for lie."""

    name: str
    p10: float
    middle: float
    p90: float


class Labels(NamedTuple):
    """What is written on the axes; units are put behind every number, with k or m before them as it needs."""

    x: str
    y: str = ""
    x_unit: str = ""
    y_unit: str = ""


def thinned(x: Array, y: Array) -> tuple[Array, Array]:
    """Return what can be drawn of a course, as means of neighbours where it has more than ``MAX_POINTS``."""
    keep = np.isfinite(x) & np.isfinite(y) & (np.abs(y) < _LARGEST) & (np.abs(x) < _LARGEST)
    x, y = x[keep], y[keep]
    if x.size <= MAX_POINTS:
        return x, y
    edges = np.linspace(0, x.size, MAX_POINTS + 1).round().astype(int)
    widths = np.diff(edges)
    return np.add.reduceat(x, edges[:-1]) / widths, np.add.reduceat(y, edges[:-1]) / widths


def lines_chart(lines: Sequence[Line], labels: Labels, label: str, prefix: str, zero: bool = False) -> Markup:
    """Return lines over one axis; ``zero``: the vertical axis begins there."""
    with drawing():
        figure, axes = _figure(2.5)
        for line in lines:
            _draw(axes, line)
        if zero:
            axes.set_ylim(bottom=0)
        _label(axes, labels)
        return inline(figure, label, prefix)


def small_lines_chart(lines: Sequence[Line], labels: Labels, label: str, prefix: str) -> Markup:
    """Return lines below one another, each with an axis, its name and its last value: for many unlike quantities."""
    from matplotlib.figure import Figure

    with drawing():
        figure = Figure(figsize=(WIDTH_INCHES, 0.62 * len(lines) + 0.45), layout="constrained")
        for axes, line in zip(figure.subplots(len(lines), 1, sharex=True, squeeze=False)[:, 0], lines, strict=True):
            _draw(axes, line)
            _, drawn = thinned(line.x, line.y)
            axes.set_title(_shortened(line.name), loc="left", fontsize=10, pad=3)
            if drawn.size:
                axes.set_title(f"{drawn[-1]:.4g}", loc="right", fontsize=10, pad=3)
            axes.set_yticks([])
            axes.margins(y=0.15)
            axes.xaxis.grid(False)
        _label(axes, labels)
        return inline(figure, label, prefix)


def areas_chart(x: Array, layers: Mapping[str, Array], labels: Labels, label: str, prefix: str) -> Markup:
    """Return layers on top of one another; ``layers`` maps the role of a colour to values ``(num_points,)``."""
    with drawing():
        figure, axes = _figure(2.5)
        thin = {role: thinned(x, _heights(y)) for role, y in layers.items()}
        steps = next(iter(thin.values()))[0]
        axes.stackplot(steps, [y for _, y in thin.values()], colors=[color(role) for role in thin], linewidth=0)
        axes.set_ylim(bottom=0)
        axes.margins(x=0)
        _label(axes, labels)
        return inline(figure, label, prefix)


def _heights(values: Array) -> Array:
    """Return what a layer adds: nothing where there is no number, or none that can be drawn."""
    return np.where(np.isfinite(values) & (values > 0) & (values < _LARGEST), values, 0.0)


def _drawn(size: float) -> float:
    """Return a length, or 0 for one that can't be drawn."""
    return size if 0 < size < _LARGEST else 0.0


def split_chart(parts: Sequence[tuple[str, float]], label: str, prefix: str) -> Markup:
    """Return one bar in parts, each a role of a colour and a size."""
    from matplotlib.figure import Figure

    parts = [(role, _drawn(size)) for role, size in parts]
    with drawing():
        figure = Figure(figsize=(WIDTH_INCHES, 0.42))
        axes = figure.add_axes((0, 0, 1, 1))
        axes.axis("off")
        left, gap = 0.0, 0.004 * sum(size for _, size in parts)
        for role, size in parts:
            if size > gap:
                axes.barh(0, size - gap, left=left, color=color(role), height=1)
            left += size
        axes.set_xlim(0, left - gap if left > gap else 1)
        axes.set_ylim(-0.5, 0.5)
        return inline(figure, label, prefix, stretch=True)


def columns_chart(
    layers: Mapping[str, Array], labels: Labels, label: str, prefix: str, names: Sequence[str] = ()
) -> Markup:
    """Return columns in parts; ``layers`` maps the role of a colour to values ``(num_columns,)``.

    Without ``names`` the columns are numbered from 0 on.
    """
    from matplotlib.ticker import MaxNLocator

    with drawing():
        figure, axes = _figure(2.4)
        size = next(iter(layers.values())).size
        bottom = np.zeros(size)
        for role, values in layers.items():
            heights = _heights(values)
            if size <= 48:
                axes.bar(np.arange(size), heights, bottom=bottom, color=color(role), width=0.82)
            else:  # one shape, since the edges of many narrow ones would show
                edges = np.arange(size + 1) - 0.5
                axes.stairs(bottom + heights, edges, baseline=bottom, fill=True, color=color(role), linewidth=0)
            bottom = bottom + heights
        axes.set_xlim(-0.6, size - 0.4)
        if names:
            axes.set_xticks(range(size), names)
        else:
            axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, steps=_STEPS))
        axes.xaxis.grid(False)
        _label(axes, labels, whole=True)
        return inline(figure, label, prefix)


def bars_chart(bars: Sequence[Bars], roles: Sequence[str], labels: Labels, label: str, prefix: str) -> Markup:
    """Return groups of bars below one another, one bar of a group for each role of a colour."""
    from matplotlib.figure import Figure

    height = 0.8 / len(roles)
    with drawing():
        figure = Figure(figsize=(WIDTH_INCHES, len(bars) * (0.16 + 0.16 * len(roles)) + 0.5), layout="constrained")
        axes = figure.subplots()
        for number, role in enumerate(roles):
            places = [place - 0.4 + (number + 0.5) * height for place in range(len(bars))]
            widths = [_drawn(bar.lengths[number]) for bar in bars]
            axes.barh(places, widths, height=0.86 * height, color=color(role))
        axes.set_yticks(range(len(bars)), [_shortened(bar.name, 18) for bar in bars])
        axes.tick_params(axis="y", labelcolor=color("ink"))
        axes.set_ylim(len(bars) - 0.5, -0.5)
        axes.set_xlim(left=0)
        axes.yaxis.grid(False)
        _label(axes, labels)
        return inline(figure, label, prefix)


def ranges_chart(ranges: Sequence[Range], labels: Labels, label: str, prefix: str) -> Markup:
    """Return for each name a bar up to its value, and on it a line from p10 to p90."""
    from matplotlib.figure import Figure

    with drawing():
        figure = Figure(figsize=(WIDTH_INCHES, 0.36 * len(ranges) + 0.55), layout="constrained")
        axes = figure.subplots()
        for place, each in enumerate(ranges):
            role, (p10, middle, p90) = series(place), map(_drawn, each[1:])
            axes.barh(place, middle, height=0.5, color=color(role), alpha=0.35)
            axes.plot([p10, p90], [place, place], color=color(role), linewidth=4)
            axes.plot([middle], [place], "o", color=color("ink"), markersize=5)
        axes.set_yticks(range(len(ranges)), [_shortened(each.name, 18) for each in ranges])
        axes.tick_params(axis="y", labelcolor=color("ink"))
        axes.set_ylim(len(ranges) - 0.5, -0.5)
        axes.set_xlim(0, max(_drawn(length) for each in ranges for length in (each.middle, each.p90)) * 1.04 or 1)
        axes.yaxis.grid(False)
        _label(axes, labels)
        return inline(figure, label, prefix)


def spread_chart(spread: Spread, labels: Labels, label: str, prefix: str) -> Markup:
    """Return a thin line from the least to the most, a thick one from p10 to p90, and a dot at the median."""
    from matplotlib.figure import Figure

    with drawing():
        figure = Figure(figsize=(WIDTH_INCHES, 0.8), layout="constrained")
        axes = figure.subplots()
        least, p10, median, p90, most = map(_drawn, (spread.least, spread.p10, spread.median, spread.p90, spread.most))
        axes.plot([least, most], [0, 0], color=color("muted"), linewidth=1.5)
        axes.plot([p10, p90], [0, 0], color=color("series-1"), linewidth=9, solid_capstyle="butt")
        axes.plot([median], [0], "o", color=color("ink"), markersize=6)
        axes.set_yticks([])
        axes.set_ylim(-1, 1)
        axes.margins(x=0.08)
        _label(axes, labels)
        return inline(figure, label, prefix)


def _figure(height: float) -> "tuple[Figure, Axes]":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_INCHES, height), layout="constrained")
    return figure, figure.subplots()


def _draw(axes: "Axes", line: Line) -> None:
    x, y = thinned(line.x, line.y)
    if x.size:
        marker = "o" if line.with_points or x.size == 1 else None  # a line through one point is invisible
        axes.plot(x, y, color=color(line.role), marker=marker, markersize=4)


def _label(axes: "Axes", labels: Labels, whole: bool = False) -> None:
    from matplotlib.ticker import MaxNLocator

    if not whole:
        axes.xaxis.set_major_locator(MaxNLocator(nbins=5, steps=_STEPS))
        axes.xaxis.set_major_formatter(_ticks(labels.x_unit))
    if labels.y:
        axes.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=_STEPS))
        axes.yaxis.set_major_formatter(_ticks(labels.y_unit))
        axes.set_title(labels.y, loc="left", fontsize=10, color=color("muted"))
    axes.set_xlabel(labels.x, fontsize=10)


def _ticks(unit: str) -> "Formatter":
    """Return what writes the numbers at an axis; without a unit none is below one of a thousandth."""
    from matplotlib.ticker import EngFormatter, FuncFormatter

    whole = EngFormatter(unit=unit)
    return whole if unit else FuncFormatter(lambda value, _: whole(value) if abs(value) >= 1000 else f"{value:.4g}")


def _shortened(name: str, length: int = 40) -> str:
    name = "".join(letter if letter.isprintable() else " " for letter in name)
    return name if len(name) <= length else f"{name[: length // 2]}…{name[-(length - length // 2 - 1) :]}"
