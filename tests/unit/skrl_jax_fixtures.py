"""Trainings by skrl's agents on JAX, small enough that compiling takes most of their time."""

from contextlib import ExitStack
from typing import Any

import jax

from lockstep.core.types import Task
from lockstep.distributed.jax_comm import JaxComm, OwnStore
from lockstep.distributed.jax_mesh import RankMesh, make_mesh
from lockstep.learn.config import TrainConfig
from lockstep.learn.jax.guest import GuestTraining
from lockstep.session.jax_envs import build_env
from lockstep.session.make_config import make_config

LEARNER = "lockstep.adapters.skrl.jax_learner:SkrlLearner"
_SMALL = {"num_steps_per_env": 4, "actor_hidden_dims": (16,), "critic_hidden_dims": (16,)}
PPO: dict[str, Any] = {"agent": _SMALL | {"num_learning_epochs": 2, "num_mini_batches": 2, "desired_kl": 1e-3}}
SAC: dict[str, Any] = {
    "algorithm": "sac",
    "agent": _SMALL | {"num_updates": 2, "batch_size": 32, "replay_size": 1024, "learning_starts": 100},
}
"""16 envs of all ranks learn from the third iteration on."""


def config_with(**settings: Any) -> TrainConfig:
    """Return the config of a training of 16 envs, with some settings changed."""
    small = {"num_envs": 16, "max_iterations": 9, "logger": "none", "env": {"max_episode_steps": 20}}
    known = {"ml_framework": "jax", "rl_library": "skrl", "device": "cpu", "evaluation": {"interval": 0}}
    return make_config("cartpole_classic", **known | small | settings)


def training_of(
    config: TrainConfig,
    resources: ExitStack,
    *,
    task: Task | None = None,
    ranks: RankMesh | None = None,
    comm: JaxComm | None = None,
) -> GuestTraining:
    """Return a training, in this process alone if nothing else is said; to be made and run with types of 64 bits."""
    ranks = make_mesh(jax.local_devices()[:1]) if ranks is None else ranks
    comm = JaxComm(0, 1, 1, OwnStore()) if comm is None else comm
    env = build_env(config, "cpu", resources, task=task)
    evaluation_env = build_env(config, "cpu", resources, "evaluation") if config.evaluation.interval else None
    return GuestTraining(LEARNER, config, env, evaluation_env, ranks, comm)
