"""Means over finished episodes, for a log line."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp


def episode_metrics(sums: jax.Array, reward_terms: Sequence[str]) -> dict[str, jax.Array]:
    """Return mean return, mean length, number and mean reward terms of episodes.

    Args:
        sums: ``(num_terms + 2,)`` float64 over the episodes of all ranks: each reward term, the length in env steps, 1.
        reward_terms: their names.

    Returns:
        Scalars by name: means are NaN without an episode, ``num_episodes`` is int64.
    """
    count = sums[-1]
    means = sums[:-1] / jnp.where(count > 0, count, jnp.nan)
    terms, length = means[:-1], means[-1]
    return {
        "mean_return": terms.sum(),
        "mean_episode_length": length,
        "num_episodes": count.astype(jnp.int64),
        **{f"reward/{name}": terms[index] for index, name in enumerate(reward_terms)},
    }
