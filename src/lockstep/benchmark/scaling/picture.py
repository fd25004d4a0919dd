"""The result of a sweep as a picture: throughput beside the ideal, and where the time of an iteration went."""

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.benchmark.scaling.result import CountResult, ScalingResult
from lockstep.core.files import replace_atomic

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_IDEAL_RATE = "ideal_steps_per_s"
# Colours that people with any common colour blindness tell apart (Okabe and Ito 2008).
_MEASURED = "#0072b2"
_IDEAL = "#7f7f7f"
_PARTS = {
    "compute_s": ("computing", "#009e73"),
    "contention_s": ("without a core", "#cc79a7"),
    "straggler_wait_s": ("waiting for later ranks", "#e69f00"),
    "communication_s": ("communication", "#d55e00"),
}


def draw_scaling(result: ScalingResult, path: Path) -> None:
    """Draw a result as a PNG file.

    Raises:
        RunError: the picture could not be written; an older one is untouched.
    """
    import matplotlib  # half a second, only when a picture is wanted

    # Names are no mathematics, whatever the user's own settings make of text; and a glyph that the font lacks is no
    # reason to speak.
    with matplotlib.rc_context({"text.usetex": False, "text.parse_math": False}), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        figure = _figure(result)
        replace_atomic(path, lambda temporary: figure.savefig(temporary, format="png", dpi=150))


def _figure(result: ScalingResult) -> "Figure":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    throughput, split = figure.subplots(1, 2)
    _draw_throughput(throughput, result)
    _draw_split(split, result)
    for axes in (throughput, split):
        axes.grid(axis="y", alpha=0.25)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlabel("ranks")
    envs = (
        f"{result.counts[0].total_envs} envs in all"
        if result.mode == "strong"
        else f"{result.counts[0].num_envs_per_rank} envs per rank"
    )
    figure.suptitle(
        f"{result.mode} scaling: {result.task}, {result.ml_framework}, {result.device}, {envs}",
        x=0.01,
        ha="left",
        fontsize=11,
    )
    return figure


def _draw_throughput(axes: "Axes", result: ScalingResult) -> None:
    from matplotlib.ticker import EngFormatter, FixedLocator, LogLocator, NullLocator

    ranks = [each.world_size for each in result.counts]
    rates, ideal = ([getattr(each, name) for each in result.counts] for name in ("mean_steps_per_s", _IDEAL_RATE))
    has_interval = len(result.order) > 1
    axes.plot(ranks, ideal, "--", color=_IDEAL, linewidth=1.2, label="ideal")
    axes.errorbar(
        ranks,
        rates,
        yerr=[_reach(each) for each in result.counts] if has_interval else None,
        marker="o",
        color=_MEASURED,
        linewidth=1.5,
        capsize=4,
        label=f"measured, {100 * result.confidence:.0f} % interval" if has_interval else "measured",
    )
    for each in result.counts[1:]:
        place = (each.world_size, each.mean_steps_per_s)
        percent = f"{100 * each.efficiency.mean:.0f} %"
        axes.annotate(percent, place, xytext=(7, -4), textcoords="offset points", va="top", fontsize=9)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_ylim(min(*rates, *ideal) / 1.6, max(*rates, *ideal) * 1.6)  # however wide an interval of two rounds is
    axes.xaxis.set_major_locator(FixedLocator(ranks))
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(EngFormatter())
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
    axes.set_ylabel("env steps/s of all ranks")
    axes.margins(x=0.12)
    axes.legend(frameon=False, loc="upper left", fontsize=9)


def _reach(count: CountResult) -> float:
    """Return how far the interval of the efficiency reaches, as env steps per second."""
    low, high = count.efficiency.low, count.efficiency.high
    return 0.0 if low is None or high is None else (high - low) / 2 * count.ideal_steps_per_s


def _draw_split(axes: "Axes", result: ScalingResult) -> None:
    known = [each for each in result.counts if each.split is not None]
    axes.set_ylabel("mean iteration [ms]")
    if not known:
        axes.text(0.5, 0.5, "where the time goes can't be told here", ha="center", transform=axes.transAxes)
        return
    names = [str(each.world_size) for each in known]
    bottoms = [0.0] * len(known)
    for part, (label, color) in _PARTS.items():
        heights = [1e3 * getattr(each.split, part) for each in known]
        axes.bar(names, heights, width=0.6, bottom=bottoms, color=color, label=label)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    axes.set_ylim(top=1.3 * max(bottoms) or 1.0)
    axes.legend(frameon=False, ncols=2, loc="upper left", fontsize=9)
