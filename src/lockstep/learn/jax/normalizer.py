"""Running mean and standard deviation of observations, merged exactly once per iteration."""

import jax
import jax.numpy as jnp

from lockstep.learn.jax.statistics import Moments


def new_normalizer(size: int) -> Moments:
    """Return the normaliser of vectors of that size before the first merge: the identity.

    A normaliser is the moments, in float64, of all that was merged so far. During a rollout and an update it is frozen.
    """
    zeros = jnp.zeros(size, jnp.float64)
    return Moments(jnp.zeros((), jnp.float64), zeros, zeros)


def normalise(samples: jax.Array, normalizer: Moments, epsilon: float = 1e-2) -> jax.Array:
    """Return ``samples (..., size)`` shifted and scaled by mean and standard deviation, in their own dtype.

    Args:
        samples: raw vectors.
        normalizer: of vectors of their size.
        epsilon: added to the standard deviation, so that a constant entry stays finite.
    """
    scale = jnp.where(normalizer.count > 0, 1.0 / (normalizer.std() + epsilon), 1.0)
    return (samples - normalizer.mean.astype(samples.dtype)) * scale.astype(samples.dtype)
