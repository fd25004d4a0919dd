"""A batch of our envs as Stable-Baselines3's algorithms step them (stable-baselines3 2.9)."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.vec_env import VecEnv

from lockstep.adapters.spaces import actions_of, observations_of
from lockstep.core.types import Observations, Task
from lockstep.envs.batch_env import BatchEnv

Array = np.ndarray[Any, Any]


class Sb3Env(VecEnv):
    """The envs, in numpy on the host, as the library has it; it sees the observation group ``actor`` alone.

    Of the infos only those of ended episodes say anything: the last observation, and whether time alone was up. Where
    the envs are on the CPU, observations share their memory.

    Args:
        env: steps the envs.
    """

    def __init__(self, env: BatchEnv) -> None:
        self.env = env
        self._silence: list[dict[str, Any]] = [{}] * env.num_envs
        self._actions = torch.zeros(())
        super().__init__(env.num_envs, *spaces_of(env.task))

    def reset(self) -> Array:
        """Return the observations as they are: the envs are ready, and episodes last from iteration to iteration."""
        return self._seen(self.env.observations)

    def step_async(self, actions: Array) -> None:
        """Take the next actions, ``(num_envs, size)`` floats or ``(num_envs,)`` integers."""
        tensor = torch.from_numpy(np.ascontiguousarray(actions)).to(self.env.device)
        self._actions = tensor.to(self.env.dtype) if tensor.is_floating_point() else tensor

    def step_wait(self) -> tuple[Array, Array, Array, list[dict[str, Any]]]:
        """Return observations, rewards and dones, each ``(num_envs, ...)``, and the infos."""
        transition = self.env.step(self._actions)
        done, truncated = transition.done.cpu().numpy(), transition.truncated.cpu().numpy()
        infos = self._silence
        if done.any():
            infos, final = infos.copy(), self._seen(transition.final_observations)
            for row in done.nonzero()[0]:
                infos[row] = {"terminal_observation": final[row], "TimeLimit.truncated": bool(truncated[row])}
        # A copy: the library adds to rewards what is still to come after a time limit.
        return self._seen(transition.observations), transition.reward.cpu().numpy().copy(), done, infos

    def close(self) -> None:
        """Leave the envs to their owner."""

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        """Return an attribute of every env; there are none but ``render_mode``."""
        if attr_name == "render_mode":
            return [None] * self.num_envs
        raise AttributeError(attr_name)

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        """Refuse: envs are one batch."""
        raise AttributeError(attr_name)

    def env_method(self, method_name: str, *method_args: Any, indices: Any = None, **method_kwargs: Any) -> list[Any]:
        """Refuse: envs are one batch."""
        raise AttributeError(method_name)

    def env_is_wrapped(self, wrapper_class: type, indices: Any = None) -> list[bool]:
        """Return that no env is wrapped in anything."""
        return [False] * self.num_envs

    def seed(self, seed: int | None = None) -> Sequence[None]:
        """Leave the seeds as they are: each env has a stream of its own."""
        return [None] * self.num_envs

    def _seen(self, observations: Observations) -> Array:
        seen: Array = observations["actor"].to("cpu", torch.float32).numpy()
        return seen


def spaces_of(task: Task) -> tuple[spaces.Space[Any], spaces.Space[Any]]:
    """Return the spaces of observations and of actions; the library wants finite bounds where a task has none."""
    actions = task.action_space
    finite = replace(actions, limit=min(actions.limit, float(np.finfo(np.float32).max)))
    return observations_of(task.num_observations["actor"]), actions_of(finite)
