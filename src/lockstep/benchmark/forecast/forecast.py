"""How fast a training would be on more ranks than were measured, where scaling stops, and how sure that is."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from lockstep.benchmark.forecast.model import HeldBack, Model, Prediction, fit_model, hold_back
from lockstep.benchmark.forecast.network import Network
from lockstep.benchmark.forecast.points import Point, Setting, read_points
from lockstep.benchmark.schema import Bundle
from lockstep.core.errors import UsageError

LEAST_POINTS = 3
LEAST_EFFICIENCY = 0.5
LEAST_GAIN = 0.10

CAUSES = ("shared_memory", "turns", "straggler", "lagging", "latency", "bandwidth")
"""What an iteration of many ranks has beside the computing of one: parts of a ``Prediction``, without ``_s``."""


@dataclass(frozen=True)
class Request:
    """What is to be foretold.

    Attributes:
        num_nodes: of the largest job.
        ranks_per_node: None: as many as were measured on a node at most.
        num_envs: of each rank; None: as in the first bundle.
        network: between nodes; None: what was measured.
    """

    num_nodes: int = 1
    ranks_per_node: int | None = None
    num_envs: int | None = None
    network: Network | None = None


@dataclass(frozen=True)
class Row:
    """A job of one size.

    Attributes:
        setting: the job.
        prediction: of an iteration.
        steps_per_s: env steps of all ranks per second.
        efficiency: that over as many times what one rank alone does (weak scaling).
        gain: share by which each doubling of the ranks since the row before has raised ``steps_per_s``; None in the
            first row.
    """

    setting: Setting
    prediction: Prediction
    steps_per_s: float
    efficiency: float
    gain: float | None


@dataclass(frozen=True)
class Forecast:
    """Everything that there is to say.

    Attributes:
        rows: for 1, 2, 4, ... ranks and the largest job.
        stop: the first row in which scaling has stopped; None: it never does.
        cause: of ``CAUSES``, what costs most in that row, or in the last one; None where nothing is lost.
        model: that it comes from.
        held_back: every measured point, foretold from all others.
        request: what was asked for, with nothing left open but the network.
    """

    rows: tuple[Row, ...]
    stop: Row | None
    cause: str | None
    model: Model
    held_back: tuple[HeldBack, ...]
    request: Request

    @property
    def median_error(self) -> float:
        """Of the points held back, without sign."""
        return statistics.median(abs(each.error) for each in self.held_back)

    @property
    def worst(self) -> HeldBack:
        """The point that is foretold worst."""
        return max(self.held_back, key=lambda each: abs(each.error))


def forecast(bundles: Sequence[tuple[str, Bundle]], request: Request) -> Forecast:
    """Return the forecast of the training of the first bundle.

    Args:
        bundles: that the model is fitted to, each with its name in messages.
        request: what is to be foretold.

    Raises:
        UsageError: they can't be taken together, are too few, or don't tell what the forecast needs.
    """
    points = read_points(bundles)
    first = points[0].setting
    measured = max(each.setting.ranks_per_node for each in points)
    request = replace(
        request,
        ranks_per_node=request.ranks_per_node or measured,
        num_envs=request.num_envs or first.num_envs,
    )
    if len(points) < LEAST_POINTS:
        raise UsageError(
            f"a forecast needs bundles of {LEAST_POINTS} different settings at least (numbers of ranks or envs, sizes "
            f"of networks), not {len(points)}; measure more with lockstep benchmark training_multigpu"
        )
    _check_network(points, request)
    model = fit_model(points, request.network)
    rows = _rows(model, first, request)
    stop = next((row for row in rows if has_stopped(row)), None)
    held_back = tuple(hold_back(points, request.network))
    return Forecast(rows, stop, _cause(rows[0], stop or rows[-1]), model, held_back, request)


def _check_network(points: Sequence[Point], request: Request) -> None:
    assert request.ranks_per_node is not None
    needs = "give --bandwidth and --latency"
    if request.network is not None or request.num_nodes * request.ranks_per_node == 1:
        return
    if request.num_nodes > 1 and all(each.setting.num_nodes == 1 for each in points):
        raise UsageError(f"no bundle was measured on several nodes, so the network between them is unknown; {needs}")
    if request.ranks_per_node > 1 and all(each.setting.num_ranks == 1 for each in points):
        raise UsageError(
            f"every bundle is of one rank, so exchanges inside a node can't be fitted; {needs}, or a bundle of 2 ranks"
        )


def setting_of(first: Setting, num_ranks: int, request: Request, points: Sequence[Point]) -> Setting:
    """Return a job of so many ranks; nodes are filled one after the other."""
    assert request.ranks_per_node is not None and request.num_envs is not None
    here = min(num_ranks, request.ranks_per_node)
    allowed = max(each.setting.allowed_cores for each in points)
    same = [each.setting.threads for each in points if each.setting.work == first.work]
    return replace(
        first,
        num_envs=request.num_envs,
        num_ranks=num_ranks,
        num_nodes=-(-num_ranks // request.ranks_per_node),
        ranks_per_node=here,
        # A launch deals the cores to the ranks; but small networks are computed by fewer threads than that.
        threads=1 if first.on_gpu else max(1, min(allowed // here, max(same))),
        allowed_cores=allowed,
    )


def _rows(model: Model, first: Setting, request: Request) -> tuple[Row, ...]:
    assert request.ranks_per_node is not None
    largest = request.num_nodes * request.ranks_per_node
    sizes = [2**power for power in range(largest.bit_length()) if 2**power < largest] + [largest]
    rows: list[Row] = []
    for num_ranks in sizes:
        setting = setting_of(first, num_ranks, request, model.points)
        prediction = model.predict(setting)
        rate = setting.env_steps / prediction.iteration_s
        before = rows[-1] if rows else None
        rows.append(
            Row(
                setting=setting,
                prediction=prediction,
                steps_per_s=rate,
                efficiency=rate / num_ranks / rows[0].steps_per_s if rows else 1.0,
                gain=None if before is None else _gain(rate / before.steps_per_s, num_ranks / before.setting.num_ranks),
            )
        )
    return tuple(rows)


def _gain(faster: float, larger: float) -> float:
    """Return the gain of a doubling, also where a row has less than twice the ranks of the one before."""
    return (faster - 1) / (larger - 1)


def has_stopped(row: Row) -> bool:
    """Return whether more ranks were of little use: half of them lost, or hardly any gain by the last doubling."""
    return row.efficiency < LEAST_EFFICIENCY or (row.gain is not None and row.gain < LEAST_GAIN)


def _cause(first: Row, row: Row) -> str | None:
    """Return what an iteration has more of than one of the smallest job, the most of all."""
    before, after = asdict(first.prediction), asdict(row.prediction)
    cause = max(CAUSES, key=lambda name: after[f"{name}_s"] - before[f"{name}_s"])
    lost_s = after[f"{cause}_s"] - before[f"{cause}_s"]
    return cause if lost_s > 1e-3 * row.prediction.iteration_s else None


def to_json(result: Forecast, words: str, warnings: Sequence[str]) -> dict[str, Any]:
    """Return a forecast as JSON has it; times are seconds, rates env steps per second."""
    model, request = result.model, result.request
    return {
        "num_nodes": request.num_nodes,
        "ranks_per_node": request.ranks_per_node,
        "num_envs": request.num_envs,
        "work": result.rows[0].setting.work.model_dump(),
        "rows": [
            {
                "num_ranks": row.setting.num_ranks,
                "num_nodes": row.setting.num_nodes,
                "steps_per_s": row.steps_per_s,
                "efficiency": row.efficiency,
                "gain": row.gain,
                "iteration_s": row.prediction.iteration_s,
                **asdict(row.prediction),
            }
            for row in result.rows
        ],
        "stops_at": None if result.stop is None else result.stop.setting.num_ranks,
        "cause": result.cause,
        "words": words,
        "held_back": {
            "median_error": result.median_error,
            "worst_error": abs(result.worst.error),
            "points": [
                {
                    "bundles": each.point.names,
                    "num_ranks": each.point.setting.num_ranks,
                    "num_envs": each.point.setting.num_envs,
                    "num_parameters": each.point.setting.work.num_parameters,
                    "measured_s": each.point.iteration_s,
                    "predicted_s": each.predicted_s,
                    "error": each.error,
                }
                for each in result.held_back
            ],
        },
        "model": {
            "terms": [
                {"phase": each.term.phase, "term": each.term.words, "seconds": each.seconds}
                for each in model.compute.prices
            ],
            "left_out": dict(model.compute.left_out),
            "serial_share": model.compute.serial_share,
            "slowdown": model.compute.slowdown,
            "turns": None if model.turns is None else asdict(model.turns),
            "inside": None if model.inside is None else asdict(model.inside),
            "between": None if model.between is None else asdict(model.between),
            "deviation": model.stragglers.deviation,
            "lagging": None if model.stragglers.lagging is None else asdict(model.stragglers.lagging),
        },
        "warnings": list(warnings),
    }
