"""Stepping envs with random actions, with torch: this rank's share of them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import array_api_compat.torch as xp
import torch

from lockstep.core import beats
from lockstep.envs.torch_env import TorchEnv
from lockstep.session.random_actions import RandomActions

if TYPE_CHECKING:
    import numpy as np

    from lockstep.envs.batch_env import BatchEnv


class TorchStepper:
    """The ``Stepper`` of torch; the process is one rank.

    Args:
        env: this rank's.
        rank: which one that is.
        seed: of the run.
    """

    compile_s: float | None = None

    def __init__(self, env: BatchEnv, rank: int, seed: int) -> None:
        self.env = env
        self.num_envs = {rank: env.num_envs}
        self._rank = rank
        self._actions = RandomActions(env.task.action_space, seed, xp, env.dtype, torch.int64, env.device)

    @torch.no_grad()
    def step(self, num_steps: int) -> dict[int, float]:
        """Draw the actions, apply them one after the other, and wait for the device."""
        began = time.perf_counter()
        beats.enter("rollout")
        for action in self._actions.draw(self.env.num_steps, num_steps, self.env.env_ids):
            beats.enter("rollout")
            self.env.step(action)
        if self.env.device.type == "cuda":
            with beats.exchange(beats.DEVICE):
                torch.cuda.synchronize(self.env.device)
        return {self._rank: time.perf_counter() - began}

    def states(self) -> dict[str, np.ndarray]:
        """Copy what the task sees to the host."""
        found = {"env_ids": self.env.env_ids}
        if isinstance(self.env, TorchEnv):  # other people's envs keep theirs to themselves
            state = self.env.state
            found |= {"qpos": state.qpos, "qvel": state.qvel, "sensordata": state.sensordata}
        found |= {f"observations/{name}": array for name, array in self.env.observations.items()}
        return {name: tensor.cpu().numpy().copy() for name, tensor in found.items()}
