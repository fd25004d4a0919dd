"""Which tensors of an iteration are not finite, so that the first of them can be named."""

import jax
import jax.numpy as jnp

from lockstep.learn.jax.minibatches import Batch
from lockstep.learn.jax.networks import Parameters
from lockstep.learn.jax.rollout import Rollout

_OF_ROLLOUT = ("actor_observations", "critic_observations", "actions", "log_probs", "rewards")
_OF_BATCH = ("values", "advantages", "targets")

CHECKS = ("parameters", *_OF_ROLLOUT, "final_critic_observations", *_OF_BATCH)
"""What ``find_nonfinite`` looks at, in the order in which data flow."""


def find_nonfinite(parameters: Parameters, rollout: Rollout, batch: Batch) -> jax.Array:
    """Return ``(len(CHECKS),)`` bool: which of this rank's tensors are not finite; padding does not count.

    Args:
        parameters: at the start of the iteration.
        rollout: as collected.
        batch: with the estimates, ``(num_steps, num_envs)``.
    """
    is_real = batch.weights > 0

    def is_bad(samples: jax.Array, counts: jax.Array) -> jax.Array:
        is_finite = jnp.isfinite(samples).reshape(*counts.shape, -1).all(-1)
        return (~is_finite & counts).any()

    bad_parameters = jnp.stack([~jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(parameters)]).any()
    collected = [is_bad(getattr(rollout, name), is_real) for name in _OF_ROLLOUT]
    # Only where the time limit cut an episode are they used; a diverged env has nothing sensible there.
    final = is_bad(rollout.final_critic_observations, is_real & rollout.truncated)
    estimates = [is_bad(getattr(batch, name), is_real) for name in _OF_BATCH]
    return jnp.stack((bad_parameters, *collected, final, *estimates))
