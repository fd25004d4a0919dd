"""A process's envs for learners that step them from outside of any program: the one place with their state."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy

from lockstep.core.types import Observations
from lockstep.envs.jax_env import EnvNoise, EnvState, JaxEnv, Transition

PyTree = Any


class SteppedEnv:
    """Envs of one process on one device, reset. A step is one compiled program, and nothing of it comes to the host.

    Args:
        env: makes and steps envs.
        env_ids: ``(num_envs,)`` int32 global ids of this process's.
        device: that they are on.

    Attributes:
        num_steps: env steps of each env so far: where its random streams go on.
        state: of the envs, arrays ``(num_envs, ...)``.
    """

    def __init__(self, env: JaxEnv, env_ids: numpy.ndarray, device: jax.Device) -> None:
        self.env, self.device = env, device
        self.task = env.task
        self.num_envs, self.num_steps = int(env_ids.size), 0
        self._step_all = jax.jit(self._traced_step)
        with jax.enable_x64(True):
            self.state: EnvState = jax.jit(env.reset)(jax.device_put(env_ids, device))
        self._sums: jax.Array
        self._num_diverged: jax.Array
        self._restart_sums()

    @property
    def observations(self) -> Observations:
        """By group ``(num_envs, num_observations)``, of what the next action is for."""
        return self.state.observations

    def step(self, actions: jax.Array) -> Transition:
        """Apply one action per env: ``(num_envs, size)`` floats, or ``(num_envs,)`` integers if discrete."""
        self.num_steps += 1
        transition: Transition
        with jax.enable_x64(True):
            counter = numpy.int32(self.num_steps)
            self.state, self._sums, self._num_diverged, transition = self._step_all(
                self.state, self._sums, self._num_diverged, actions, counter
            )
        return transition

    def take_sums(self) -> numpy.ndarray:
        """Return ``(num_terms + 3,)`` float64 over what happened since the last call; it waits for the device.

        They are the sums that ``JaxEnv.summarise`` takes, then the number of envs whose physics failed.
        """
        taken = numpy.append(numpy.asarray(self._sums), numpy.float64(self._num_diverged))
        self._restart_sums()
        return taken

    def put(self, state: PyTree, num_steps: int) -> None:
        """Go on from a state of the same shapes, on the host or the device, after so many steps."""
        with jax.enable_x64(True):
            self.state = jax.device_put(state, self.device)
        self.num_steps = num_steps
        self._restart_sums()

    def _restart_sums(self) -> None:
        num_terms = len(self.task.reward_terms) + len(self.task.metric_terms)
        with jax.enable_x64(True):
            sums = numpy.zeros(num_terms + 2), numpy.zeros((), numpy.int32)
            self._sums, self._num_diverged = jax.device_put(sums, self.device)

    def _traced_step(
        self, state: EnvState, sums: jax.Array, num_diverged: jax.Array, actions: jax.Array, counter: jax.Array
    ) -> tuple[EnvState, jax.Array, jax.Array, Transition]:
        noise = self.env.noise(state.env_ids, counter, 1)
        if self.task.action_space.kind == "continuous":
            actions = actions.astype(self.env.dtype)
        after, transition = self.env.step(state, actions, EnvNoise(*(rows[0] for rows in noise)))
        return after, sums + transition.finished, jnp.add(num_diverged, transition.num_diverged), transition
