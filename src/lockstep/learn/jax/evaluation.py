"""Whole episodes under the deterministic policy."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from lockstep.core.types import Array, Observations
from lockstep.envs.jax_env import EnvNoise, EnvState, JaxEnv
from lockstep.learn.jax.statistics import local_parameters, psum


class Episodes(NamedTuple):
    """One finished episode per env; those of padded envs are zeros."""

    term_sums: jax.Array  # (num_envs, num_terms) float64: the sum of each reward term, then of each metric
    lengths: jax.Array  # (num_envs,) float64 in env steps


class _Progress(NamedTuple):
    env: EnvState
    memory: Array
    totals: jax.Array  # (num_envs, num_terms + 1) float64
    running: jax.Array  # (num_envs,) bool
    num_steps: jax.Array  # () int32


class Actor(Protocol):
    """The part of an algorithm that an evaluation needs; see ``learn/jax/algorithm.py``."""

    def act(self, replicated: Any, observations: Observations, memory: Array) -> tuple[Array, Array]:
        """Return the most likely actions and the next memory."""

    def initial_memory(self, num_envs: int) -> Array:
        """Return the memory at the start of an episode."""


def evaluate(actor: Actor, replicated: Any, env_ids: jax.Array, env: JaxEnv | None) -> dict[str, jax.Array]:
    """Return means over whole episodes with the most likely actions, the same on every rank.

    Args:
        actor: chooses the actions.
        replicated: its state.
        env_ids: ``(num_episodes,)`` int32, this rank's share; -1 is padding.
        env: of the evaluation.

    Raises:
        ValueError: there is no env.
    """
    if env is None:
        raise ValueError("there are no envs for an evaluation; see evaluation.interval of the config")
    memory = actor.initial_memory(env_ids.shape[0])
    episodes = run_episodes(env, partial(actor.act, replicated), memory, env_ids)
    return summarise(episodes, env_ids, env)


def run_episodes(
    env: JaxEnv, act: Callable[[Observations, Array], tuple[jax.Array, Array]], memory: Array, env_ids: jax.Array
) -> Episodes:
    """Run every env from a reset to the end of its first episode.

    The envs start at counter 0 of their streams, so every evaluation meets the same episodes. Ranks go their own ways,
    each until its own episodes are over: nothing is exchanged.

    Args:
        env: of the evaluation.
        act: gives actions and the next memory, for raw observations and the memory.
        memory: that episodes start with, arrays ``(num_envs, ...)``; envs are never started again, so it is never
            cleared.
        env_ids: ``(num_envs,)`` int32; -1 is padding.
    """
    num_terms = len(env.task.reward_terms) + len(env.task.metric_terms)

    def is_going_on(progress: _Progress) -> jax.Array:
        return progress.running.any() & (progress.num_steps < env.config.max_episode_steps)

    def one_step(progress: _Progress) -> _Progress:
        noise = env.noise(env_ids, progress.num_steps + 1, 1)
        actions, memory = act(progress.env.observations, progress.memory)
        state, transition = env.step(progress.env, actions, EnvNoise(*(rows[0] for rows in noise)))
        running = progress.running[:, None]
        totals = progress.totals + jnp.concatenate(
            (jnp.where(running, transition.terms, 0.0).astype(jnp.float64), running.astype(jnp.float64)), axis=1
        )
        return _Progress(state, memory, totals, progress.running & ~transition.done, progress.num_steps + 1)

    start = _Progress(
        env=env.reset(env_ids),
        memory=memory,
        totals=jnp.zeros((env_ids.shape[0], num_terms + 1), jnp.float64),
        running=env_ids >= 0,
        num_steps=jnp.zeros((), jnp.int32),
    )
    totals = jax.lax.while_loop(is_going_on, one_step, local_parameters(start)).totals
    return Episodes(totals[:, :-1], totals[:, -1])


def summarise(episodes: Episodes, env_ids: jax.Array, env: JaxEnv) -> dict[str, jax.Array]:
    """Return means over the episodes that all ranks have shared out, the same on every rank.

    Args:
        episodes: this rank's.
        env_ids: ``(num_envs,)`` int32, of the envs they are of; -1 is padding.
        env: that they were in.
    """
    count = (env_ids >= 0).sum(dtype=jnp.float64).reshape(1)
    sums = jnp.concatenate((episodes.term_sums.sum(0), episodes.lengths.sum(keepdims=True), count))
    metrics = env.summarise(psum(sums))
    del metrics["num_episodes"]  # the config says how many there are
    return metrics
