"""The losses of proximal policy optimisation as pure functions, per sample, nothing averaged."""

import jax
import jax.numpy as jnp


def surrogate_loss(log_prob: jax.Array, old_log_prob: jax.Array, advantage: jax.Array, clip_param: float) -> jax.Array:
    """Return the clipped surrogate (Schulman et al. 2017, arXiv:1707.06347, equation 7), negated: lower is better.

    All arrays have the shape of ``advantage``.
    """
    ratio = jnp.exp(log_prob - old_log_prob)
    clipped = jnp.clip(ratio, 1.0 - clip_param, 1.0 + clip_param)
    return -jnp.minimum(ratio * advantage, clipped * advantage)


def value_loss(
    value: jax.Array, old_value: jax.Array, target: jax.Array, clip_param: float, clipped: bool
) -> jax.Array:
    """Return the squared error of the value, or the larger of it and that of a value kept near the old one."""
    loss = jnp.square(value - target)
    if not clipped:
        return loss
    near = old_value + jnp.clip(value - old_value, -clip_param, clip_param)
    return jnp.maximum(loss, jnp.square(near - target))


def adapted_learning_rate(
    learning_rate: jax.Array, kl: jax.Array, desired_kl: float, lowest: float, highest: float
) -> jax.Array:
    """Return the learning rate, a scalar, steered by the KL divergence.

    Above twice the desired divergence it is divided by 1.5, below half of it multiplied by 1.5 (Schulman et al. 2017,
    section 4, as the locomotion field applies it to the learning rate). A divergence that is zero but for rounding, as
    the first of every update is, counts as small: whether it came out above zero must decide nothing. Without a number
    to go by, NaN, the rate stays.
    """
    one = jnp.ones_like(learning_rate)
    factor = jnp.where(kl > 2.0 * desired_kl, 1.0 / 1.5, one)
    factor = jnp.where(kl < 0.5 * desired_kl, 1.5, factor)
    # Within the bounds already: a rate outside them that nothing asks to change stays (the user chose it).
    return jnp.where(factor == one, learning_rate, jnp.clip(learning_rate * factor, lowest, highest))
