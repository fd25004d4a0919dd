"""Small trainings by rl_games' learner that its tests share."""

from typing import Any

import torch

from lockstep.core.config import merge
from lockstep.core.registry import load
from lockstep.core.types import Comm
from lockstep.distributed.torch_comm import SoloComm
from lockstep.learn.config import TrainConfig
from lockstep.learn.torch.guest import GuestTraining
from lockstep.recipes.catalog import TASKS
from lockstep.session.make_env import build_share

LEARNER = "lockstep.adapters.rl_games.learner:RlGamesLearner"


def config_with(task: str = "cartpole_balance", **settings: Any) -> TrainConfig:
    """Return the recipe of a task shrunk to milliseconds per iteration; ``agent`` etc. are merged."""
    agent = {"actor_hidden_dims": (8,), "critic_hidden_dims": (8,), "recurrent_hidden_dim": 6, "num_steps_per_env": 6}
    agent |= {"num_learning_epochs": 2, "num_mini_batches": 2} | settings.pop("agent", {})
    base = {"num_envs": 8, "device": "cpu", "rl_library": "rl_games", "env": {"num_physics_threads": 1}}
    if task == "cartpole_classic":
        del base["env"]
    recipe: TrainConfig = load(TASKS.get(task).recipe)()
    return merge(recipe, base | {"agent": agent} | settings)


def training_of(config: TrainConfig, comm: Comm | None = None, env: Any = None) -> Any:
    """Return a new training; the envs default to those of the config. Small tensors gain nothing from threads."""
    torch.set_num_threads(1)
    comm = comm or SoloComm()
    if env is None:
        env = build_share(config, config.envs_by_rank(comm.world_size), comm.rank)
    return GuestTraining(LEARNER, config, env, comm)
