"""Small trainings by skrl's agents with torch that its tests share."""

from typing import Any

import torch

from lockstep.core.config import merge
from lockstep.core.types import Comm
from lockstep.distributed.torch_comm import SoloComm
from lockstep.learn.agent_config import PpoConfig, ReplayConfig
from lockstep.learn.config import TrainConfig
from lockstep.learn.torch.guest import GuestTraining
from lockstep.recipes.catalog import recipe_of
from lockstep.session.make_env import build_share

LEARNER = "lockstep.adapters.skrl.torch_learner:SkrlLearner"
DISCRETE: dict[str, Any] = {"task": "cartpole_classic", "env": {"action_kind": "discrete"}}


def config_with(task: str = "cartpole_balance", **settings: Any) -> TrainConfig:
    """Return the recipe of a task shrunk to milliseconds per iteration; ``agent`` etc. are merged."""
    recipe = recipe_of(task, settings.get("algorithm", "ppo"))
    agent: dict[str, Any] = {"actor_hidden_dims": (8,), "critic_hidden_dims": (8,), "num_steps_per_env": 6}
    if isinstance(recipe.agent, PpoConfig):
        agent |= {"num_learning_epochs": 2, "num_mini_batches": 2}
    if isinstance(recipe.agent, ReplayConfig):
        agent |= {"num_updates": 2, "batch_size": 24, "replay_size": 24 * 20, "learning_starts": 200}
    if settings.get("algorithm") in ("dqn", "ddqn", "cem"):
        del agent["critic_hidden_dims"]
    agent |= settings.pop("agent", {})
    env = ({"num_physics_threads": 1} if task == "cartpole_balance" else {}) | settings.pop("env", {})
    base = {"num_envs": 8, "device": "cpu", "rl_library": "skrl", "ml_framework": "torch"}
    return merge(recipe, base | {"agent": agent, "env": env} | settings)


def training_of(config: TrainConfig, comm: Comm | None = None, env: Any = None) -> Any:
    """Return a new training; the envs default to those of the config. Small tensors gain nothing from threads."""
    torch.set_num_threads(1)
    comm = comm or SoloComm()
    if env is None:
        env = build_share(config, config.envs_by_rank(comm.world_size), comm.rank)
    return GuestTraining(LEARNER, config, env, comm)
