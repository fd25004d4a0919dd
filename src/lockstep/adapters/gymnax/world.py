"""An env of gymnax as pure functions of one env."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
from gymnax.environments import spaces

from lockstep.core.errors import UsageError, in_one_line
from lockstep.core.types import ActionSpace, Observations
from lockstep.envs.config import JaxGuestConfig
from lockstep.envs.jax_guest import GuestStep, JaxGuestTask, flat
from lockstep.sim.sealed import plain_precision


class GymnaxGuest:
    """An env of gymnax without its auto-reset.

    A continuous action's [-1, 1] is stretched to the bounds of the env's space, where it has both, and what is beyond
    is clipped to them; entries without bounds reach the env as they are. ``step_env`` says whether an episode has ended
    for good, ``is_truncated`` whether its time is up.

    Args:
        env: a gymnax ``Environment``.
        params: of it.

    Raises:
        UsageError: its actions or observations are of a kind that no policy of ours has.
    """

    def __init__(self, env: Any, params: Any) -> None:
        self._env, self._params = env, params
        self._action_space, self._observation_space = env.action_space(params), env.observation_space(params)
        _require_known(self._observation_space, env.name)
        self.action_space = _action_space(self._action_space, env.name)
        if self.action_space.kind == "continuous":
            shape = self._action_space.shape
            self._low, self._high = (
                np.broadcast_to(np.asarray(bound, np.float32), shape)
                for bound in (self._action_space.low, self._action_space.high)
            )

    def reset(self, key: jax.Array) -> tuple[Any, Observations]:
        """See ``JaxGuest.reset``."""
        observation, state = self._env.reset_env(key, self._params)
        return state, self._groups(observation)

    def step(self, key: jax.Array, state: Any, action: jax.Array) -> GuestStep:
        """See ``JaxGuest.step``."""
        if self.action_space.kind == "continuous":
            action = self._in_bounds(action.reshape(self._action_space.shape))
        observation, after, reward, terminated, _ = self._env.step_env(key, state, action, self._params)
        return GuestStep(
            state=after,
            observations=self._groups(observation),
            reward=jnp.asarray(reward, jnp.float32).reshape(()),
            metrics={},
            terminated=jnp.asarray(terminated, bool).reshape(()),
            truncated=jnp.asarray(self._env.is_truncated(after, self._params), bool).reshape(()),
        )

    def _in_bounds(self, action: jax.Array) -> jax.Array:
        low, high = self._low, self._high
        is_bounded = np.isfinite(low) & np.isfinite(high)
        lowest, highest = np.where(is_bounded, low, 0.0), np.where(is_bounded, high, 0.0)
        stretched = lowest + (jnp.clip(action, -1.0, 1.0) + 1.0) / 2.0 * (highest - lowest)
        return jnp.where(is_bounded, stretched, jnp.clip(action, low, high))

    def _groups(self, observation: Any) -> Observations:
        everything = _numbers(observation, self._observation_space)
        return {"actor": everything, "critic": everything}


def make_task(env_id: str, config: JaxGuestConfig) -> JaxGuestTask:
    """Return an env of gymnax as a task.

    ``kwargs`` that are fields of the env's params replace them; its maker is given the others. The time limit is
    ``max_steps_in_episode`` of the params unless the config has one, which then takes its place there.

    Raises:
        UsageError: gymnax does not make it with these settings, or its spaces can't be served.
    """
    with plain_precision():
        try:
            env, params = gymnax.make(env_id)
            fields = {field.name for field in dataclasses.fields(params)}
            of_maker = {name: value for name, value in config.kwargs.items() if name not in fields}
            if of_maker:
                env, params = gymnax.make(env_id, **of_maker)
            params = params.replace(**{name: config.kwargs[name] for name in config.kwargs.keys() & fields})
        except (TypeError, ValueError, ImportError, OSError) as error:
            raise UsageError(
                f"gymnax does not make {env_id!r} with env.kwargs {config.kwargs}: {in_one_line(error)}"
            ) from error
        if config.max_episode_steps:
            params = params.replace(max_steps_in_episode=config.max_episode_steps)
        guest = GymnaxGuest(env, params)
        return JaxGuestTask(guest, guest.action_space, int(params.max_steps_in_episode))


def _action_space(space: Any, name: str) -> ActionSpace:
    if isinstance(space, spaces.Discrete):
        return ActionSpace("discrete", int(space.n))
    if isinstance(space, spaces.Box) and jnp.issubdtype(space.dtype, jnp.floating):
        is_bounded = np.isfinite(np.asarray(space.low)).all() and np.isfinite(np.asarray(space.high)).all()
        return ActionSpace("continuous", math.prod(space.shape), 1.0 if is_bounded else math.inf)
    raise UsageError(f"task gymnax/{name} has actions {space!r}; a policy has Discrete or continuous Box actions")


def _require_known(space: Any, name: str) -> None:
    """Raise UsageError if an observation can't be made a row of numbers."""
    if not isinstance(space, spaces.Box | spaces.Discrete | spaces.Dict | spaces.Tuple):
        raise UsageError(f"task gymnax/{name} has observations {space!r}; a policy has Box, Discrete, Dict or Tuple")
    for inner in _parts(space):
        _require_known(inner, name)


def _numbers(observation: Any, space: Any) -> jax.Array:
    """Return an observation as ``(size,)`` float32: boxes flattened, one of n as n numbers of which one is 1."""
    if isinstance(space, spaces.Discrete):
        return jax.nn.one_hot(jnp.asarray(observation), space.n, dtype=jnp.float32)
    if isinstance(space, spaces.Dict):
        parts = [(observation[name], inner) for name, inner in space.spaces.items()]
    elif isinstance(space, spaces.Tuple):
        parts = list(zip(observation, space.spaces, strict=True))
    else:
        return flat(observation)
    return jnp.concatenate([_numbers(part, inner) for part, inner in parts])


def _parts(space: Any) -> list[Any]:
    if isinstance(space, spaces.Dict):
        return list(space.spaces.values())
    return list(space.spaces) if isinstance(space, spaces.Tuple) else []
