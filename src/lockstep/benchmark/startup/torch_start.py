"""What a start builds with torch, phase by phase: what ``TorchFramework.make_learner`` makes in one go."""

from __future__ import annotations

from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

import torch

from lockstep.benchmark.startup.clock import Built, PhaseClock, time_engine
from lockstep.learn.config import split_evenly
from lockstep.recipes.catalog import TASKS
from lockstep.session.make_env import ENGINES, build_share
from lockstep.session.runner import make_runner

if TYPE_CHECKING:
    from lockstep.core.types import Comm
    from lockstep.envs.batch_env import BatchEnv
    from lockstep.learn.config import TrainConfig
    from lockstep.session.framework import Team


def build(config: TrainConfig, team: Team, resources: ExitStack, clock: PhaseClock) -> Built:
    """Build this rank's envs and its learner.

    Args:
        config: of the training.
        team: those who train together.
        resources: the envs are closed with them.
        clock: is told of the phases.
    """
    comm: Comm = team.comm  # type: ignore[assignment]  # that torch has made
    entry = TASKS.get(config.task)
    engine = entry.engines[0] if config.engine == "auto" else config.engine
    time_engine(clock, ENGINES.get(engine) if entry.suite is None else entry.suite.make_env)
    env = resources.enter_context(closing(build_share(config, config.envs_by_rank(comm.world_size), comm.rank)))
    evaluation_env = None
    if config.evaluation.interval:
        shares = split_evenly(config.evaluation.num_episodes, comm.world_size)
        share = build_share(config, shares, comm.rank, "evaluation", env.task)
        evaluation_env = resources.enter_context(closing(share))
    clock.enter("learner")
    return Built(make_runner(config, env, comm), evaluation_env, (comm.rank,), lambda: _step(env), step_is_apart=False)


def _step(env: BatchEnv) -> None:
    """Step every env under a zero action, which leaves all random streams as they are."""
    space = env.task.action_space
    if space.kind == "continuous":
        action = torch.zeros((env.num_envs, space.size), dtype=env.dtype, device=env.device)
    else:
        action = torch.zeros(env.num_envs, dtype=torch.int64, device=env.device)
    with torch.no_grad():
        env.step(action)
    if env.device.type == "cuda":
        torch.cuda.synchronize(env.device)
