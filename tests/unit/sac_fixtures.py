"""Soft actor-critic on so many CPU devices, small enough for tests."""

from typing import Any, NamedTuple

import jax
import numpy

from lockstep.core.config import merge
from lockstep.distributed.jax_mesh import REPLICATED, SHARDED, RankMesh, make_mesh
from lockstep.envs.jax_env import JaxEnv
from lockstep.learn.config import TrainConfig
from lockstep.learn.jax.algorithm import TrainState
from lockstep.learn.jax.sac import Sac
from lockstep.learn.jax.training import pad_ids
from lockstep.recipes.catalog import make_task
from lockstep.session.make_config import make_config
from lockstep.sim.analytic import make_pure_engine

STATE = TrainState(REPLICATED, SHARDED)
SMALL_AGENT = {
    "num_steps_per_env": 4,
    "num_updates": 3,
    "batch_size": 32,
    "replay_size": 256,
    "learning_starts": 200,
    "actor_hidden_dims": (16,),
    "critic_hidden_dims": (16,),
}


def small_config(agent: dict[str, Any] | None = None, **settings: Any) -> TrainConfig:
    """Return a config of cartpole_classic whose iterations take milliseconds; in float64 with 16 envs of one rank."""
    small = {"num_envs": 16, "dtype": "float64", "env": {"max_episode_steps": 12}}
    config = make_config("cartpole_classic", algorithm="sac", agent=SMALL_AGENT | (agent or {}))
    return merge(config, small | settings)


def make_env(config: TrainConfig, streams: str = "train") -> JaxEnv:
    task = make_task(config)
    env_config = config.env.model_copy(update={"randomize_initial_episode_length": streams == "train"})
    dtype = numpy.dtype("float64" if config.dtype == "float64" else "float32")
    engine = make_pure_engine(task, decimation=config.env.decimation, dtype=dtype)
    return JaxEnv(task, engine, env_config, seed=config.seed, dtype=dtype, streams=streams)


class Run(NamedTuple):
    """What a few iterations gave."""

    metrics: list[dict[str, numpy.ndarray]]  # of each iteration
    states: list[TrainState]  # after setup and after each iteration: whole arrays on the host
    ranks: RankMesh
    algorithm: Sac


def run(config: TrainConfig, num_devices: int = 1, num_iterations: int = 1, kind: type[Sac] = Sac) -> Run:
    """Train on so many devices, with the states kept for comparison."""
    ranks = make_mesh(jax.devices()[:num_devices])
    algorithm = kind(config, make_env(config), make_env(config, "eval"))
    key = jax.random.key(config.seed)
    ids = ranks.shard(pad_ids(config.envs_by_rank(num_devices)))
    state = ranks.compile(lambda own_ids: algorithm.setup(key, own_ids), (SHARDED,), STATE)(ids)
    step = ranks.compile(algorithm.step, (STATE,), (STATE, REPLICATED))
    found = Run([], [on_host(ranks, state)], ranks, algorithm)
    for _ in range(num_iterations):
        state, metrics = step(state)
        found.metrics.append(ranks.to_host(metrics))
        found.states.append(on_host(ranks, state))
    return found


def on_host(ranks: RankMesh, state: TrainState) -> TrainState:
    return TrainState(ranks.to_host(state.replicated), ranks.unshard(state.sharded))


def largest_difference(one: Any, other: Any) -> float:
    """Return the largest difference of two trees of the same numbers."""
    differences = jax.tree.map(
        lambda a, b: float(numpy.abs(numpy.asarray(a, float) - numpy.asarray(b, float)).max(initial=0.0)), one, other
    )
    return float(max(jax.tree.leaves(differences)))
