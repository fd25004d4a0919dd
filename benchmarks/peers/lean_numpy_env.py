"""``cartpole_classic`` in as few numpy operations as it needs, for a peer that trains in numpy's envs."""

import math
from typing import Any

import numpy as np

from lockstep.core.registry import load
from lockstep.recipes.catalog import TASKS

Array = np.ndarray[Any, Any]


class LeanNumpyCartpole:
    """The equations, limits and starts of lockstep's task; episodes begin at random points of their time limit.

    Equations: Barto, Sutton and Anderson (1983), as in lockstep's task. Actions must be within [-1, 1].

    ``observations`` (num_envs, 4) float32 are cart position, pole angle and their rates; every step makes them anew.
    ``episode_length`` (num_envs,) int64 is kept in place. The reward is 1 for every step.
    """

    def __init__(self, num_envs: int, seed: int) -> None:
        self.task = load(TASKS.get("cartpole_classic").recipe)().env
        self.num_envs, self.num_steps = num_envs, 0
        self._generator = np.random.default_rng(seed)
        self._max_angle = math.radians(self.task.max_pole_angle_deg)
        self.episode_length = self._generator.integers(0, self.task.max_episode_steps, num_envs)
        self.observations = self._starts(num_envs)

    def _starts(self, num_envs: int) -> Array:
        reach = np.float32(self.task.reset_range)
        return (2 * self._generator.random((num_envs, 4), dtype=np.float32) - 1) * reach

    def step(self, actions: Array) -> tuple[Array, Array, Array]:
        """Take one step (num_envs, 1); return who has ended, whose time is up, and what the latter saw last.

        Shapes: (num_envs,) bool, (num_late,) int64, (num_late, 4) float32.
        """
        self.num_steps += 1
        position, angle, velocity, angular_velocity = self.observations.T
        sine, cosine = np.sin(angle), np.cos(angle)
        push = (actions[:, 0] * self.task.max_force_newtons + 0.05 * angular_velocity**2 * sine) / 1.1
        angular_acceleration = (9.8 * sine - cosine * push) / (2.0 / 3.0 - (0.05 / 1.1) * cosine**2)
        acceleration = push - (0.05 / 1.1) * angular_acceleration * cosine
        state = np.empty_like(self.observations)
        state[:, 0] = position + 0.02 * velocity
        state[:, 1] = angle + 0.02 * angular_velocity
        state[:, 2] = velocity + 0.02 * acceleration
        state[:, 3] = angular_velocity + 0.02 * angular_acceleration
        done = (np.abs(state[:, 0]) > self.task.max_cart_position_m) | (np.abs(state[:, 1]) > self._max_angle)
        self.episode_length += 1
        late = np.flatnonzero((self.episode_length >= self.task.max_episode_steps) & ~done)
        last_seen = state[late]
        done[late] = True
        ended = np.flatnonzero(done)
        state[ended] = self._starts(len(ended))
        self.episode_length[ended] = 0
        self.observations = state
        return done, late, last_seen
