"""One training from a config to a finished run directory, on this rank and together with all others."""

from __future__ import annotations

from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lockstep.core import beats
from lockstep.core.config import to_yaml
from lockstep.core.environment import describe
from lockstep.core.errors import UsageError
from lockstep.core.interrupts import EXIT_CODES, StopReason, watch
from lockstep.core.metrics import require_logger
from lockstep.core.null_run_directory import NullRunDirectory
from lockstep.core.outcome import note_run
from lockstep.core.run_directory import RunDirectory
from lockstep.core.saves import saving
from lockstep.distributed import heartbeat
from lockstep.distributed.stopping import ending_in_time
from lockstep.distributed.topology import from_environment, require_launcher, start_from_environment
from lockstep.learn.config import split_evenly
from lockstep.recipes.catalog import check_distributed, check_offered
from lockstep.session.attempts import Resume, attempt_info, look, ways_to_start
from lockstep.session.loading import go_on, load_weights
from lockstep.session.make_env import build_share, resolve_device
from lockstep.session.observer import RunObserver
from lockstep.session.process import memory_errors_in_words, prepare, seed_generators
from lockstep.session.runner import SessionRunner, check_learner, check_runner, make_runner

if TYPE_CHECKING:
    from lockstep.core.types import Comm
    from lockstep.envs.torch_env import TorchEnv
    from lockstep.learn.config import TrainConfig

AnyRunDirectory = RunDirectory | NullRunDirectory


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


def train(config: TrainConfig, checkpoint: Path | None = None, resume: Resume = None) -> Outcome:
    """Train one policy. Under torchrun every rank calls this with the same arguments, and they train it together.

    Ranks that torchrun starts again go on with the run that they trained before, whatever the arguments say.

    Args:
        config: everything that determines the training.
        checkpoint: start a new run at iteration 0 from these weights; only rank 0 needs the file.
        resume: continue the run in this directory, in place; only rank 0 needs it. ``"auto"``: the run that this job
            has started, by the variable LOCKSTEP_RUN_KEY or the run's name, or a new one if there is none.

    Raises:
        UsageError: whatever can't work, found before anything is written.
        RunError: the training failed; ``progress.json`` says why.
    """
    _check(config, checkpoint, resume)
    heartbeat.begin()
    with beats.training(), ExitStack() as resources:
        comm, ranks = _join(config, resources)
        request = resources.enter_context(watch())  # from here on a signal loses nothing
        resources.enter_context(ending_in_time())
        found = look(config, resume, comm)
        config = found.fit(config, comm.world_size)
        resources.enter_context(memory_errors_in_words(max(config.envs_by_rank(comm.world_size))))
        prepare(config, comm.rank)
        # A run that goes on is locked before anything is read from it.
        run = None if found.path is None else resources.enter_context(closing(_on_main(comm, found.open)))
        if run is not None and found.is_done:
            return _nothing_to_do(config, run, comm)
        env, evaluation_env = _build_envs(config, comm, resources)
        training, goes_on = _take_up(config, env, comm, checkpoint, run)
        # Other people's code must not draw again what it drew in the iterations before.
        seed_generators(config.seed, comm.rank, training.iteration)
        run = _begin(config, comm, ranks, run, training.iteration, resources)
        note_run(run.path)
        env.engine.log_to(run.mujoco_log_path)
        log = resources.enter_context(run.rank_log(comm.rank))
        comm.log_to(run.path / "ranks")
        progress = resources.enter_context(run.progress(config.task, log))
        observer = resources.enter_context(
            RunObserver(config, run, progress, request, training.so_far, from_environment().command)
        )
        if checkpoint is not None and not goes_on:
            # Whatever happens from here on, the run knows the weights it began with.
            observer.save(training.iteration, training.state_dict())
            _settle(observer, comm)
        if found.note:
            progress.message(found.note)
        progress.message(
            f"{config.task}: {sum(config.envs_by_rank(comm.world_size))} envs on {_count(comm.world_size, 'rank')}, "
            f"physics by {type(env.engine).__name__}, learning on {env.device}, in {run.path}"
        )
        status = training.train(observer, evaluation_env)
        _settle(observer, comm)
        beats.enter("end")
        observer.finish(status, env.engine.warning_counts)
    return Outcome(run.path, status)


def _check(config: TrainConfig, checkpoint: Path | None, resume: Resume) -> None:
    if checkpoint is not None and isinstance(resume, Path):
        raise UsageError("checkpoint and resume exclude each other: one starts a new run, the other continues one")
    check_offered(config)
    require_launcher()
    world_size = from_environment().world_size
    check_distributed(config, world_size)
    for way in ways_to_start(checkpoint, resume):
        check_runner(config, world_size, starts_from=way)
    check_learner(config, world_size)
    config.envs_by_rank(world_size)
    require_logger(config.logger)


