"""The model of an iteration: what a rank computes, what cores and memory shared with others cost, and exchanges."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import nnls

from lockstep.benchmark.forecast.compute import ComputeModel, fit_compute
from lockstep.benchmark.forecast.network import Message, Network, fit_network, messages_of
from lockstep.benchmark.forecast.points import Point, Setting
from lockstep.benchmark.forecast.stragglers import Stragglers, fit_stragglers

_MANY = 3  # points, to tell two prices apart


@dataclass(frozen=True)
class Prediction:
    """Seconds of an iteration of the slowest rank, by what they go to; ``iteration_s`` is their sum.

    Attributes:
        compute_s: own work of a rank that has its node to itself.
        shared_memory_s: more of it, as the other cores of the node are busy too.
        turns_s: more of it, as there are more threads than cores.
        straggler_s: until the slowest rank has come, which is another one each time.
        lagging_s: until a rank has come that is always slower.
        latency_s: of exchanges, whatever their size.
        bandwidth_s: of exchanges, by their size.
    """

    compute_s: float
    shared_memory_s: float
    turns_s: float
    straggler_s: float
    lagging_s: float
    latency_s: float
    bandwidth_s: float

    @property
    def iteration_s(self) -> float:
        """The whole."""
        own_s = self.compute_s + self.shared_memory_s + self.turns_s
        return own_s + self.straggler_s + self.lagging_s + self.latency_s + self.bandwidth_s


@dataclass(frozen=True)
class Turns:
    """What ranks that share a core lose beyond their share of its time: caches that another one has filled.

    Attributes:
        overhead: share by which a rank computes longer.
        exchange_s: seconds more for each exchange and each other rank, which may be off its core when it is waited for.
    """

    overhead: float
    exchange_s: float


@dataclass(frozen=True)
class Model:
    """Everything that is fitted.

    Attributes:
        compute: of one rank.
        turns: what ranks lose that share a core; None: never measured, counted as nothing.
        inside: steps of an exchange inside a node; None: never measured nor given, counted as free.
        between: steps of an exchange through several nodes; None likewise.
        stragglers: how ranks differ.
        points: that it is fitted to.
    """

    compute: ComputeModel
    turns: Turns | None
    inside: Network | None
    between: Network | None
    stragglers: Stragglers
    points: tuple[Point, ...]

    def messages(self, setting: Setting) -> tuple[Message, ...]:
        """Return what a rank exchanges in an iteration."""
        return messages_of(setting, self.points)

    def num_exchanges(self, setting: Setting) -> float:
        """Return how often its ranks wait for one another in an iteration."""
        return sum(message.num for message in self.messages(setting))

    def network(self, setting: Setting) -> Network | None:
        """Return the way that its exchanges go."""
        return self.inside if setting.num_nodes == 1 else self.between

    def predict(self, setting: Setting) -> Prediction:
        """Return how long an iteration takes."""
        alone_s, shared_memory_s = self.compute.alone_s(setting), self.compute.shared_memory_s(setting)
        own_s = alone_s + shared_memory_s
        turns_s = 0.0
        if setting.load > 1:
            turns = self.turns or Turns(0.0, 0.0)
            num_turns = setting.num_awaited * self.num_exchanges(setting)
            lost_s = own_s * turns.overhead + turns.exchange_s * num_turns
            turns_s = setting.load * (own_s + lost_s) - own_s
        latency_s, bandwidth_s = self._exchanges_s(setting)
        return Prediction(
            compute_s=alone_s,
            shared_memory_s=shared_memory_s,
            turns_s=turns_s,
            straggler_s=self.stragglers.by_chance_s(setting.num_ranks, own_s),
            lagging_s=self.stragglers.by_lagging_s(setting.num_ranks, own_s),
            latency_s=latency_s,
            bandwidth_s=bandwidth_s,
        )

    def _exchanges_s(self, setting: Setting) -> tuple[float, float]:
        network = self.network(setting)
        if network is None or setting.num_ranks == 1:
            return 0.0, 0.0
        latency_s = bandwidth_s = 0.0
        for message in self.messages(setting):
            steps_s, bytes_s = network.all_reduce_s(setting.num_ranks, message.num_bytes, setting.on_gpu)
            latency_s += message.num * steps_s
            bandwidth_s += message.num * bytes_s
        return latency_s, bandwidth_s


def fit_model(points: Sequence[Point], given: Network | None = None) -> Model:
    """Return the model of measured points.

    Args:
        points: at least one.
        given: the network between nodes, by its user. It stands for the way inside a node too if no point tells that.
            None: what the points of several nodes tell.
    """
    inside = fit_network([each for each in points if each.setting.num_nodes == 1])
    if given is None:
        between = fit_network([each for each in points if each.setting.num_nodes > 1])
    else:
        between = given.after(inside)
    if inside is None:
        inside = given
    stragglers = fit_stragglers(points)
    model = Model(fit_compute(points), None, inside, between, stragglers, tuple(points))
    if all(each.setting.load > 1 for each in points):
        return model  # the fit has no work without turns to compare with
    crowded = [each for each in points if each.setting.load > 1]
    return replace(model, turns=_fit_turns(model, crowded)) if crowded else model


def _fit_turns(model: Model, points: Sequence[Point]) -> Turns:
    """Return what turns cost, by nonnegative least squares on relative residuals.

    Args:
        model: that takes turns to cost nothing.
        points: with more threads than cores. From fewer than ``_MANY`` one price is taken: the share.
    """
    rows, missing = [], []
    for point in points:
        setting = point.setting
        ideal = model.predict(setting)
        own_s = ideal.compute_s + ideal.shared_memory_s
        num_turns = setting.num_awaited * model.num_exchanges(setting)
        rows.append((setting.load * own_s, setting.load * num_turns))
        missing.append(point.iteration_s - ideal.iteration_s)
    measured_s = np.array([each.iteration_s for each in points])
    columns = np.array(rows)[:, : 2 if len(points) >= _MANY else 1] / measured_s[:, np.newaxis]
    sizes = np.linalg.norm(columns, axis=0)
    sizes[sizes == 0] = 1.0
    found, _ = nnls(columns / sizes, np.array(missing) / measured_s)
    overhead, exchange_s = np.append(found / sizes, 0.0)[:2]
    return Turns(float(overhead), float(exchange_s))


@dataclass(frozen=True)
class HeldBack:
    """A point that a model was not fitted to.

    Attributes:
        point: what was measured.
        predicted_s: its iteration, by a model of all other points.
    """

    point: Point
    predicted_s: float

    @property
    def error(self) -> float:
        """Share of the measured iteration by which the prediction is too long, or too short if negative."""
        return self.predicted_s / self.point.iteration_s - 1


def hold_back(points: Sequence[Point], given: Network | None = None) -> list[HeldBack]:
    """Return for each point what a model of all the others says (leave-one-out).

    Args:
        points: at least two.
        given: the network, as in ``fit_model``.
    """
    found = []
    for index, point in enumerate(points):
        model = fit_model([*points[:index], *points[index + 1 :]], given)
        found.append(HeldBack(point, model.predict(point.setting).iteration_s))
    return found
