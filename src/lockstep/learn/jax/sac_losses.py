"""The losses of soft actor-critic (Haarnoja et al. 2018, arXiv:1812.05905) as pure functions, per sample."""

import math

import jax
import jax.numpy as jnp

from lockstep.learn.jax.distributions import Gaussian

LOG_TWO = math.log(2.0)


def squashed_log_prob(distribution: Gaussian, unsquashed: jax.Array) -> jax.Array:
    """Return ``(...)`` log densities of the actions ``tanh(unsquashed)``, in nats.

    Appendix C, equation 26: the normal's density over the slope of tanh, whose logarithm log(1 - tanh(u)^2) is written
    as 2 (log 2 - u - softplus(-2 u)), since 1 - tanh(u)^2 is 0 in float32 from u = 9 on.

    Args:
        distribution: of what is squashed, ``(..., size)``.
        unsquashed: ``(..., size)`` a sample of it.
    """
    log_slope = 2.0 * (LOG_TWO - unsquashed - jax.nn.softplus(-2.0 * unsquashed))
    return distribution.log_prob(unsquashed) - log_slope.sum(-1)


def critic_target(
    reward: jax.Array,
    terminated: jax.Array,
    next_values: jax.Array,
    next_log_prob: jax.Array,
    temperature: jax.Array,
    gamma: float,
) -> jax.Array:
    """Return what the critics should have said, ``(...)`` (equations 3 and 5, with the smaller of the two critics).

    An episode that the time limit cut goes on as far as the target is concerned: only ``terminated`` ends it.

    Args:
        reward: ``(...)`` of the step.
        terminated: ``(...)`` bool, the step ended the episode for good.
        next_values: ``(2, ...)`` of both target critics, of where the step led to and a new action there.
        next_log_prob: ``(...)`` of that action.
        temperature: () weight of the entropy.
        gamma: discount factor.
    """
    soft_value = next_values.min(0) - temperature * next_log_prob
    return reward + gamma * jnp.where(terminated, 0.0, soft_value)


def critic_loss(values: jax.Array, target: jax.Array) -> jax.Array:
    """Return half the squared error of both critics together, ``(...)`` (equation 5).

    Args:
        values: ``(2, ...)`` of the observation and the action that was taken.
        target: ``(...)`` as ``critic_target`` gives it.
    """
    return 0.5 * jnp.square(values - target).sum(0)


def actor_loss(values: jax.Array, log_prob: jax.Array, temperature: jax.Array) -> jax.Array:
    """Return how far the policy is from the one that the critics ask for, ``(...)`` (equation 9).

    Args:
        values: ``(2, ...)`` of both critics, of the observation and a new action.
        log_prob: ``(...)`` of that action.
        temperature: () weight of the entropy.
    """
    return temperature * log_prob - values.min(0)


def temperature_loss(log_temperature: jax.Array, log_prob: jax.Array, target_entropy: float) -> jax.Array:
    """Return a loss ``(...)`` that raises the temperature where the entropy is below its target (equation 18).

    Args:
        log_temperature: () the logarithm is what is learned, so that the temperature stays above zero.
        log_prob: ``(...)`` of new actions.
        target_entropy: in nats.
    """
    return -jnp.exp(log_temperature) * (log_prob + target_entropy)
