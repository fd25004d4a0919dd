"""One flat vector for all gradients and whatever must be reduced with them: one collective per minibatch."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from lockstep.learn.jax.statistics import axis_index, axis_size, psum


class MeanGradients(NamedTuple):
    """Means over the samples of all ranks, the same on every rank."""

    flat: jax.Array  # (num_gradients,) one after the other, as ``ravel_pytree`` has them
    gradients: Any  # the same, nested as the parameters are
    norm: jax.Array  # () of all gradients together
    riders: jax.Array  # (num_riders,)
    nonfinite: jax.Array  # (num_ranks,) bool: the ranks that had anything that is not finite


def mean_gradients(gradients: Any, riders: jax.Array, count: jax.Array, is_bad: jax.Array) -> MeanGradients:
    """Reduce sums over this rank's samples to means over all ranks' samples.

    Args:
        gradients: sums of gradients with respect to ``local_parameters``, a nest of arrays of one dtype: those of
            replicated parameters would come summed over ranks already.
        riders: ``(num_riders,)`` other sums that ride along.
        count: () number of samples, or their weight, that the sums are over; without any on any rank means are zero.
        is_bad: () bool, this rank has met something else that is not finite.
    """
    flat, unravel = ravel_pytree(gradients)
    num_gradients, num_ranks = flat.shape[0], axis_size()
    sums = jnp.concatenate((flat, riders.astype(flat.dtype), count.astype(flat.dtype).reshape(1)))
    is_bad = is_bad | ~jnp.isfinite(sums).all()
    flags = jnp.where(jnp.arange(num_ranks, dtype=jnp.int32) == axis_index(), is_bad, False)
    reduced = psum(jnp.concatenate((sums, flags.astype(flat.dtype))))
    total = reduced[sums.shape[0] - 1]
    means = reduced[: sums.shape[0] - 1] / jnp.where(total > 0, total, 1.0)
    mean_flat = means[:num_gradients]
    return MeanGradients(
        flat=mean_flat,
        gradients=unravel(mean_flat),
        norm=jnp.sqrt(jnp.square(mean_flat).sum()),
        riders=means[num_gradients:],
        nonfinite=reduced[sums.shape[0] :] > 0,
    )


def clip_scale(mean: MeanGradients, max_norm: float) -> jax.Array:
    """Return what gradients are multiplied with, (): 1, or less if their norm is larger than ``max_norm``."""
    return jnp.minimum(max_norm / (mean.norm + 1e-6), 1.0)
