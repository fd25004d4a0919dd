"""A rollout: what the envs gave to the policy's actions, collected in one scan over their steps."""

from collections.abc import Callable
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp

from lockstep.core.rng import Stream
from lockstep.core.types import Observations, Task
from lockstep.envs.jax_env import EnvNoise, EnvState, JaxEnv
from lockstep.learn.jax.distributions import Distribution
from lockstep.learn.jax.networks import forget


class Rollout(NamedTuple):
    """``num_steps`` steps of ``num_envs`` envs; observations are raw."""

    actor_observations: jax.Array  # (num_steps, num_envs, num_observations["actor"])
    critic_observations: jax.Array  # (num_steps, num_envs, num_observations["critic"])
    final_critic_observations: jax.Array  # the same, of what each step led to before any reset
    actions: jax.Array  # (num_steps, num_envs[, size])
    log_probs: jax.Array  # (num_steps, num_envs)
    distributions: jax.Array  # (num_steps, num_envs, num_parameters) as Distribution.pack gives them
    rewards: jax.Array  # (num_steps, num_envs)
    terminated: jax.Array  # (num_steps, num_envs) bool
    truncated: jax.Array  # (num_steps, num_envs) bool

    @property
    def done(self) -> jax.Array:
        """``(num_steps, num_envs)`` bool: an episode ended with this step."""
        return self.terminated | self.truncated


class Collected(NamedTuple):
    """A rollout, and how envs and actor stand after it."""

    rollout: Rollout
    env: EnvState
    actor_state: jax.Array  # (num_parts, num_envs, size) the actor's memory
    finished: jax.Array  # (num_terms + 2,) float64 sums over this rank's episodes that ended, as in Transition
    num_diverged: jax.Array  # () int32


class ActionNoise:
    """The noise that actions are sampled with, keyed by global env id and env step, drawn per rollout."""

    def __init__(self, task: Task, seed: int, dtype: jnp.dtype) -> None:
        self._space, self._dtype = task.action_space, dtype
        self._stream = Stream(seed, "train/action", jnp)

    def draw(self, env_ids: jax.Array, num_steps_before: jax.Array, num_steps: int) -> jax.Array:
        """Return ``(num_steps, num_envs, num_noise)`` for the next steps: normals, or uniforms if discrete.

        Args:
            env_ids: ``(num_envs,)`` int32 global ids.
            num_steps_before: () int32, env steps that each env has made so far.
            num_steps: how many are to come.
        """
        counters = self._stream.counters(num_steps_before, num_steps)
        if self._space.kind == "continuous":
            noise = self._stream.normal(counters, env_ids, self._space.size, self._dtype)
        else:
            noise = self._stream.uniform(counters, env_ids, 1, self._dtype)
        return cast(jax.Array, noise)


def collect(
    env: JaxEnv,
    act: Callable[[Observations, jax.Array], tuple[Distribution, jax.Array]],
    state: EnvState,
    actor_state: jax.Array,
    env_noise: EnvNoise,
    action_noise: jax.Array,
) -> Collected:
    """Return the next steps of all envs.

    Args:
        env: steps them.
        act: gives the action distribution and the actor's next memory, for raw observations and its memory.
        state: of the envs.
        actor_state: ``(num_parts, num_envs, size)``.
        env_noise: of these steps.
        action_noise: ``(num_steps, num_envs, num_noise)``, as ActionNoise draws it.
    """

    def one_step(
        before: tuple[EnvState, jax.Array], noise: tuple[EnvNoise, jax.Array]
    ) -> tuple[tuple[EnvState, jax.Array], tuple[Rollout, jax.Array, jax.Array]]:
        state, actor_state = before
        step_noise, step_action_noise = noise
        observations = state.observations
        distribution, actor_state = act(observations, actor_state)
        action = distribution.sample(step_action_noise)
        state, transition = env.step(state, action, step_noise)
        rollout = Rollout(
            actor_observations=observations["actor"],
            critic_observations=observations["critic"],
            final_critic_observations=transition.final_observations["critic"],
            actions=action,
            log_probs=distribution.log_prob(action),
            distributions=distribution.pack(),
            rewards=transition.reward,
            terminated=transition.terminated,
            truncated=transition.truncated,
        )
        after = (state, forget(actor_state, transition.done))
        return after, (rollout, transition.finished, transition.num_diverged)

    (state, actor_state), (rollout, finished, num_diverged) = jax.lax.scan(
        one_step, (state, actor_state), (env_noise, action_noise)
    )
    return Collected(rollout, state, actor_state, finished.sum(0), num_diverged.sum(dtype=jnp.int32))
