"""One training from a config to a finished run directory."""

from __future__ import annotations

import sys
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lockstep.core.config import to_yaml
from lockstep.core.environment import describe
from lockstep.core.errors import UsageError
from lockstep.core.interrupts import EXIT_CODES, StopReason, watch
from lockstep.core.metrics import require_logger
from lockstep.core.progress import Progress
from lockstep.core.run_directory import RunDirectory
from lockstep.distributed.topology import Topology, from_environment, require_one_process
from lockstep.recipes.catalog import check_offered
from lockstep.session.make_env import build_env
from lockstep.session.observer import RunObserver
from lockstep.session.process import memory_errors_in_words, prepare

if TYPE_CHECKING:
    from lockstep.envs.torch_env import TorchEnv
    from lockstep.learn.config import TrainConfig
    from lockstep.learn.torch.training import Training


@dataclass(frozen=True)
class Outcome:
    """How a training ended."""

    run_path: Path
    status: Literal["finished"] | StopReason
    """``finished``, ``interrupted`` (Ctrl-C) or ``preempted`` (SIGTERM or SIGUSR1), the latter two after saving."""

    @property
    def exit_code(self) -> int:
        """What the command line returns."""
        return 0 if self.status == "finished" else EXIT_CODES[self.status]


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
    with ExitStack() as resources, memory_errors_in_words(config.num_envs):
        request = resources.enter_context(watch())  # from here on a signal loses nothing
        prepare(config)
        # A run that goes on is locked before anything is read from it.
        run = None if resume is None else resources.enter_context(closing(RunDirectory.open(resume)))
        env = resources.enter_context(closing(build_env(config)))
        evaluation_env = None
        if config.evaluation.interval:
            episodes = build_env(config, num_envs=config.evaluation.num_episodes, streams="evaluation")
            evaluation_env = resources.enter_context(closing(episodes))
        training = _take_up(config, env, checkpoint, run)
        config_yaml = to_yaml(config) + f"world_size: {topology.world_size}  # for information\n"
        if run is None:
            run = resources.enter_context(closing(_create_run(config, config_yaml, env, topology)))
        else:
            run.begin_attempt(config_yaml)
        env.engine.log_to(run.mujoco_log_path)
        log = resources.enter_context(run.rank_log(topology.rank))
        progress = resources.enter_context(Progress(config.task, run.path, log))
        observer = resources.enter_context(RunObserver(config, run, progress, request, training.so_far))
        if checkpoint is not None:
            # Whatever happens from here on, the run knows the weights it began with.
            observer.save(training.iteration, training.state_dict())
        from lockstep.learn.torch import loop

        progress.message(
            f"{config.task}: {config.num_envs} envs, physics by {type(env.engine).__name__}, learning on {env.device}, "
            f"in {run.path}"
        )
        status = loop.train(training, observer, evaluation_env)
        observer.finish(status, env.engine.warning_counts)
    return Outcome(run.path, status)


def _check(config: TrainConfig, checkpoint: Path | None, resume: Path | None) -> Topology:
    if checkpoint is not None and resume is not None:
        raise UsageError("checkpoint and resume exclude each other: one starts a new run, the other continues one")
    check_offered(config)
    topology = from_environment()
    require_one_process(topology)
    require_logger(config.logger)
    return topology


def _take_up(config: TrainConfig, env: TorchEnv, checkpoint: Path | None, run: RunDirectory | None) -> Training:
    """Return the training at the point where it starts or goes on; nothing is written."""
    from lockstep.distributed.torch_comm import SoloComm
    from lockstep.learn.torch.checkpoint import load
    from lockstep.learn.torch.training import Training

    training = Training(config, env, SoloComm())
    if checkpoint is not None:
        training.load_weights(load(checkpoint), checkpoint)
    if run is not None:
        _go_on(training, run)
    return training


def _go_on(training: Training, run: RunDirectory) -> None:
    """Load the newest checkpoint that is whole. A run that never had one starts again from its config.

    Raises:
        UsageError: it had checkpoints, and none of them is there and whole.
    """
    from lockstep.learn.torch.checkpoint import load

    problem = f"checkpoint {run.named_checkpoint} is gone" if run.named_checkpoint else None
    for path in run.checkpoints():
        try:
            content = load(path)
        except UsageError as error:
            # The one before it may be whole: a resumed run loses some iterations rather than everything.
            print(f"lockstep: warning: {error}", file=sys.stderr)  # noqa: T201
            problem = problem or f"checkpoint {path} is damaged"
            continue
        training.load_state_dict(content, path)
        return
    if problem is not None:
        raise UsageError(f"no checkpoint of {run.path} is whole ({problem}); put one back, or start a new run")


def _create_run(config: TrainConfig, config_yaml: str, env: TorchEnv, topology: Topology) -> RunDirectory:
    ranks = [{"rank": topology.rank, "device": str(env.device)}]
    run_info = describe() | {"seed": config.seed, "world_size": topology.world_size, "ranks": ranks}
    return RunDirectory.create(
        config.log_root, config.task, config.run_name, config_yaml, run_info, config.max_iterations
    )
