"""lockstep's side: the training that ``lockstep train`` runs, without its run directory."""

from collections.abc import Iterator
from importlib.metadata import version

import torch
from torch import nn
from workload import Workload

from lockstep.core.config import merge
from lockstep.core.registry import load
from lockstep.distributed.torch_comm import SoloComm
from lockstep.learn.torch.training import Training
from lockstep.recipes.catalog import TASKS
from lockstep.session.make_env import build_env


class LockstepSide:
    def __init__(self, workload: Workload, env: str) -> None:
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
        settings = {"num_envs": workload.num_envs, "seed": workload.seed, "device": "cpu", "agent": agent}
        config = merge(load(TASKS.get("cartpole_classic").recipe)(), settings)
        self.training = Training(config, build_env(config), SoloComm())
        self.versions = {"lockstep": version("lockstep-rl"), "torch": torch.__version__}

    def iterate(self, num_iterations: int) -> None:
        for _ in range(num_iterations):
            self.training.iterate()

    def num_optimizer_steps(self) -> int:
        states = self.training.learner.optimizer.state.values()
        return int(next(iter(states))["step"])

    def num_env_steps(self) -> int:
        return self.training.env_steps

    def mean_episode_length(self) -> float:
        done = self.training.rollout.done
        return done.numel() / max(1, int(done.sum()))

    def first_layers(self) -> dict[str, nn.Module]:
        policy = self.training.policy
        return {name: next(_linear_layers(getattr(policy, name))) for name in ("actor", "critic")}

    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.training.policy.parameters())


def _linear_layers(module: nn.Module) -> Iterator[nn.Linear]:
    return (layer for layer in module.modules() if isinstance(layer, nn.Linear))
