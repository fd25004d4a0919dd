"""Envs in JAX for tests: a player who keeps their state and counts their steps."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.core.types import Task
from lockstep.envs.config import EnvConfig
from lockstep.envs.jax_env import EnvState, JaxEnv, Transition
from lockstep.session.mjx_choice import warp_obstacle, warp_versions
from lockstep.sim.analytic import PureAnalyticEngine

needs_warp = pytest.mark.skipif(
    warp_obstacle("float32", "cpu", False, *warp_versions()) is not None,
    reason="needs the version of Warp that MJX asks for: pip install 'mujoco-mjx[warp]'",
)
IMPLEMENTATIONS = [
    pytest.param((implementation, dtype), id=f"{implementation}-{dtype}", marks=marks)
    for implementation, dtype, marks in (
        ("jax", "float32", ()),
        ("jax", "float64", ()),
        ("warp", "float32", needs_warp),
    )
]
"""Of the engine mjx, each with its precisions. Warp's kernels run on CPUs too; the first time they are compiled."""


def toy_jax_env(
    task: Any, *, max_episode_steps: int = 100, randomize: bool = False, dtype: Any = jnp.float64, **arguments: Any
) -> JaxEnv:
    """Return envs of an analytic toy; ``arguments`` are those of JaxEnv."""
    config = EnvConfig(max_episode_steps=max_episode_steps, randomize_initial_episode_length=randomize)
    return JaxEnv(task, PureAnalyticEngine(task, 1, dtype), config, dtype=dtype, **({"seed": 1} | arguments))


@functools.cache
def _compiled(env: JaxEnv) -> tuple[Callable[..., EnvState], Callable[..., tuple[EnvState, Transition]]]:
    """Return reset and step of one step's number, compiled once for all players of the envs."""

    def step(state: EnvState, action: jax.Array, number: jax.Array) -> tuple[EnvState, Transition]:
        noise = env.noise(state.env_ids, number, 1)
        return env.step(state, action, jax.tree.map(lambda table: table[0], noise))

    return jax.jit(env.reset), jax.jit(step)


class Player:
    """Steps envs one by one."""

    def __init__(self, env: JaxEnv, env_ids: Sequence[int]) -> None:
        self.env, self.num_steps = env, 0
        reset, self._step = _compiled(env)
        self.state = reset(jnp.asarray(env_ids, dtype=jnp.int32))

    def step(self, *actions: float) -> Transition:
        """Apply one action of one number to each env."""
        self.num_steps += 1
        column = jnp.asarray(actions, dtype=self.env.dtype)[:, None]
        self.state, transition = self._step(self.state, column, jnp.int32(self.num_steps))
        return transition

    @property
    def positions(self) -> list[float]:
        """What the actor sees of ``Line``."""
        found: list[float] = self.state.observations["actor"].flatten().tolist()
        return found


def random_actions(task: Task, num_steps: int, num_envs: int, seed: int = 0) -> np.ndarray:
    """Return actions ``(num_steps, num_envs[, size])``; some need clipping."""
    random = np.random.default_rng(seed)
    if task.action_space.kind == "discrete":
        return random.integers(0, task.action_space.size, (num_steps, num_envs))
    return 2 * random.normal(size=(num_steps, num_envs, task.action_space.size))


def play(env: JaxEnv, state: EnvState, actions: jax.Array) -> tuple[EnvState, Transition]:
    """Step from a reset on through ``actions (num_steps, num_envs, ...)``; transitions lead with ``num_steps``."""
    noise = env.noise(state.env_ids, 1, actions.shape[0])
    end, transitions = jax.lax.scan(lambda before, now: env.step(before, *now), state, (actions, noise))
    return end, transitions
