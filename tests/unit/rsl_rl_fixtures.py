"""Small trainings by RSL-RL's learners, on one rank or on several."""

from typing import Any

import torch

from lockstep.adapters.rsl_rl.learner import RslRlLearner
from lockstep.core.types import Comm
from lockstep.distributed.torch_comm import SoloComm
from lockstep.learn.config import TrainConfig
from lockstep.learn.torch.guest import GuestTraining
from lockstep.session.make_config import make_config
from lockstep.session.make_env import build_share
from tests.unit.learner_fixtures import Line, toy_env

LEARNER = "lockstep.adapters.rsl_rl.learner:RslRlLearner"
MEMORY = {"recurrent": "gru", "recurrent_hidden_dim": 8}


def config_with(agent: dict[str, Any] | None = None, **settings: Any) -> TrainConfig:
    """Return the config of a training of milliseconds on ``cartpole_classic``."""
    small = {"actor_hidden_dims": (8,), "num_steps_per_env": 6}
    if settings.get("algorithm", "ppo") == "ppo":
        small |= {"critic_hidden_dims": (8,), "num_learning_epochs": 2, "num_mini_batches": 2}
    else:
        small |= {"gradient_length": 3}
    base = {"rl_library": "rsl_rl", "device": "cpu", "num_envs": 8}
    return make_config("cartpole_classic", **base | settings, agent=small | (agent or {}))


def training_of(config: TrainConfig, comm: Comm | None = None) -> GuestTraining:
    """Return this rank's part of a training."""
    torch.set_num_threads(1)
    comm = SoloComm() if comm is None else comm
    return GuestTraining(LEARNER, config, build_share(config, config.envs_by_rank(comm.world_size), comm.rank), comm)


def learner_on_line(agent: dict[str, Any] | None = None, num_envs: int = 4, **settings: Any) -> RslRlLearner:
    """Return a learner on the toy whose rewards are known, with a time limit of 3 steps."""
    env = toy_env(Line(), num_envs, max_episode_steps=3, dtype=torch.float32)
    return RslRlLearner(config_with(agent, num_envs=num_envs, **settings), env, SoloComm())


def equal_states(one: GuestTraining, other: GuestTraining) -> bool:
    """Return whether everything that ranks have in common is the same in two trainings, bit for bit."""
    mine, theirs = one.replicated_state(), other.replicated_state()
    return mine.keys() == theirs.keys() and all(mine[name].equal(theirs[name]) for name in mine)
