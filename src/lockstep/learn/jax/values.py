"""Values of a whole rollout in few large passes, after it was collected."""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from lockstep.learn.jax.networks import Backbone, Parameters, forget, run
from lockstep.learn.jax.statistics import local_parameters

ROWS_AT_ONCE = 1024
"""Final observations in one pass: the last pass is filled up to it, and few episodes are cut in one rollout."""


class RolloutValues(NamedTuple):
    """What the critic says of a rollout."""

    values: jax.Array  # (num_steps, num_envs) of each step's observation
    next_values: jax.Array  # (num_steps, num_envs) of what the step led to, before any reset
    critic_state: jax.Array  # (num_parts, num_envs, size) the critic's memory after the rollout


class CriticInputs(NamedTuple):
    """A rollout as the critic sees it; observations are normalised."""

    observations: jax.Array  # (num_steps, num_envs, num_critic)
    final_observations: jax.Array  # the same, of what each step led to before any reset
    last_observations: jax.Array  # (num_envs, num_critic) where the next rollout starts
    truncated: jax.Array  # (num_steps, num_envs) bool
    done: jax.Array  # (num_steps, num_envs) bool


def rollout_values(
    critic: Backbone, parameters: Parameters, inputs: CriticInputs, state: jax.Array, chunk_size: int
) -> RolloutValues:
    """Evaluate the critic on a rollout; nothing is exchanged between ranks.

    Args:
        critic: the network.
        parameters: its own.
        inputs: what it sees; where no episode was truncated, final observations may be anything.
        state: its memory ``(num_parts, num_envs, size)`` at the start of the rollout.
        chunk_size: samples per pass.
    """
    features, states = run(critic, parameters, inputs.observations, state, inputs.done, method="remember_sequence")
    critic_state = forget(states[-1], inputs.done[-1])
    last_features, _ = run(critic, parameters, inputs.last_observations, critic_state, method="remember")

    def value_of(features: jax.Array) -> jax.Array:
        values: jax.Array = run(critic, parameters, features)[..., 0].astype(inputs.observations.dtype)
        return values

    num_steps, num_envs = inputs.truncated.shape

    def final_value(indices: jax.Array) -> jax.Array:
        steps, envs = indices // num_envs, indices % num_envs
        # A truncated episode's final observation is seen by the memory as it stood after the step before it.
        before_reset = states[steps, :, envs].swapaxes(0, 1)
        observations = inputs.final_observations[steps, envs]
        final_features, _ = run(critic, parameters, observations, before_reset, method="remember")
        return value_of(final_features)

    every_feature = jnp.concatenate((features, last_features[None])).reshape(-1, features.shape[-1])
    every_value = _map_chunks(value_of, every_feature, chunk_size)
    values, following = every_value[: num_steps * num_envs], every_value[num_envs:]
    next_values = _where_true(final_value, inputs.truncated.reshape(-1), following, chunk_size)
    shape = (num_steps, num_envs)
    return RolloutValues(values.reshape(shape), next_values.reshape(shape), critic_state)


def _map_chunks(function: Callable[[jax.Array], jax.Array], rows: jax.Array, chunk_size: int) -> jax.Array:
    """Return ``function(rows)``, ``(num_rows,)``, in passes of at most ``chunk_size`` rows."""
    num_rows = rows.shape[0]
    num_chunks = max(1, math.ceil(num_rows / chunk_size))
    size = math.ceil(num_rows / num_chunks)
    padded = jnp.pad(rows, ((0, num_chunks * size - num_rows), (0, 0)))
    results: jax.Array = jax.lax.map(function, padded.reshape(num_chunks, size, -1))
    return results.reshape(-1)[:num_rows]


def _where_true(
    function: Callable[[jax.Array], jax.Array], mask: jax.Array, otherwise: jax.Array, chunk_size: int
) -> jax.Array:
    """Return ``otherwise (num_rows,)`` with ``function(indices)`` in its place where ``mask (num_rows,)`` is true.

    The work grows with the number of true entries: passes go on until all are done, and few need few. How many passes
    that is may differ from rank to rank, so ``function`` must exchange nothing.
    """
    num_rows = mask.shape[0]
    size = min(num_rows, chunk_size, ROWS_AT_ONCE)
    ranks = jnp.cumsum(mask, dtype=jnp.int32)  # of each true entry, from 1
    num_true = ranks[-1]

    def one_pass(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        num_done, results = carry
        wanted = num_done + 1 + jnp.arange(size, dtype=jnp.int32)
        indices = jnp.searchsorted(ranks, wanted).astype(jnp.int32)
        chosen = function(jnp.minimum(indices, num_rows - 1))
        # Past the last true entry an index is one too large, and what is written there is dropped.
        return num_done + size, results.at[indices].set(chosen, mode="drop", unique_indices=False)

    start = local_parameters((jnp.zeros_like(num_true), otherwise))
    results: jax.Array = jax.lax.while_loop(lambda carry: carry[0] < num_true, one_pass, start)[1]
    return results
