"""Stable-Baselines3's side: its PPO with its ``VecNormalize``, on a vectorised env in numpy, its fastest way."""

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import gymnasium
import numpy as np
import torch
from lean_numpy_env import Array, LeanNumpyCartpole
from lean_torch_env import NUM_ACTIONS, NUM_OBSERVATIONS, mean_episode_length
from stable_baselines3 import PPO
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.vec_env import VecEnv, VecNormalize
from torch import nn
from torch_work import num_steps, trained, work_of_iteration
from workload import Workload


class LeanVecEnv(VecEnv):
    """The lean cart-pole; the library clips the actions.

    Of the infos, only those of episodes that ran out of time say anything; the others are one empty dictionary.
    """

    def __init__(self, num_envs: int, seed: int) -> None:
        self.lean = LeanNumpyCartpole(num_envs, seed)
        self._silence: list[dict[str, Any]] = [{}] * num_envs
        super().__init__(
            num_envs,
            gymnasium.spaces.Box(-np.inf, np.inf, (NUM_OBSERVATIONS,), dtype=np.float32),
            gymnasium.spaces.Box(-1.0, 1.0, (NUM_ACTIONS,), dtype=np.float32),
        )

    def reset(self) -> Array:
        return self.lean.observations

    def step_async(self, actions: Array) -> None:
        self._actions = actions

    def step_wait(self) -> tuple[Array, Array, Array, list[dict[str, Any]]]:
        done, late, last_seen = self.lean.step(self._actions)
        infos = self._silence
        if len(late):
            infos = infos.copy()
            for env, observation in zip(late, last_seen, strict=True):
                infos[env] = {"terminal_observation": observation, "TimeLimit.truncated": True}
        rewards = np.ones(self.num_envs, dtype=np.float32)  # anew: PPO adds what it expects after a time limit
        return self.lean.observations, rewards, done, infos

    def close(self) -> None:
        pass

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        if attr_name == "render_mode":
            return [None] * self.num_envs
        raise AttributeError(attr_name)

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        raise AttributeError(attr_name)

    def env_method(self, method_name: str, *args: Any, indices: Any = None, **named: Any) -> list[Any]:
        raise AttributeError(method_name)

    def env_is_wrapped(self, wrapper_class: type, indices: Any = None) -> Sequence[bool]:
        return [False] * self.num_envs


class Sb3Side:
    def __init__(self, workload: Workload, *, compiled: bool = False) -> None:
        self.workload, self._compiled = workload, compiled
        env = LeanVecEnv(workload.num_envs, workload.seed)
        self.lean = env.lean
        self.model = PPO(
            "MlpPolicy",
            VecNormalize(env, norm_reward=False) if workload.normalize_observations else env,
            n_steps=workload.num_steps_per_env,
            batch_size=workload.samples_per_iteration // workload.num_mini_batches,
            n_epochs=workload.num_learning_epochs,
            learning_rate=workload.learning_rate,
            clip_range_vf=0.2,
            vf_coef=1.0,
            max_grad_norm=1.0,
            policy_kwargs={
                "net_arch": {"pi": list(workload.hidden_dims), "vf": list(workload.hidden_dims)},
                "activation_fn": nn.ELU,
                "optimizer_kwargs": {"fused": True, "eps": 1e-5},  # fused as in lockstep; eps is its own default
            },
            seed=workload.seed,
            device="cpu",
        )
        self.model.set_logger(Logger(folder=None, output_formats=[]))
        self._compile(compiled)
        self.versions = {"stable_baselines3": version("stable_baselines3"), "torch": torch.__version__}

    def first_iteration(self) -> dict[str, Any]:
        self._compile(False)  # what is compiled can't be counted
        work = work_of_iteration(self, trained(self.model.policy.optimizer))
        self._compile(self._compiled)
        return work

    def _compile(self, compiled: bool) -> None:
        # Both ways of PPO into its policy; ``model.policy = torch.compile(model.policy)`` covers one of them.
        policy = self.model.policy
        for name in ("forward", "evaluate_actions"):
            plain = getattr(type(policy), name).__get__(policy)
            setattr(policy, name, torch.compile(plain) if compiled else plain)

    def iterate(self, num_iterations: int) -> None:
        num_samples = num_iterations * self.workload.samples_per_iteration
        self.model.learn(num_samples, log_interval=None, reset_num_timesteps=False)

    def num_optimizer_steps(self) -> int:
        return num_steps(self.model.policy.optimizer)

    def num_env_steps(self) -> int:
        return self.lean.num_steps * self.lean.num_envs

    def evaluate(self) -> float:
        normalizer = self.model.get_vec_normalize_env()

        def most_likely(observations: torch.Tensor) -> torch.Tensor:
            seen = observations.numpy() if normalizer is None else normalizer.normalize_obs(observations.numpy())
            return torch.from_numpy(self.model.predict(seen, deterministic=True)[0])

        return mean_episode_length(most_likely)
