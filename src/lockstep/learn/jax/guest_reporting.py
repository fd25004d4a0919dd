"""One iteration of another library's learner in numbers: reduced over ranks, named as ``metrics.jsonl`` has them."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy

from lockstep.core.interrupts import StopReason
from lockstep.distributed.jax_placement import name_of
from lockstep.envs.jax_env import JaxEnv
from lockstep.learn.observer import Metrics

PHASES = ("rollout", "update", "wait")
_KNOWN = ("kl", "learning_rate", "gradient_norm")
"""Numbers of an update that the display knows; all others are losses to it."""


class OwnIteration(NamedTuple):
    """What one rank has to say of an iteration."""

    num_steps: int  # env steps over all its envs
    times_s: tuple[float, float, float]  # in each of PHASES
    stop: StopReason | None  # why it should stop
    save_due: bool  # whether its clock asks for a checkpoint
    is_bad: bool  # whether it met a number that is not finite


class Shared(NamedTuple):
    """An iteration over all ranks: the same on every rank."""

    metrics: Metrics
    stop: StopReason | None
    save_due: bool
    is_bad: bool


def own_row(sums: numpy.ndarray, own: OwnIteration, losses: Mapping[str, float]) -> numpy.ndarray:
    """Return what this rank has to say as a row of float64, which ``share`` takes apart.

    Args:
        sums: ``(num_terms + 3,)`` of its episodes, as ``SteppedEnv.take_sums`` gives them.
        own: this rank's iteration.
        losses: of its update, by name.
    """
    flags = (own.stop == "interrupted", own.stop == "preempted", own.save_due, own.is_bad)
    counts = [own.num_steps, *flags, *own.times_s, *losses.values()]
    return numpy.concatenate((sums, numpy.asarray(counts, numpy.float64)))


def share(env: JaxEnv, table: numpy.ndarray, losses: Sequence[str], num_envs: Sequence[int]) -> Shared:
    """Return what all ranks' rows come to. A stop that one asks for is everyone's; rank 0's clock decides on a save.

    Args:
        env: whose episodes they are.
        table: ``(num_ranks, width)`` of ``own_row``.
        losses: their names.
        num_envs: of each rank, by which its losses count.
    """
    num_counts = 1 + 4 + len(PHASES)
    ends = numpy.cumsum([table.shape[1] - num_counts - len(losses), num_counts])
    sums, counts, values = numpy.split(table, ends, axis=1)
    *episode_sums, num_diverged = sums.sum(0)
    num_steps, interrupted, preempted, _, bad = counts[:, :5].sum(0)
    times_s = counts[:, 5:]
    with jax.enable_x64(True):
        episodes = {name: _number(value) for name, value in env.summarise(jnp.asarray(episode_sums)).items()}
    metrics: Metrics = {
        "num_steps": int(num_steps),
        "steps_per_s": num_steps / max(times_s.sum(1).max(), 1e-9),
        **episodes,
        "num_diverged": int(num_diverged),
    }
    for phase, seconds in zip(PHASES, times_s.T, strict=True):
        metrics[f"time/{phase}_mean"] = float(seconds.mean())
        metrics |= {f"time/{phase}_min": float(seconds.min()), f"time/{phase}_max": float(seconds.max())}
    has_envs = numpy.asarray(num_envs) > 0  # of no samples a loss is 0/0
    with numpy.errstate(invalid="ignore"):  # of infinities of both signs there is no mean
        means = numpy.average(values[has_envs], axis=0, weights=numpy.asarray(num_envs)[has_envs])
    for name, mean in zip(losses, means, strict=True):
        metrics[name if name in _KNOWN or "/" in name else f"loss/{name}"] = _number(mean)
    stop: StopReason | None = "interrupted" if interrupted else "preempted" if preempted else None
    return Shared(metrics, stop, bool(counts[0, 3]), bool(bad))


def first_nonfinite(losses: Mapping[str, float], state: Any) -> str:
    """Return the name of the first loss, or array of a state, that is not finite; "" if all are.

    What has a "/" in its name is no loss but something that the library tells besides, and may be anything.
    """
    for name, value in losses.items():
        if "/" not in name and not math.isfinite(value):
            return f"loss {name}"
    named = [(name_of(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(state)]
    floats = [(name, leaf) for name, leaf in named if jnp.issubdtype(leaf.dtype, jnp.floating)]
    are_finite = numpy.asarray(_are_finite([leaf for _, leaf in floats]))
    return next((name for (name, _), is_finite in zip(floats, are_finite, strict=True) if not is_finite), "")


@jax.jit
def _are_finite(arrays: Sequence[jax.Array]) -> jax.Array:
    return jnp.stack([jnp.isfinite(array).all() for array in arrays])


def _number(value: Any) -> float | int | None:
    number = numpy.asarray(value).item()
    return None if isinstance(number, float) and not math.isfinite(number) else number