def _join(config: TrainConfig, resources: ExitStack) -> tuple[Comm, list[dict[str, Any]]]:
    """Return the ranks, met before any scene is built, and what ``run.json`` says of each.

    Raises:
        UsageError: they don't run the same code with the same config; the host is named.
    """
    from lockstep.distributed.torch_exchange import gather_json
    from lockstep.distributed.torch_group import join
    from lockstep.session.placement import compare, describe_rank

    device = resolve_device(config.device)
    comm = join(device)

    def leave(kind: object, error: BaseException | None, trace: object) -> None:
        # After a failure of this rank alone the others are inside an exchange, and leaving would wait for them.
        if error is None or getattr(error, "shared", False):
            comm.close()

    resources.push(leave)
    ranks = gather_json(describe_rank(config, device), comm, "placement")
    compare(ranks)
    return comm, [{name: value for name, value in rank.items() if name != "config"} for rank in ranks]


def _build_envs(config: TrainConfig, comm: Comm, resources: ExitStack) -> tuple[TorchEnv, TorchEnv | None]:
    """Return this rank's share of the envs, and of those that evaluations run in."""
    shares = config.envs_by_rank(comm.world_size)
    env = resources.enter_context(closing(build_share(config, shares, comm.rank)))
    if not config.evaluation.interval:
        return env, None
    shares = split_evenly(config.evaluation.num_episodes, comm.world_size)
    return env, resources.enter_context(closing(build_share(config, shares, comm.rank, "evaluation")))


def _take_up(
    config: TrainConfig, env: TorchEnv, comm: Comm, checkpoint: Path | None, run: AnyRunDirectory | None
) -> tuple[SessionRunner, bool]:
    """Return the training at the point where it starts or goes on, and whether it goes on; nothing is written."""
    training = make_runner(config, env, comm)
    goes_on = run is not None and go_on(training, comm, run)
    if checkpoint is not None and not goes_on:
        load_weights(training, comm, checkpoint)
    return training, goes_on


def _begin(
    config: TrainConfig,
    comm: Comm,
    ranks: list[dict[str, Any]],
    run: AnyRunDirectory | None,
    iteration: int,
    resources: ExitStack,
) -> AnyRunDirectory:
    """Return the run directory, made now if there is none, in which a new attempt goes on after ``iteration``."""
    config_yaml = to_yaml(config) + f"world_size: {comm.world_size}  # for information\n"
    attempt = attempt_info(start_from_environment(), iteration)
    if run is None:
        return resources.enter_context(closing(_on_main(comm, _create_run, config, config_yaml, ranks, attempt)))
    comm.on_main(lambda: run.begin_attempt(config_yaml, ranks, attempt) or "", "run directory")
    return run


def _nothing_to_do(config: TrainConfig, run: AnyRunDirectory, comm: Comm) -> Outcome:
    """Say that the run to go on with is finished, and leave it as it is."""
    with run.rank_log(comm.rank) as log, run.progress(config.task, log) as progress:
        progress.message(f"nothing to do: {run.path} is finished")
    return Outcome(run.path, "finished")


def _on_main(comm: Comm, make: Any, *arguments: Any) -> AnyRunDirectory:
    """Let rank 0 make or open the run directory; the others get one of the same path that writes nothing."""
    made: list[RunDirectory] = []

    def work() -> str:
        made.append(make(*arguments))
        return str(made[0].path)

    path = comm.on_main(work, "run directory")
    return next(iter(made), None) or NullRunDirectory(Path(path))


def _settle(observer: RunObserver, comm: Comm) -> None:
    """Wait on all ranks for the last checkpoint.

    Raises:
        RunError: the disk refused it; every rank raises the same, since none may call the training a success.
    """
    with saving(), beats.within("save"):
        comm.on_main(observer.settle, "last checkpoint")


def _create_run(
    config: TrainConfig, config_yaml: str, ranks: list[dict[str, Any]], attempt: dict[str, Any]
) -> RunDirectory:
    run_info = describe() | {"seed": config.seed, "world_size": len(ranks), "ranks": ranks}
    run_info |= {"launch_id": attempt["launch_id"], "run_key": attempt["run_key"]}
    return RunDirectory.create(
        config.log_root, config.task, config.run_name, config_yaml, run_info, config.max_iterations, attempt
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number != 1 else ''}"
