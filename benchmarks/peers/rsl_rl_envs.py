"""``cartpole_classic`` as rsl_rl wants its envs: lockstep's own env behind its interface, and a lean one."""

import math
from typing import Any

import torch
from rsl_rl.env import VecEnv
from tensordict import TensorDict
from workload import Workload

from lockstep.core.config import merge
from lockstep.core.registry import load
from lockstep.recipes.catalog import TASKS
from lockstep.session.make_env import build_env

Step = tuple[TensorDict, torch.Tensor, torch.Tensor, dict[str, Any]]


class SameEnv(VecEnv):
    """The env that lockstep trains in; both groups hold the same numbers here, so the peer is handed one."""

    def __init__(self, workload: Workload) -> None:
        agent = {"num_steps_per_env": workload.num_steps_per_env}
        settings = {"num_envs": workload.num_envs, "seed": workload.seed, "device": "cpu", "agent": agent}
        config = merge(load(TASKS.get("cartpole_classic").recipe)(), settings)
        self.env = build_env(config)
        self.num_envs, self.num_actions = self.env.num_envs, 1
        self.max_episode_length = config.env.max_episode_steps
        self.device, self.cfg = "cpu", {}

    @property
    def num_steps(self) -> int:
        return self.env.num_steps

    @property
    def episode_length_buf(self) -> torch.Tensor:
        return self.env.episode_length

    def get_observations(self) -> TensorDict:
        return TensorDict({"policy": self.env.observations["actor"]}, batch_size=[self.num_envs])

    def step(self, actions: torch.Tensor) -> Step:
        transition = self.env.step(actions)
        extras = {"time_outs": transition.truncated}
        return self.get_observations(), transition.reward, transition.done, extras


class LeanEnv(VecEnv):
    """The same equations, limits and starts in as few torch operations as they need.

    Equations: Barto, Sutton and Anderson (1983), as in lockstep's task. No final observations (rsl_rl does not use
    them), no statistics, no non-finite check, and torch's own generator.
    """

    def __init__(self, workload: Workload) -> None:
        self.task = load(TASKS.get("cartpole_classic").recipe)().env
        self.num_envs, self.num_actions = workload.num_envs, 1
        self.max_episode_length = self.task.max_episode_steps
        self.device, self.cfg = "cpu", {}
        self.num_steps = 0
        self.episode_length_buf = torch.randint(0, self.max_episode_length, (self.num_envs,))
        self._state = self._starts()  # (num_envs, 4): cart position, pole angle and their rates

    def _starts(self) -> torch.Tensor:
        reach = self.task.reset_range
        return torch.empty(self.num_envs, 4).uniform_(-reach, reach)

    def get_observations(self) -> TensorDict:
        return TensorDict({"policy": self._state}, batch_size=[self.num_envs])

    def step(self, actions: torch.Tensor) -> Step:
        self.num_steps += 1
        _, angle, _, angular_velocity = self._state.unbind(1)
        sine, cosine = angle.sin(), angle.cos()
        force = actions.squeeze(1).clamp(-1.0, 1.0) * self.task.max_force_newtons
        push = (force + 0.05 * angular_velocity.square() * sine) / 1.1
        angular_acceleration = (9.8 * sine - cosine * push) / (2.0 / 3.0 - (0.05 / 1.1) * cosine.square())
        acceleration = push - (0.05 / 1.1) * angular_acceleration * cosine
        rates = torch.stack((acceleration, angular_acceleration), dim=1)
        state = self._state + 0.02 * torch.cat((self._state[:, 2:], rates), dim=1)
        terminated = state[:, 0].abs() > self.task.max_cart_position_m
        terminated |= state[:, 1].abs() > math.radians(self.task.max_pole_angle_deg)
        self.episode_length_buf += 1
        time_outs = (self.episode_length_buf >= self.max_episode_length) & ~terminated
        done = terminated | time_outs
        self.episode_length_buf.masked_fill_(done, 0)
        self._state = torch.where(done.unsqueeze(1), self._starts(), state)
        return self.get_observations(), torch.ones(self.num_envs), done, {"time_outs": time_outs}


ENVS = {"same": SameEnv, "lean": LeanEnv}
