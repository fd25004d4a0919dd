"""``cartpole_classic`` in as few torch operations as it needs, for the peers' envs to be made of."""

import math
from collections.abc import Callable

import torch
from workload import NUM_EVALUATION_EPISODES

from lockstep.core.registry import load
from lockstep.recipes.catalog import TASKS

NUM_OBSERVATIONS, NUM_ACTIONS = 4, 1


class LeanCartpole:
    """The equations, limits and starts of lockstep's task; episodes begin at random points of their time limit.

    Equations: Barto, Sutton and Anderson (1983), as in lockstep's task. No final observations, no statistics, no
    non-finite check, and torch's own generator.

    ``observations`` (num_envs, 4) are cart position, pole angle and their rates; every step makes them anew.
    ``episode_length`` (num_envs,) int64 is kept in place. The reward is 1 for every step.
    """

    def __init__(self, num_envs: int) -> None:
        self.task = load(TASKS.get("cartpole_classic").recipe)().env
        self.num_envs, self.num_steps = num_envs, 0
        self.episode_length = torch.randint(0, self.task.max_episode_steps, (num_envs,))
        self.observations = self._starts()

    def _starts(self) -> torch.Tensor:
        reach = self.task.reset_range
        return torch.empty(self.num_envs, NUM_OBSERVATIONS).uniform_(-reach, reach)

    def step(self, actions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Take one step (num_envs, 1); return who failed, whose time is up, and who did either, (num_envs,) bool."""
        self.num_steps += 1
        _, angle, _, angular_velocity = self.observations.unbind(1)
        sine, cosine = angle.sin(), angle.cos()
        force = actions.squeeze(1).clamp(-1.0, 1.0) * self.task.max_force_newtons
        push = (force + 0.05 * angular_velocity.square() * sine) / 1.1
        angular_acceleration = (9.8 * sine - cosine * push) / (2.0 / 3.0 - (0.05 / 1.1) * cosine.square())
        acceleration = push - (0.05 / 1.1) * angular_acceleration * cosine
        rates = torch.stack((acceleration, angular_acceleration), dim=1)
        state = self.observations + 0.02 * torch.cat((self.observations[:, 2:], rates), dim=1)
        terminated = state[:, 0].abs() > self.task.max_cart_position_m
        terminated |= state[:, 1].abs() > math.radians(self.task.max_pole_angle_deg)
        self.episode_length += 1
        time_outs = (self.episode_length >= self.task.max_episode_steps) & ~terminated
        done = terminated | time_outs
        self.episode_length.masked_fill_(done, 0)
        self.observations = torch.where(done.unsqueeze(1), self._starts(), state)
        return terminated, time_outs, done


def mean_episode_length(policy: Callable[[torch.Tensor], torch.Tensor]) -> float:
    """Return the mean length of whole episodes of a policy from observations (num_envs, 4) to actions (num_envs, 1)."""
    env = LeanCartpole(NUM_EVALUATION_EPISODES)
    env.episode_length.zero_()
    lengths = torch.zeros(env.num_envs)
    running = torch.ones(env.num_envs, dtype=torch.bool)
    while running.any():
        _, _, done = env.step(policy(env.observations))
        lengths += running
        running &= ~done
    return float(lengths.mean())
