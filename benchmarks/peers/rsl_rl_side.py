"""rsl_rl's side: its runner, as its documentation sets it up, with what costs time and is not training turned off."""

from importlib.metadata import version
from typing import Any

import torch
from lean_torch_env import mean_episode_length
from rsl_rl.runners import OnPolicyRunner
from rsl_rl_envs import ENVS
from tensordict import TensorDict
from torch_work import num_steps, trained, work_of_iteration
from workload import Workload


class RslRlSide:
    def __init__(self, workload: Workload, *, env: str = "lean", compiled: bool = False) -> None:
        self._compile_mode = "default" if compiled else None
        torch.manual_seed(workload.seed)
        self.env = ENVS[env](workload)
        network = {
            "class_name": "MLPModel",
            "hidden_dims": list(workload.hidden_dims),
            "activation": "elu",
            "obs_normalization": workload.normalize_observations,
        }
        settings = {
            "num_steps_per_env": workload.num_steps_per_env,
            "save_interval": 10**9,
            "check_for_nan": False,  # each of its looks at the device costs time
            "obs_groups": {"actor": ["policy"], "critic": ["policy"]},
            "algorithm": {
                "class_name": "PPO",
                "num_learning_epochs": workload.num_learning_epochs,
                "num_mini_batches": workload.num_mini_batches,
                "entropy_coef": 0.0,
                "learning_rate": workload.learning_rate,
                "schedule": "adaptive",
                "desired_kl": workload.desired_kl,
            },
            "torch_compile_mode": self._compile_mode,
            "actor": network | {"distribution_cfg": {"class_name": "GaussianDistribution", "std_type": "log"}},
            "critic": network,
        }
        # Without a log folder nothing is logged and no episode statistics are kept.
        self.runner = OnPolicyRunner(self.env, settings, log_dir=None, device="cpu")
        self.versions = {"rsl_rl": version("rsl-rl-lib"), "torch": torch.__version__}

    def first_iteration(self) -> dict[str, Any]:
        self.runner.alg.compile(None)  # what is compiled can't be counted
        work = work_of_iteration(self, trained(self.runner.alg.optimizer))
        self.runner.alg.compile(self._compile_mode)
        return work

    def iterate(self, num_iterations: int) -> None:
        self.runner.learn(num_iterations)

    def num_optimizer_steps(self) -> int:
        return num_steps(self.runner.alg.optimizer)

    def num_env_steps(self) -> int:
        return self.env.num_steps * self.env.num_envs

    @torch.inference_mode()
    def evaluate(self) -> float:
        policy = self.runner.get_inference_policy()
        length = mean_episode_length(lambda observations: policy(TensorDict({"policy": observations})))
        self.runner.alg.train_mode()  # which the inference policy has left
        return length
