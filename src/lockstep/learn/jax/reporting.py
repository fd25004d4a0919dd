"""One iteration's numbers: packed on the devices into one vector, so that they come to the host in one transfer."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy

from lockstep.core.errors import UsageError
from lockstep.core.interrupts import StopReason
from lockstep.distributed.jax_collectives import after, all_gather, differs
from lockstep.learn.jax.algorithm import NONFINITE
from lockstep.learn.jax.algorithm import Metrics as DeviceMetrics
from lockstep.learn.observer import Metrics

SIGNALS = ("interrupted", "preempted", "save_due", "step_s")
"""What a rank says of itself with each call: why to stop, whether its clock asks for a checkpoint, and how many seconds
its last iteration took, 0 if there was none."""


class Agreement(NamedTuple):
    """What all ranks do after an iteration: the same on every rank."""

    stop: StopReason | None
    save_due: bool


def own_signals(stop: StopReason | None, save_due: bool, step_s: float, num_local_ranks: int) -> numpy.ndarray:
    """Return ``(num_local_ranks, len(SIGNALS))`` float64: the same row for each rank of this process."""
    row = [stop == "interrupted", stop == "preempted", save_due, step_s]
    return numpy.tile(numpy.array(row, dtype=numpy.float64), (num_local_ranks, 1))


def agree(table: numpy.ndarray) -> Agreement:
    """Return what ``(num_ranks, len(SIGNALS))`` signals come to.

    A stop that one rank asks for is everyone's. Whether a checkpoint is due rank 0 says, which writes it: clocks of
    different processes, begun at different times, would ask for one each.
    """
    interrupted, preempted = table[:, 0].any(), table[:, 1].any()
    stop: StopReason | None = "interrupted" if interrupted else "preempted" if preempted else None
    return Agreement(stop, bool(table[0, 2]))


def step_times(table: numpy.ndarray, own_s: float) -> Metrics:
    """Return the seconds of a step over ranks: mean, least and most.

    They come with the signals, so they are those of the iteration before; of a process's first iteration there is only
    this process's own.
    """
    times_s = table[:, SIGNALS.index("step_s")]
    known = times_s[times_s > 0] if (times_s > 0).any() else numpy.array([own_s])
    return {
        "time/step_mean": float(known.mean()),
        "time/step_min": float(known.min()),
        "time/step_max": float(known.max()),
    }


class Packed(NamedTuple):
    """What ``Packer.unpack`` gives."""

    metrics: Metrics  # NaN is None
    nonfinite: numpy.ndarray  # (num_ranks, num_checks) bool
    signals: numpy.ndarray  # (num_ranks, len(SIGNALS)) float64


class Packer:
    """Makes one float64 vector of metrics and signals on the devices, and takes it apart on the host.

    Args:
        name: of the method that gives the metrics, in messages.
        checks: words for the columns of the metric ``nonfinite``.
        num_ranks: of the mesh.
    """

    def __init__(self, name: str, checks: Sequence[str], num_ranks: int) -> None:
        self._name, self._checks, self._num_ranks = name, checks, num_ranks
        self._integers: dict[str, bool] = {}  # known once ``pack`` was traced; in the order of the vector

    @property
    def names(self) -> tuple[str, ...]:
        """The metrics, known once ``pack`` was traced."""
        return tuple(self._integers)

    def pack(self, metrics: DeviceMetrics, signals: jax.Array | None = None) -> jax.Array:
        """Return one replicated vector; called inside ``shard_map``.

        Args:
            metrics: replicated scalars, and perhaps ``nonfinite``.
            signals: ``(1, len(SIGNALS))``, this rank's.

        Raises:
            UsageError: a metric is no number or no scalar, or not the same on all ranks, or these are no metrics.
        """
        if not isinstance(metrics, Mapping):
            raise UsageError(f"{self._name}() gives a {type(metrics).__name__}; it must give a dict of metrics")
        scalars = dict(metrics)
        nonfinite = scalars.pop(NONFINITE, None)
        parts = []
        for name, value in scalars.items():
            self._require_number(name, value)
            if jnp.shape(value):
                raise UsageError(
                    f"{self._name}() gives the metric {name} of shape {jnp.shape(value)}; reduce it to a scalar"
                )
            self._require_replicated(name, value)
            parts.append(jnp.asarray(value).astype(jnp.float64).reshape(1))
        self._integers = {name: jnp.issubdtype(jnp.result_type(value), jnp.integer) for name, value in scalars.items()}
        shape = (self._num_ranks, len(self._checks))
        if nonfinite is None:
            nonfinite = jnp.zeros(shape, dtype=bool)
        if jnp.shape(nonfinite) != shape:
            raise UsageError(
                f"{self._name}() gives the metric {NONFINITE} of shape {jnp.shape(nonfinite)}; it must be {shape}: "
                "(num_ranks, len(CHECKS))"
            )
        self._require_replicated(NONFINITE, nonfinite)
        parts.append(nonfinite.astype(jnp.float64).reshape(-1))
        if signals is not None:
            parts.append(all_gather(after(signals, parts), tiled=True).reshape(-1))
        return jnp.concatenate(parts)

    def unpack(self, numbers: numpy.ndarray) -> Packed:
        """Take apart what ``pack`` made."""
        scalars, rest = numpy.split(numbers, [len(self._integers)])
        nonfinite, signals = numpy.split(rest, [self._num_ranks * len(self._checks)])
        metrics: Metrics = {
            name: None if numpy.isnan(value) else int(value) if is_integer else float(value)
            for (name, is_integer), value in zip(self._integers.items(), scalars, strict=True)
        }
        shape = (self._num_ranks, -1) if signals.size else (0, len(SIGNALS))
        return Packed(metrics, nonfinite.reshape(self._num_ranks, -1) > 0, signals.reshape(shape))

    def _require_number(self, name: object, value: Any) -> None:
        if not isinstance(name, str):
            raise UsageError(f"{self._name}() gives a metric by the name {name!r}; name it by a string")
        if not isinstance(value, (jax.Array, numpy.ndarray, numpy.generic, bool, int, float)):
            raise UsageError(
                f"{self._name}() gives the metric {name} as a {type(value).__name__}; it must be a number, NaN for no "
                "value"
            )

    def _require_replicated(self, name: str, value: Any) -> None:
        if differs(value):
            raise UsageError(
                f"{self._name}() gives the metric {name} as each rank has it, not reduced over ranks; use psum, pmean, "
                "pmax or pmin of lockstep.distributed.jax"
            )
