"""What a start builds with JAX, phase by phase: what ``JaxFramework.make_learner`` makes in one go."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from lockstep.benchmark.startup.clock import Built, PhaseClock, time_engine
from lockstep.distributed.jax_mesh import SHARDED
from lockstep.recipes.catalog import TASKS, engines_of
from lockstep.session.jax_envs import PURE_ENGINES, build_env, check_room, platform_of
from lockstep.session.jax_session import make_runner
from lockstep.session.make_env import ENGINES

if TYPE_CHECKING:
    import numpy as np

    from lockstep.distributed.jax_comm import JaxComm
    from lockstep.distributed.jax_mesh import RankMesh
    from lockstep.envs.jax_env import JaxEnv
    from lockstep.learn.config import TrainConfig
    from lockstep.session.framework import Team


def build(config: TrainConfig, team: Team, resources: ExitStack, clock: PhaseClock) -> Built:
    """Build the envs, once for all devices of this process, and the training on the mesh.

    Args:
        config: of the training.
        team: those who train together.
        resources: the engine is closed with them.
        clock: is told of the phases.
    """
    ranks: RankMesh = team.mesh
    comm: JaxComm = team.comm  # type: ignore[assignment]  # that JAX's framework has made
    platform = platform_of(ranks)
    name: str = config.engine
    if name == "auto":
        name = engines_of(config.task, "jax", on_gpu=platform != "cpu")[0]
    suite = TASKS.get(config.task).suite
    time_engine(clock, PURE_ENGINES.get(name) if suite is None else suite.make_env)
    if name in ENGINES:  # which may step on the host what it shows to JAX
        time_engine(clock, ENGINES.get(name))
    env = build_env(config, platform, resources)
    check_room(config, env, ranks)
    evaluation_env = None
    if config.evaluation.interval:
        evaluation_env = build_env(config, platform, resources, "evaluation", env.task)
    clock.enter("learner")
    runner = make_runner(config, env, evaluation_env, ranks, comm)

    def step() -> None:
        _step(env, ranks, runner.env_ids, enable_jit=config.enable_jit)

    return Built(runner, None, ranks.local_ranks, step, step_is_apart=True)


def _step(env: JaxEnv, ranks: RankMesh, env_ids: np.ndarray, *, enable_jit: bool) -> None:
    """Start every env and step it once under a zero action, in a program that does nothing else.

    Args:
        env: steps them.
        ranks: that have them.
        env_ids: ``(num_ranks * largest share,)`` int32 global ids, -1 for padding.
        enable_jit: whether it is compiled.
    """
    space = env.task.action_space

    def one_step(env_ids: jax.Array) -> Any:
        state = env.reset(env_ids)
        noise = jax.tree.map(lambda table: table[0], env.noise(env_ids, 1, 1))
        zeros = jnp.where(env_ids < -1, 1, 0)  # different on every rank, as far as JAX can know
        if space.kind == "continuous":
            action = jnp.broadcast_to(zeros[:, None].astype(env.dtype), (zeros.shape[0], space.size))
        else:
            action = zeros.astype(jnp.int32)
        after, transition = env.step(state, action, noise)
        return after, transition.reward

    program = ranks.compile(one_step, (SHARDED,), SHARDED, enable_jit=enable_jit)
    jax.block_until_ready(program(ranks.shard(env_ids)))
