"""One training from a config to a finished run directory, in this process and together with all others."""

from __future__ import annotations

from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lockstep.core import beats
from lockstep.core.config import to_yaml
from lockstep.core.environment import describe
from lockstep.core.errors import UsageError
from lockstep.core.interrupts import EXIT_CODES, StopReason, StopRequest, watch
from lockstep.core.metrics import require_logger
from lockstep.core.null_run_directory import NullRunDirectory
from lockstep.core.outcome import note_run
from lockstep.core.progress import Progress
from lockstep.core.run_directory import RunDirectory
from lockstep.core.saves import saving
from lockstep.distributed import heartbeat
from lockstep.distributed.stopping import ending_in_time
from lockstep.distributed.timeouts import alone_s
from lockstep.distributed.topology import from_environment, require_launcher, start_from_environment
from lockstep.recipes.catalog import TASKS, check_distributed, check_offered, check_processes, note_of
from lockstep.recipes.libraries import OWN
from lockstep.session import clip
from lockstep.session.attempts import Found, Resume, attempt_info, look, ways_to_start
from lockstep.session.film import check_rendering
from lockstep.session.framework import Framework, Team, framework_of
from lockstep.session.loading import go_on, load_weights
from lockstep.session.observer import RunObserver
from lockstep.session.process import memory_errors_in_words

if TYPE_CHECKING:
    from lockstep.core.types import Peers
    from lockstep.learn.config import TrainConfig
    from lockstep.session.runner import SessionRunner

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
    framework = check_start(config, checkpoint, resume)
    heartbeat.begin()
    with beats.training(), ExitStack() as resources:
        resources.enter_context(framework.running())
        team = join_team(framework, config, resources)
        comm = team.comm
        request = resources.enter_context(watch())  # from here on a signal loses nothing
        resources.enter_context(ending_in_time())
        found = look(config, resume, comm)
        config = found.fit(config, comm.num_ranks)
        shares = checked_shares(config, comm.num_ranks)
        _check_renderer(config, found, comm)
        resources.enter_context(memory_errors_in_words(max(shares)))
        framework.prepare(config, comm.rank)
        # A run that goes on is locked before anything is read from it.
        run = None if found.path is None else resources.enter_context(closing(_on_main(comm, found.open)))
        if run is not None and found.is_done:
            return _nothing_to_do(config, run, comm)
        training, engine, evaluation_env = framework.make_learner(config, team, resources)
        goes_on = _take_up(training, comm, checkpoint, run)
        # Other people's code must not draw again what it drew in the iterations before.
        framework.seed(config.seed, comm.rank, training.iteration)
        run = _begin(config, team, run, training.iteration, resources)
        note_run(run.path)
        engine.log_to(run.mujoco_log_path)
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
        of_envs = _begun_anew(config) if goes_on else note_of(config)
        for line in filter(None, (found.note, of_envs, _in_words(config, sum(shares), team, engine, run.path))):
            progress.message(line)
        status = training.train(observer, evaluation_env)
        _settle(observer, comm)
        beats.enter("end")
        observer.finish(status, engine.warning_counts)
        if config.video and status == "finished":
            comm.on_main(lambda: _film(run, request, progress), "video")
    return Outcome(run.path, status)


def _in_words(config: TrainConfig, num_envs: int, team: Team, engine: object, path: Path) -> str:
    """Return what trains where, in one line."""
    library = config.rl_library
    learner = "" if library == OWN else f"by {config.algorithm} of {library} with {config.ml_framework} "
    return (
        f"{config.task}: {num_envs} envs on {team.in_words}, physics by {type(engine).__name__}, learning {learner}on "
        f"{team.device}, in {path}"
    )


def _begun_anew(config: TrainConfig) -> str:
    """Return what of a run that goes on is not as it was: envs whose library can't save them."""
    suite = TASKS.get(config.task).suite
    if suite is None or suite.saves_envs:
        return ""
    return f"{suite.distribution.name} can't save its envs, so each of them begins a new episode here"


