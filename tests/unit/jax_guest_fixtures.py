"""A guest in JAX that does what can be worked out by hand, and envs of it."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from lockstep.core.types import ActionSpace, Array, Observations
from lockstep.envs.config import JaxGuestConfig
from lockstep.envs.jax_guest import GuestStep, JaxGuestTask
from lockstep.envs.jax_guest_env import JaxGuestEnv
from tests.unit.jax_env_fixtures import Player


class Walker:
    """Walks along a line as far as it is told. Beyond 3 its episode ends for good; below -3 it observes what is NaN.

    After ``own_limit`` steps its own time is up. The actor sees the position, the critic also the number of steps. In a
    step of exactly 0.125 its luck is infinite.
    """

    def __init__(self, own_limit: int = 1000) -> None:
        self.own_limit = own_limit

    def reset(self, key: Array) -> tuple[Any, Observations]:
        start = jax.random.uniform(key)
        assert start.dtype == jnp.float32  # the library's precision, not ours
        return {"position": start, "age": 0}, self.observe(start, jnp.zeros(()))

    def step(self, key: Array, state: Any, action: Array) -> GuestStep:
        position, age = state["position"] + action[0], state["age"] + 1
        observed = jnp.where(position < -3, jnp.nan, position)
        return GuestStep(
            state={"position": position, "age": age},
            observations=self.observe(observed, age),
            reward=action[0],
            metrics={"luck": jnp.where(action[0] == 0.125, jnp.inf, jax.random.uniform(key))},
            terminated=position > 3,
            truncated=age >= self.own_limit,
        )

    def observe(self, position: Array, age: Array) -> Observations:
        actor = jnp.reshape(position, (1,))
        return {"actor": actor, "critic": jnp.stack((position, age.astype(jnp.float32)))}


def walkers(env_ids: Sequence[int], own_limit: int = 1000, **settings: Any) -> Player:
    """Return envs of the walker and who plays them; settings are those of the env, its seed and its streams."""
    arguments = {"seed": 1, "dtype": jnp.float64} | {
        name: settings.pop(name) for name in ("seed", "dtype", "streams") if name in settings
    }
    config = JaxGuestConfig(**settings)
    limit = config.max_episode_steps or 100
    task = JaxGuestTask(Walker(own_limit), ActionSpace("continuous", 1), limit, metric_terms=("luck",))
    return Player(JaxGuestEnv(task, config, **arguments), env_ids)
