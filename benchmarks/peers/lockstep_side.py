"""lockstep's side with torch: the training that ``lockstep train`` runs, without its run directory."""

from importlib.metadata import version
from typing import Any

import torch
from torch_work import num_steps, work_of_iteration
from workload import NUM_EVALUATION_EPISODES, Workload

from lockstep.core.config import merge
from lockstep.core.registry import load
from lockstep.distributed.torch_comm import SoloComm
from lockstep.learn.config import TrainConfig
from lockstep.learn.torch.evaluation import evaluate
from lockstep.learn.torch.training import Training
from lockstep.recipes.catalog import TASKS
from lockstep.session.make_env import build_env


def make_config(workload: Workload, **settings: Any) -> TrainConfig:
    """Return lockstep's config of the workload."""
    agent = {
        "num_steps_per_env": workload.num_steps_per_env,
        "num_learning_epochs": workload.num_learning_epochs,
        "num_mini_batches": workload.num_mini_batches,
        "actor_hidden_dims": workload.hidden_dims,
        "critic_hidden_dims": workload.hidden_dims,
        "normalize_observations": workload.normalize_observations,
        "learning_rate": workload.learning_rate,
        "desired_kl": workload.desired_kl,
        "use_clipped_value_loss": True,  # as rsl_rl does by default
    }
    common = {"num_envs": workload.num_envs, "seed": workload.seed, "device": "cpu", "agent": agent}
    return merge(load(TASKS.get("cartpole_classic").recipe)(), common | settings)


class LockstepSide:
    def __init__(self, workload: Workload) -> None:
        config = make_config(workload)
        self.training = Training(config, build_env(config), SoloComm())
        self.evaluation_env = build_env(config, num_envs=NUM_EVALUATION_EPISODES, streams="evaluation")
        self.versions = {"lockstep": version("lockstep-rl"), "torch": torch.__version__}

    def first_iteration(self) -> dict[str, Any]:
        return work_of_iteration(self, self.training.policy.parameters())

    def iterate(self, num_iterations: int) -> None:
        for _ in range(num_iterations):
            self.training.iterate()

    def num_optimizer_steps(self) -> int:
        return num_steps(self.training.learner.optimizer)

    def num_env_steps(self) -> int:
        return self.training.env_steps

    def evaluate(self) -> float:
        with torch.inference_mode():
            return float(evaluate(self.training.policy, self.evaluation_env).lengths.double().mean())
