"""Means over finished episodes, for a log line."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp


def episode_metrics(
    sums: jax.Array, reward_terms: Sequence[str], metric_terms: Sequence[str] = ()
) -> dict[str, jax.Array]:
    """Return mean return, mean length, number, mean reward terms of episodes, and metrics as means over env steps.

    Args:
        sums: ``(num_terms + 2,)`` float64 over the episodes of all ranks: each term, the length in env steps, 1.
        reward_terms: names of the first terms.
        metric_terms: names of the others.

    Returns:
        Scalars by name: means are NaN without an episode, ``num_episodes`` is int64.
    """
    count = sums[-1]
    means = sums[:-1] / jnp.where(count > 0, count, jnp.nan)
    length, num_rewards = means[-1], len(reward_terms)
    terms, metrics = means[:num_rewards], means[num_rewards:-1]
    return {
        "mean_return": terms.sum(),
        "mean_episode_length": length,
        "num_episodes": count.astype(jnp.int64),
        **{f"reward/{name}": terms[index] for index, name in enumerate(reward_terms)},
        **{f"metric/{name}": metrics[index] / length for index, name in enumerate(metric_terms)},
    }