def check_start(config: TrainConfig, checkpoint: Path | None = None, resume: Resume = None) -> Framework:
    """Check whatever can be before the processes have met; return the framework.

    Raises:
        UsageError: what is asked for can't be.
    """
    if checkpoint is not None and isinstance(resume, Path):
        raise UsageError("checkpoint and resume exclude each other: one starts a new run, the other continues one")
    check_offered(config)
    require_launcher()
    framework, world_size = framework_of(config), from_environment().world_size
    num_ranks = framework.count_ranks(config, world_size)
    for way in ways_to_start(checkpoint, resume):
        framework.check_runner(config, world_size, starts_from=way)
    framework.check(config, world_size)
    check_processes(config, world_size)
    if num_ranks is not None:
        checked_shares(config, num_ranks)
    require_logger(config.logger)
    return framework


def checked_shares(config: TrainConfig, num_ranks: int) -> tuple[int, ...]:
    """Return each rank's share of the envs, once the task is known to train on so many ranks."""
    check_distributed(config, num_ranks)
    return config.envs_by_rank(num_ranks)


def _check_renderer(config: TrainConfig, found: Found, comm: Peers) -> None:
    """Refuse a new run that could not be filmed; one that goes on has its training to lose, and warns at its end."""
    if not config.video:
        return
    timeout_s = alone_s()  # a variable that makes no sense is better told of now than where the clip is made
    if found.path is None:
        comm.on_main(lambda: check_rendering(config, timeout_s), "renderer")


def join_team(framework: Framework, config: TrainConfig, resources: ExitStack) -> Team:
    """Return those who train together, met before any scene is built; they part when ``resources`` ends."""
    team = framework.join(config)

    def leave(kind: object, error: BaseException | None, trace: object) -> None:
        # After a failure of this process alone the others are inside an exchange, and leaving would wait for them.
        if error is None or getattr(error, "shared", False):
            team.comm.close()

    resources.push(leave)
    return team


def _take_up(training: SessionRunner, comm: Peers, checkpoint: Path | None, run: AnyRunDirectory | None) -> bool:
    """Bring a training to the point where it starts or goes on; return whether it goes on. Nothing is written."""
    goes_on = run is not None and go_on(training, comm, run)
    if checkpoint is not None and not goes_on:
        load_weights(training, comm, checkpoint)
    training.require_ready()
    return goes_on


def _begin(
    config: TrainConfig, team: Team, run: AnyRunDirectory | None, iteration: int, resources: ExitStack
) -> AnyRunDirectory:
    """Return the run directory, made now if there is none, in which a new attempt goes on after ``iteration``."""
    config_yaml = to_yaml(config) + f"world_size: {team.comm.num_ranks}  # for information\n"
    attempt = attempt_info(start_from_environment(), iteration)
    if run is None:
        made = _on_main(team.comm, _create_run, config, config_yaml, team.ranks, attempt)
        return resources.enter_context(closing(made))
    team.comm.on_main(lambda: run.begin_attempt(config_yaml, team.ranks, attempt) or "", "run directory")
    return run


def _nothing_to_do(config: TrainConfig, run: AnyRunDirectory, comm: Peers) -> Outcome:
    """Say that the run to go on with is finished, and leave it as it is."""
    with run.rank_log(comm.rank) as log, run.progress(config.task, log) as progress:
        progress.message(f"nothing to do: {run.path} is finished")
    return Outcome(run.path, "finished")


def _on_main(comm: Peers, make: Any, *arguments: Any) -> AnyRunDirectory:
    """Let rank 0 make or open the run directory; the others get one of the same path that writes nothing."""
    made: list[RunDirectory] = []

    def work() -> str:
        made.append(make(*arguments))
        return str(made[0].path)

    path = comm.on_main(work, "run directory")
    return next(iter(made), None) or NullRunDirectory(Path(path))


def _film(run: AnyRunDirectory, request: StopRequest, progress: Progress) -> str:
    """Show the trained policy at work; the run is saved, whatever comes of it. Return the path, "" if there is none."""
    newest = next(iter(run.checkpoints()), None)
    if newest is None:
        progress.message("lockstep: warning: there is no video, since the run's checkpoints are gone")
        return ""
    path = run.path / clip.FOLDER / f"{newest.stem}.mp4"
    problem = clip.make_clip(newest, path, lambda: request.status is not None)
    progress.message(f"lockstep: warning: there is no {path}: {problem}" if problem else f"video: {path}")
    return "" if problem else str(path)


def _settle(observer: RunObserver, comm: Peers) -> None:
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
