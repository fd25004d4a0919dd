"""rsl_rl's side: its runner, as its documentation sets it up, with what costs time and is not training turned off."""

from importlib.metadata import version

import torch
from rsl_rl.runners import OnPolicyRunner
from rsl_rl_envs import ENVS
from torch import nn
from workload import Workload


class RslRlSide:
    def __init__(self, workload: Workload, env: str) -> None:
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
            "actor": network | {"distribution_cfg": {"class_name": "GaussianDistribution", "std_type": "log"}},
            "critic": network,
        }
        # Without a log folder nothing is logged and no episode statistics are kept.
        self.runner = OnPolicyRunner(self.env, settings, log_dir=None, device="cpu")
        self.versions = {"rsl_rl": version("rsl-rl-lib"), "torch": torch.__version__}

    def iterate(self, num_iterations: int) -> None:
        self.runner.learn(num_iterations)

    def num_optimizer_steps(self) -> int:
        return int(next(iter(self.runner.alg.optimizer.state.values()))["step"])

    def num_env_steps(self) -> int:
        return self.env.num_steps * self.env.num_envs

    def mean_episode_length(self) -> float:
        dones = self.runner.alg.storage.dones
        return dones.numel() / max(1, int(dones.sum()))

    def first_layers(self) -> dict[str, nn.Module]:
        return {"actor": self.runner.alg.actor.mlp[0], "critic": self.runner.alg.critic.mlp[0]}

    def num_parameters(self) -> int:
        return sum(p.numel() for group in self.runner.alg.optimizer.param_groups for p in group["params"])
