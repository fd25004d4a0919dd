"""Generalised advantage estimation (Schulman et al. 2016, arXiv:1506.02438, equations 11 to 16)."""

import jax
import jax.numpy as jnp


def generalised_advantages(
    rewards: jax.Array,
    values: jax.Array,
    next_values: jax.Array,
    terminated: jax.Array,
    done: jax.Array,
    gamma: float,
    lam: float,
) -> jax.Array:
    """Return the advantages of a rollout, ``(num_steps, num_envs)`` like every argument.

    Args:
        rewards: of each step.
        values: of the observation each action was chosen at.
        next_values: of the observation each step led to; where the time limit cut an episode, of its final
            observation (not of the next episode's first), so that the limit is bootstrapped.
        terminated: bool, episodes that ended for good: nothing follows them.
        done: bool, episodes that ended for either reason: the estimate does not reach across.
        gamma: discount factor.
        lam: lambda, between one-step differences (0) and Monte-Carlo returns (1).
    """
    deltas = rewards + gamma * jnp.where(terminated, 0.0, next_values) - values
    decay = gamma * lam * (~done).astype(rewards.dtype)

    def one_step_back(following: jax.Array, step: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        delta, step_decay = step
        advantage = delta + step_decay * following
        return advantage, advantage

    _, advantages = jax.lax.scan(one_step_back, jnp.zeros_like(rewards[0]), (deltas, decay), reverse=True)
    return advantages
