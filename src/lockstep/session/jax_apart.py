"""A JAX process that trains by itself, beside the training of all: what its ranks need without the others.

An iteration is one compiled program, and a rank has its result when all have theirs, so from outside nobody sees how
long a process computes and how long it waits for the others. Here it has its own ranks' share of the envs on a mesh of
its own devices: the same networks and minibatches, exchanges among its own devices only.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import jax

from lockstep.core.config import merge
from lockstep.distributed.cores import threads_per_rank
from lockstep.distributed.jax_comm import JaxComm, OwnStore
from lockstep.distributed.jax_mesh import make_mesh
from lockstep.learn.config import SacConfig
from lockstep.learn.jax.loop import JaxRunner
from lockstep.session.framework import Learner, Team
from lockstep.session.jax_envs import build_env, platform_of

if TYPE_CHECKING:
    from lockstep.distributed.jax_mesh import RankMesh
    from lockstep.learn.config import AgentConfig, TrainConfig
    from lockstep.learn.jax.algorithm import Algorithm

MAX_THREADS = 1024  # that the setting takes


def make_apart(
    config: TrainConfig, team: Team, resources: ExitStack, algorithm_class: type[Algorithm]
) -> Learner | None:
    """Return the training of this process alone; None if there are no others. It is closed with ``resources``."""
    ranks: RankMesh = team.mesh
    if not ranks.is_multiprocess:
        return None
    mesh = make_mesh([ranks.mesh.devices.flat[rank] for rank in ranks.local_ranks])
    alone = share_of(config, ranks)
    env = build_env(alone, platform_of(mesh), resources)
    comm = JaxComm(0, 1, mesh.num_ranks, OwnStore())
    return Learner(JaxRunner(alone, algorithm_class, env, None, mesh, comm), env.engine)


def share_of(config: TrainConfig, ranks: RankMesh) -> TrainConfig:
    """Return the config of a training on this process's ranks alone, which does their part of an iteration.

    Each rank has its own envs, without the padding that it steps in the training of all where another has more: this is
    how long its share takes. A process without envs gets as few as can train, since no training has none.
    """
    shares = config.envs_by_rank(ranks.num_ranks)
    total = sum(shares)
    own = [shares[rank] for rank in ranks.local_ranks]
    if not any(own):
        own[0] = config.agent.env_block(total)
    changes: dict[str, Any] = {"num_envs": own, "evaluation": {"interval": 0}}
    if config.env.takes_physics_threads:
        changes["env"] = {"num_physics_threads": _num_physics_threads(config, ranks)}
    changes["agent"] = _agent_changes(config.agent, sum(own), total)
    return merge(config, changes)


def _agent_changes(agent: AgentConfig, own_envs: int, total_envs: int) -> dict[str, int]:
    """Return those settings that count samples of all ranks, for so many of all envs."""
    if not isinstance(agent, SacConfig):
        return {}
    return {
        # Whole, since a share of the envs is one of whole blocks, each of which gives one sample.
        "batch_size": agent.batch_size * own_envs // total_envs,
        "replay_size": agent.capacity_per_env(total_envs) * own_envs,
        "learning_starts": -(-agent.learning_starts * own_envs // total_envs),  # in the same iteration
    }


def _num_physics_threads(config: TrainConfig, ranks: RankMesh) -> int:
    """Return the setting by which each engine gets as many threads here as in the training of all.

    Engines share a process's threads by the devices of the mesh over all processes of the job, which is how many there
    are in a process only where the mesh is that of all.
    """
    num_processes = int(jax.process_count())
    threads = config.env.num_physics_threads or threads_per_rank()
    per_engine = max(1, threads // max(1, ranks.num_ranks // num_processes))
    return min(MAX_THREADS, per_engine * max(1, len(ranks.local_ranks) // num_processes))
