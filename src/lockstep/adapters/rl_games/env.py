"""A batch of our envs as rl_games' agents step them (rl-games 1.6.5)."""

from typing import Any

import torch
from rl_games.common.ivecenv import IVecEnv

from lockstep.adapters.spaces import actions_of, observations_of
from lockstep.envs.batch_env import BatchEnv
from lockstep.envs.torch_env import Transition


class RlGamesEnv(IVecEnv):  # type: ignore[misc]
    """The envs of a rank, in tensors throughout; nothing is copied.

    Args:
        env: steps the envs.
        with_states: whether observations also have what the critic sees, as ``states``.

    Attributes:
        last: what the last step gave; an agent that does better with a time limit than rl_games does looks here.
    """

    last: Transition

    def __init__(self, env: BatchEnv, with_states: bool) -> None:
        self.env, self.with_states = env, with_states

    def reset(self) -> dict[str, torch.Tensor]:
        """Return the observations as they are: the envs are ready, and episodes last from iteration to iteration."""
        return self.grouped(self.env.observations)

    def step(self, actions: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor, dict[str, Any]]:
        """Apply one action per env; return observations, rewards and dones, each ``(num_envs, ...)``, and no infos."""
        self.last = self.env.step(actions)
        return self.grouped(self.last.observations), self.last.reward, self.last.done, {}

    def grouped(self, observations: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return observation groups by the names that rl_games has for them."""
        groups = {"obs": observations["actor"]}
        return groups | {"states": observations["critic"]} if self.with_states else groups

    def get_env_info(self) -> dict[str, Any]:
        """Return the spaces of observations and actions."""
        sizes = self.env.task.num_observations
        actions = actions_of(self.env.task.action_space)
        info: dict[str, Any] = {"observation_space": observations_of(sizes["actor"]), "action_space": actions}
        return info | {"state_space": observations_of(sizes["critic"])} if self.with_states else info
