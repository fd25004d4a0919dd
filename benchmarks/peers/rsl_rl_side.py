"""rsl_rl's side: its runner, as its documentation sets it up, with what costs time and is not training turned off."""

from dataclasses import replace
from importlib.metadata import version
from typing import Any

import torch
from rsl_rl.runners import OnPolicyRunner
from rsl_rl_envs import ENVS, LeanEnv
from torch_work import matrix_gflops
from workload import NUM_EVALUATION_EPISODES, Workload


class RslRlSide:
    def __init__(self, workload: Workload, env: str) -> None:
        torch.manual_seed(workload.seed)
        self.env = ENVS[env](workload)
        self.evaluation_workload = replace(workload, num_envs=NUM_EVALUATION_EPISODES)
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

    def first_iteration(self) -> dict[str, Any]:
        gflops = matrix_gflops(lambda: self.iterate(1))
        groups = self.runner.alg.optimizer.param_groups
        return {
            "matrix_gflops": gflops,
            "optimizer_steps": self.num_optimizer_steps(),
            "env_steps": self.num_env_steps(),
            "parameters": sum(parameter.numel() for group in groups for parameter in group["params"]),
        }

    def iterate(self, num_iterations: int) -> None:
        self.runner.learn(num_iterations)

    def num_optimizer_steps(self) -> int:
        return int(next(iter(self.runner.alg.optimizer.state.values()))["step"])

    def num_env_steps(self) -> int:
        return self.env.num_steps * self.env.num_envs

    @torch.inference_mode()
    def evaluate(self) -> float:
        env = LeanEnv(self.evaluation_workload)
        policy = self.runner.get_inference_policy()
        env.episode_length_buf.zero_()
        lengths = torch.zeros(env.num_envs)
        running = torch.ones(env.num_envs, dtype=torch.bool)
        observations = env.get_observations()
        while running.any():
            observations, _, done, _ = env.step(policy(observations))
            lengths += running
            running &= ~done
        self.runner.alg.train_mode()  # which the inference policy has left
        return float(lengths.mean())
