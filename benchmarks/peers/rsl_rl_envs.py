"""``cartpole_classic`` as rsl_rl wants its envs: lockstep's own env behind its interface, and a lean one."""

from typing import Any

import torch
from lean_torch_env import NUM_ACTIONS, LeanCartpole
from rsl_rl.env import VecEnv
from tensordict import TensorDict
from workload import Workload

from lockstep.core.config import merge
from lockstep.core.registry import load
from lockstep.recipes.catalog import TASKS
from lockstep.session.make_env import build_env

Step = tuple[TensorDict, torch.Tensor, torch.Tensor, dict[str, Any]]


class _Face(VecEnv):
    """What both envs have alike: the counts of ``env``, by the names that rsl_rl knows them by."""

    env: Any

    @property
    def num_steps(self) -> int:
        return self.env.num_steps

    @property
    def episode_length_buf(self) -> torch.Tensor:
        return self.env.episode_length


class SameEnv(_Face):
    """The env that lockstep trains in; both groups hold the same numbers here, so the peer is handed one."""

    def __init__(self, workload: Workload) -> None:
        agent = {"num_steps_per_env": workload.num_steps_per_env}
        settings = {"num_envs": workload.num_envs, "seed": workload.seed, "device": "cpu", "agent": agent}
        config = merge(load(TASKS.get("cartpole_classic").recipe)(), settings)
        self.env = build_env(config)
        self.num_envs, self.num_actions = self.env.num_envs, 1
        self.max_episode_length = config.env.max_episode_steps
        self.device, self.cfg = "cpu", {}

    def get_observations(self) -> TensorDict:
        return TensorDict({"policy": self.env.observations["actor"]}, batch_size=[self.num_envs])

    def step(self, actions: torch.Tensor) -> Step:
        transition = self.env.step(actions)
        extras = {"time_outs": transition.truncated}
        return self.get_observations(), transition.reward, transition.done, extras


class LeanEnv(_Face):
    """The same in as few torch operations as it needs; rsl_rl does not use final observations."""

    def __init__(self, workload: Workload) -> None:
        self.env = LeanCartpole(workload.num_envs)
        self.num_envs, self.num_actions = workload.num_envs, NUM_ACTIONS
        self.max_episode_length = self.env.task.max_episode_steps
        self.device, self.cfg = "cpu", {}

    def get_observations(self) -> TensorDict:
        return TensorDict({"policy": self.env.observations}, batch_size=[self.num_envs])

    def step(self, actions: torch.Tensor) -> Step:
        _, time_outs, done = self.env.step(actions)
        return self.get_observations(), torch.ones(self.num_envs), done, {"time_outs": time_outs}


ENVS = {"same": SameEnv, "lean": LeanEnv}
