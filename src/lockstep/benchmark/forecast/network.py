"""What exchanges between ranks cost: a latency for each step and a time for each byte, fitted or given.

The model is that of Hockney (1994): a message of n bytes takes alpha + beta n. An all-reduce around a ring of P ranks
has 2 (P - 1) steps and sends 2 (P - 1) / P n bytes through every link, the least that is possible (Patarasuk and Yuan
2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations"; Thakur, Rabenseifner and Gropp 2005,
"Optimization of collective communication operations in MPICH"). Up and down two trees that share the work it has
2 log2 P steps and sends 2 n bytes (Sanders, Speck and Traeff 2009, "Two-tree algorithms for full bandwidth broadcast,
reduction and scan"). NCCL takes what is quicker by such a model of its own; gloo goes around the ring.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

from lockstep.benchmark.forecast.points import Point, Setting
from lockstep.benchmark.schema import Exchange
from lockstep.core.config import show
from lockstep.core.errors import UsageError

_PREFIXES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0}
_NUMBER = r"\s*(\d+(?:\.\d*)?|\.\d+)\s*"
_BANDWIDTH = re.compile(_NUMBER + r"([kMGT]?)(bit/s|bps|b/s|B/s)\s*", re.ASCII)
_LATENCY = re.compile(_NUMBER + r"(ns|us|µs|μs|ms|s)\s*")
_LEAST_BANDWIDTH, _MOST_BANDWIDTH = 1e3, 1e14  # bytes per second
_LEAST_LATENCY_S, _MOST_LATENCY_S = 1e-9, 10.0
_FLOAT_BYTES = 4
_MAX_ROUNDS = 10  # of a fit that chooses ways, which may swing between two


@dataclass(frozen=True)
class Network:
    """A way between ranks.

    Attributes:
        latency_s: of one step, whatever its size.
        byte_s: seconds for each byte.
    """

    latency_s: float
    byte_s: float

    def all_reduce_s(self, num_ranks: int, num_bytes: float, has_trees: bool) -> tuple[float, float]:
        """Return what one all-reduce takes, in seconds: for its steps, and for its bytes.

        Args:
            num_ranks: that take part.
            num_bytes: of the message of each.
            has_trees: whether trees are taken where they are quicker.
        """
        steps, passes = self.steps_and_passes(num_ranks, num_bytes, has_trees)
        return steps * self.latency_s, passes * num_bytes * self.byte_s

    def steps_and_passes(self, num_ranks: int, num_bytes: float, has_trees: bool) -> tuple[int, float]:
        """Return the steps of one all-reduce, and how many times its bytes go through a link."""
        ways = [(2 * (num_ranks - 1), 2 * (num_ranks - 1) / num_ranks)]
        if has_trees:
            ways.append((2 * math.ceil(math.log2(num_ranks)), 2.0))
        return min(ways, key=lambda way: way[0] * self.latency_s + way[1] * num_bytes * self.byte_s)

    def after(self, inside: "Network | None") -> "Network":
        """Return the steps of a ring that goes through this network too: each costs software, then the way.

        All ranks of a ring go on together, so that its slowest link sets the pace.
        """
        if inside is None:
            return self
        return Network(inside.latency_s + self.latency_s, max(inside.byte_s, self.byte_s))


@dataclass(frozen=True)
class Message:
    """What is exchanged so many times per iteration."""

    tag: str
    num: float
    num_bytes: float


def read_bandwidth(text: str) -> float:
    """Return seconds per byte.

    Args:
        text: as ``100Gb/s``, ``100 Gbit/s``, ``100Gbps`` (bits) or ``12.5GB/s`` (bytes); prefixes are powers of 1000.

    Raises:
        UsageError: it is nothing like that, or more or less than any network has.
    """
    match = _BANDWIDTH.fullmatch(text)
    if match is None:
        raise UsageError(f"bandwidth must be as 100Gb/s (bits) or 12.5GB/s (bytes), not {show(text)}")
    number, prefix, unit = match.groups()
    bytes_per_s = float(number) * _PREFIXES[prefix] / (1 if unit == "B/s" else 8)
    if not _LEAST_BANDWIDTH <= bytes_per_s <= _MOST_BANDWIDTH:
        raise UsageError(f"bandwidth must be between 1kB/s and 100TB/s, not {show(text)}")
    return 1 / bytes_per_s


def read_latency(text: str) -> float:
    """Return seconds.

    Args:
        text: as ``5us``, ``800ns``, ``0.1 ms`` or ``1s``.

    Raises:
        UsageError: it is nothing like that, or more or less than any network has.
    """
    match = _LATENCY.fullmatch(text)
    if match is None:
        raise UsageError(f"latency must be as 5us, 800ns or 0.1ms, not {show(text)}")
    number, unit = match.groups()
    seconds = float(number) * _SECONDS[unit]
    if not _LEAST_LATENCY_S <= seconds <= _MOST_LATENCY_S:
        raise UsageError(f"latency must be between 1ns and 10s, not {show(text)}")
    return seconds


def messages_of(setting: Setting, points: Sequence[Point]) -> tuple[Message, ...]:
    """Return what a rank exchanges in an iteration of a setting.

    It is what was seen in the point of the most similar networks: messages that hold every parameter grow with their
    number, exchanges of every minibatch with that of minibatches. Without any, it is a gradient for each minibatch.
    """
    seen = [each for each in points if each.exchanges and each.setting.num_ranks > 1]
    updates = setting.work.num_learning_epochs * setting.work.num_mini_batches
    parameters = max(1, setting.work.num_parameters)
    if not seen:
        return (Message("gradients", updates, _FLOAT_BYTES * parameters),)
    most_like = min(seen, key=lambda each: _difference(each.setting, setting))
    work = most_like.setting.work
    seen_updates = work.num_learning_epochs * work.num_mini_batches
    return tuple(
        Message(
            each.tag,
            each.num * updates / seen_updates if seen_updates and each.num >= seen_updates else each.num,
            each.num_bytes * parameters / work.num_parameters
            if work.num_parameters and each.num_bytes >= _FLOAT_BYTES / 2 * work.num_parameters
            else each.num_bytes,
        )
        for each in most_like.exchanges
    )


def _difference(one: Setting, other: Setting) -> tuple[float, bool, int]:
    parameters = abs(math.log(max(1, one.work.num_parameters) / max(1, other.work.num_parameters)))
    return parameters, one.work != other.work, abs(one.num_ranks - other.num_ranks)


def fit_network(points: Sequence[Point]) -> Network | None:
    """Return latency and time per byte of a step, by nonnegative least squares on relative residuals.

    Each kind of exchange counts as much as it takes of its iteration's exchanges. Points of more threads than cores
    tell nothing: their ranks wait for a core, not for a message.

    Args:
        points: of one kind of way, inside a node or between several.

    Returns:
        None if no point tells what exchanges take; a free network if they were too quick to be seen.
    """
    told = [each for each in points if each.setting.num_ranks > 1 and each.setting.load == 1]
    told = [each for each in told if each.communication_s is not None]
    if not told:
        return None
    network = Network(1.0, 0.0)  # of which trees have the fewest steps
    for _ in range(_MAX_ROUNDS):
        before, network = network, _fit_given_ways(told, network)
        if before == network:
            break
    return network


def _fit_given_ways(points: Sequence[Point], ways: Network) -> Network:
    """Return the network of points whose exchanges went the ways that are quickest in another one."""
    rows: list[tuple[float, float]] = []
    weights: list[float] = []
    for point in points:
        seen = [each for each in _exchanges_of(point) if each.num > 0 and each.communication_s > 0]
        whole = sum(each.num * each.communication_s for each in seen)
        for each in seen:
            steps, passes = ways.steps_and_passes(point.setting.num_ranks, each.num_bytes, point.setting.on_gpu)
            rows.append((steps / each.communication_s, passes * each.num_bytes / each.communication_s))
            weights.append(math.sqrt(each.num * each.communication_s / whole))
    if not rows:
        return Network(0.0, 0.0)
    columns = np.array(rows)
    sizes = np.linalg.norm(columns, axis=0)
    sizes[sizes == 0] = 1.0
    scaled, weight = columns / sizes, np.array(weights)
    if float(scaled[:, 0] @ scaled[:, 1]) > 1 - 1e-6:
        scaled = scaled[:, :1]  # messages of one size: all of it counts as latency
    found, _ = nnls(scaled * weight[:, np.newaxis], weight)
    prices = np.append(found, 0.0)[:2] / sizes
    return Network(float(prices[0]), float(prices[1]))


def _exchanges_of(point: Point) -> tuple[Exchange, ...]:
    """Return a point's exchanges; where they can't be seen one by one, a gradient for each minibatch stands for all."""
    if point.exchanges or not point.communication_s:
        return point.exchanges
    (message,) = messages_of(point.setting, ())
    if not message.num:
        return ()
    each_s = point.communication_s / message.num
    return (
        Exchange(
            tag=message.tag, num=message.num, num_bytes=message.num_bytes, communication_s=each_s, straggler_wait_s=0.0
        ),
    )
