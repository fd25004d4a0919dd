"""Moments of observations and advantages over all ranks, what is done with them, and sums over ranks."""

import jax

# The one way by which the algorithms reach distributed/: arithmetic over the axis of ranks.
from lockstep.distributed.jax_collectives import after, axis_index, axis_size, local_parameters, psum
from lockstep.distributed.jax_moments import Moments, merge_over_ranks

__all__ = ["Moments", "after", "axis_index", "axis_size", "local_parameters", "merge_over_ranks", "psum", "standardise"]


def standardise(samples: jax.Array, moments: Moments) -> jax.Array:
    """Return ``samples`` shifted and scaled by moments of size 1 (the standard deviation is the population's)."""
    return (samples - moments.mean.astype(samples.dtype)) / (moments.std() + 1e-8).astype(samples.dtype)
