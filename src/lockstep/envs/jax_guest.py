"""An env of a library of JAX as pure functions of one env, and as a task; what adapters of such libraries make."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from lockstep.core.types import ActionSpace, Observations
from lockstep.envs.guest_task import GuestTask
from lockstep.sim.sealed import plain_precision


class GuestStep(NamedTuple):
    """What one step of one env gave; floats are float32."""

    state: Any  # the library's: a tree of arrays
    observations: Observations  # each (num_observations,) of the state that the step led to, before any reset
    reward: jax.Array  # ()
    metrics: Mapping[str, jax.Array]  # each ()
    terminated: jax.Array  # () bool: ended for good
    truncated: jax.Array  # () bool: ended by a limit of the library's own


class JaxGuest(Protocol):
    """One env of a library, without auto-reset and without a count of steps that would be ours.

    All randomness comes from keys ``(2,)`` uint32, as ``jax.random.PRNGKey`` makes them. The methods are traced where
    JAX has no types of 64 bits.
    """

    def reset(self, key: jax.Array) -> tuple[Any, Observations]:
        """Return the state at the start of an episode, and what is observed of it."""

    def step(self, key: jax.Array, state: Any, action: jax.Array) -> GuestStep:
        """Apply an action of the policy: ``(size,)`` float32, not yet clipped by anybody, or () int32 if discrete."""


class JaxGuestTask(GuestTask):
    """Sizes and names of an env of a library, and the env itself.

    Args:
        guest: the env.
        action_space: of the policy.
        max_episode_steps: the time limit in env steps, at least 1.
        metric_terms: what ``GuestStep.metrics`` has.
        step_duration_s: simulated seconds per env step; 0 where the env does not tell.
    """

    def __init__(
        self,
        guest: JaxGuest,
        action_space: ActionSpace,
        max_episode_steps: int,
        *,
        metric_terms: tuple[str, ...] = (),
        step_duration_s: float = 0.0,
    ) -> None:
        with plain_precision():
            _, observations = jax.eval_shape(guest.reset, jax.ShapeDtypeStruct((2,), jnp.uint32))
        sizes = {name: int(rows.shape[0]) for name, rows in observations.items()}
        super().__init__(action_space, sizes, metric_terms=metric_terms, step_duration_s=step_duration_s)
        self.guest = guest
        self.max_episode_steps: int = max_episode_steps


def flat(observation: Any) -> jax.Array:
    """Return all arrays of a tree one after the other, ``(size,)`` float32, in the order of their names."""
    return jnp.concatenate([jnp.ravel(leaf).astype(jnp.float32) for leaf in jax.tree.leaves(observation)])


def observation_groups(observation: Any) -> Observations:
    """Return the groups ``actor`` and ``critic`` of what an env of Brax or MuJoCo Playground observes.

    Of a dict the actor sees ``state`` and the critic ``privileged_state``, where there are such; else both see all.
    """
    if not isinstance(observation, Mapping) or "state" not in observation:
        everything = flat(observation)
        return {"actor": everything, "critic": everything}
    actor = flat(observation["state"])
    critic = flat(observation["privileged_state"]) if "privileged_state" in observation else actor
    return {"actor": actor, "critic": critic}


class BraxStyleGuest:
    """An env with the interface of Brax, which MuJoCo Playground's envs have too, without any of their wrappers.

    Actions are clipped to [-1, 1]. Rewards are summed over ``action_repeat`` steps, of which none is taken after an
    end; metrics are of the last. ``done`` is the env's own, which knows no time limit.

    Args:
        env: with ``reset(key)`` and ``step(state, action)``; states have ``obs``, ``reward``, ``done``, ``metrics``.
        action_repeat: the library's steps per env step, at least 1.

    Attributes:
        metric_terms: the names of the metrics that are one number each.
    """

    def __init__(self, env: Any, action_repeat: int) -> None:
        self._env, self._action_repeat = env, action_repeat
        with plain_precision():
            state = jax.eval_shape(env.reset, jax.ShapeDtypeStruct((2,), jnp.uint32))
        self.metric_terms = tuple(sorted(name for name, value in state.metrics.items() if value.shape == ()))

    def reset(self, key: jax.Array) -> tuple[Any, Observations]:
        """See ``JaxGuest.reset``."""
        state = self._env.reset(key)
        return state, observation_groups(state.obs)

    def step(self, key: jax.Array, state: Any, action: jax.Array) -> GuestStep:
        """See ``JaxGuest.step``; what is random in a step comes from the state, so the key is not used."""
        action = jnp.clip(action, -1.0, 1.0)
        if self._action_repeat == 1:
            after = self._env.step(state, action)
            reward, done = after.reward, after.done > 0
        else:
            after, reward, done = self._step_repeatedly(state, action)
        return GuestStep(
            state=after,
            observations=observation_groups(after.obs),
            reward=jnp.asarray(reward, jnp.float32),
            metrics={name: jnp.asarray(after.metrics[name], jnp.float32) for name in self.metric_terms},
            terminated=done,
            truncated=jnp.zeros_like(done),
        )

    def _step_repeatedly(self, state: Any, action: jax.Array) -> tuple[Any, jax.Array, jax.Array]:
        """Return the state, the sum of rewards and whether the episode ended, after several steps with one action."""

        def again(before: tuple[Any, jax.Array, jax.Array], _: None) -> tuple[Any, None]:
            state, reward, done = before
            after = self._env.step(jax.tree.map(jnp.asarray, state), action)  # a copy: envs write into its dicts

            def unless_done(old: jax.Array, new: jax.Array) -> jax.Array:
                return jnp.where(done, old, jnp.asarray(new, old.dtype))

            new = (after, reward + after.reward, after.done > 0)
            return jax.tree.map(unless_done, before, new), None

        start = (state, jnp.zeros((), jnp.float32), jnp.zeros((), bool))
        repeated: tuple[Any, jax.Array, jax.Array] = jax.lax.scan(again, start, None, length=self._action_repeat)[0]
        return repeated
