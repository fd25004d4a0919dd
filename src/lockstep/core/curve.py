"""``curve.png``: what a run learned, to look at."""

import math
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.core.files import replace_atomic
from lockstep.core.metrics import read

Points = list[tuple[float, float]]

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_TRAINING = "#1f77b4"
_EVALUATION = "#d62728"
_LENGTH = "#7f7f7f"


def draw_curve(metrics_path: Path, png_path: Path, title: str = "") -> None:
    """Draw returns and episode lengths of a ``metrics.jsonl`` over env steps; nothing when it holds none yet.

    Raises:
        RunError: the picture could not be written; an older one is untouched.
    """
    records = list(read(metrics_path)) if metrics_path.exists() else []
    training, evaluation = _points(records, "mean_return"), _points(records, "eval/mean_return")
    if not training and not evaluation:
        return
    import matplotlib  # half a second, only when a picture is wanted

    # A run's name is no mathematics, whatever the user's own settings make of text; and a glyph that the font lacks is
    # no reason to speak.
    with matplotlib.rc_context({"text.usetex": False, "text.parse_math": False}), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        figure = _figure(title, training, evaluation, _points(records, "mean_episode_length"))
        replace_atomic(png_path, lambda temporary: figure.savefig(temporary, format="png", dpi=150))


def _figure(title: str, training: Points, evaluation: Points, episode_lengths: Points) -> "Figure":
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    figure = Figure(figsize=(8, 5), layout="constrained")
    returns, lengths = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    _draw(returns, training, _TRAINING, "training, mean return")
    _draw(returns, evaluation, _EVALUATION, "evaluation, deterministic policy", marker="o", markersize=4)
    _draw(lengths, episode_lengths, _LENGTH, "training")
    returns.set_title(title, loc="left", fontsize=11)
    returns.set_ylabel("return per episode")
    returns.legend(frameon=False, loc="best")
    lengths.set_ylabel("episode length")
    lengths.set_ylim(bottom=0)
    lengths.set_xlabel("env steps")
    lengths.xaxis.set_major_formatter(EngFormatter())
    figure.align_ylabels()
    for axes in (returns, lengths):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _points(records: list[dict[str, Any]], name: str) -> Points:
    """Return ``(env_steps, value)`` of every record that has both."""
    pairs = [(record.get("env_steps"), record.get(name)) for record in records]
    return [(x, y) for x, y in pairs if x is not None and y is not None and math.isfinite(y)]


def _draw(axes: "Axes", points: Points, color: str, label: str, **style: Any) -> None:
    if not points:
        return
    if len(points) == 1:  # a line through one point is invisible
        style["marker"] = "o"
    steps, values = zip(*points, strict=True)
    axes.plot(steps, values, color=color, label=label, linewidth=1.5, **style)
