"""One training from a config to a finished run directory."""

from __future__ import annotations

import sys
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.core.allocator import keep_large_buffers
from lockstep.core.config import to_yaml
from lockstep.core.environment import allowed_cores, describe
from lockstep.core.errors import UsageError
from lockstep.core.files import write_atomic
from lockstep.core.interrupts import watch
from lockstep.core.metrics import require_logger
from lockstep.core.progress import Progress
from lockstep.core.run_directory import RunDirectory, checkpoints_of
from lockstep.distributed.topology import Topology, from_environment, require_one_process
from lockstep.recipes.catalog import check_offered
from lockstep.session.make_env import build_env
from lockstep.session.observer import RunObserver

if TYPE_CHECKING:
    from lockstep.envs.torch_env import TorchEnv
    from lockstep.learn.config import TrainConfig
    from lockstep.learn.torch.training import Training

SMALL_WIDTH = 128
EXIT_CODES = {"finished": 0, "preempted": 75, "interrupted": 130}


@dataclass(frozen=True)
class Outcome:
    """How a training ended."""

    run_path: Path
    status: str
    """``finished``, ``interrupted`` (Ctrl-C) or ``preempted`` (SIGTERM or SIGUSR1), the latter two after saving."""

    @property
    def exit_code(self) -> int:
        """What the command line returns."""
        return EXIT_CODES[self.status]


def train(config: TrainConfig, checkpoint: Path | None = None, resume: Path | None = None) -> Outcome:
    """Train one policy.

    Args:
        config: everything that determines the training.
        checkpoint: start a new run at iteration 0 from these weights.
        resume: continue the run in this directory, in place.

    Raises:
        UsageError: whatever can't work, found before anything is written.
        RunError: the training failed; ``progress.json`` says why.
    """
    topology = _check(config, checkpoint, resume)
    _prepare_process(config)
    from lockstep.learn.torch import loop

    with ExitStack() as resources:
        env = resources.enter_context(closing(build_env(config)))
        evaluation_env = None
        if config.evaluation.interval:
            episodes = build_env(config, num_envs=config.evaluation.num_episodes, streams="evaluation")
            evaluation_env = resources.enter_context(closing(episodes))
        training = _take_up(config, env, checkpoint, resume)
        run = resources.enter_context(closing(_open_run(config, env, topology, resume)))
        env.engine.log_to(run.mujoco_log_path)
        log = resources.enter_context(run.rank_log(topology.rank))
        request = resources.enter_context(watch())
        progress = resources.enter_context(Progress(config.task, run.path, log))
        observer = resources.enter_context(RunObserver(config, run, progress, request, training.iteration))
        status = loop.train(training, observer, evaluation_env)
        observer.finish(status)
    return Outcome(run.path, status)


def _check(config: TrainConfig, checkpoint: Path | None, resume: Path | None) -> Topology:
    if checkpoint is not None and resume is not None:
        raise UsageError("checkpoint and resume exclude each other: one starts a new run, the other continues one")
    check_offered(config)
    topology = from_environment()
    require_one_process(topology)
    require_logger(config.logger)
    return topology


def _prepare_process(config: TrainConfig) -> None:
    import torch

    keep_large_buffers()
    agent = config.agent
    widths = (*agent.actor_hidden_dims, *agent.critic_hidden_dims, agent.recurrent_hidden_dim)
    # Threads that wait for one another after every small layer gain nothing, and lose much on a busy machine.
    automatic = 1 if max(widths) <= SMALL_WIDTH else allowed_cores()
    torch.set_num_threads(config.num_threads or automatic)


def _take_up(config: TrainConfig, env: TorchEnv, checkpoint: Path | None, resume: Path | None) -> Training:
    """Return the training at the point where it starts or goes on; nothing is written."""
    from lockstep.distributed.torch_comm import SoloComm
    from lockstep.learn.torch.checkpoint import load
    from lockstep.learn.torch.training import Training

    training = Training(config, env, SoloComm())
    if checkpoint is not None:
        training.load_policy(load(checkpoint), checkpoint)
    for path in checkpoints_of(resume) if resume is not None else []:
        try:
            content = load(path)
        except UsageError as error:
            # The one before it is whole: a resumed run loses some iterations rather than everything.
            print(f"lockstep: warning: {error}", file=sys.stderr)  # noqa: T201
            continue
        training.load_state_dict(content, path)
        break
    # A run that was stopped before its first checkpoint starts again from its config.
    return training


def _open_run(config: TrainConfig, env: TorchEnv, topology: Topology, resume: Path | None) -> RunDirectory:
    if resume is not None:
        run = RunDirectory.open(resume)
        write_atomic(run.config_path, to_yaml(config))
        return run
    ranks = [{"rank": topology.rank, "device": str(env.device)}]
    run_info = describe() | {"seed": config.seed, "world_size": topology.world_size, "ranks": ranks}
    return RunDirectory.create(
        config.log_root, config.task, config.run_name, to_yaml(config), run_info, config.max_iterations
    )
