"""What a launch will do, decided and checked in full before anything is started or written."""

import os
import re
import shlex
import sys
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.core.blame import HANG_TIMEOUT, Limits
from lockstep.core.environment import allowed_cores
from lockstep.core.errors import UsageError
from lockstep.core.files import require_place
from lockstep.core.gpu_mask import Gpu
from lockstep.core.outcome import ATTEMPT_DIR
from lockstep.distributed.topology import RANK_VARIABLES, from_environment
from lockstep.launch.devices import RankPlace, place_ranks
from lockstep.launch.rendezvous import Nodes, Rendezvous, check_port, checked_address, concern, plan_rendezvous

AGENT = "lockstep.distributed.torch_agent"
COORDINATOR = "JAX_COORDINATOR_ADDRESS"
"""JAX's own variable for the address at which its processes meet."""
JOB = "LOCKSTEP_JOB"
"""Every process of a job has this variable, so that none of them is overlooked at its end."""

FOLDER_PREFIX = "lockstep-"
"""Before the job's id in the name of the folder of a launch."""
ATTEMPT = "attempt"

STDOUT, STDERR = 1, 2
"""Streams as torchrun numbers them; their sum is both."""

# A job that is started starts anew: nothing of a job around it, and none of torchrun's own defaults (PET_*).
_OF_ANOTHER_JOB = re.compile(
    rf"{'|'.join(RANK_VARIABLES)}|PET_\w+"
    r"|TORCHELASTIC_(RUN_ID|RESTART_COUNT|MAX_RESTARTS|USE_AGENT_STORE|ERROR_FILE|SIGNALS_TO_HANDLE)"
    r"|LOCKSTEP_(DEVICE|JOB|ATTEMPT_DIR|LAUNCHER_PID|LOG_ALL_RANKS|START)"
    r"|JAX_(COORDINATOR_ADDRESS|COORDINATOR_BIND_ADDRESS|LOCAL_DEVICE_IDS)"
)
_TEE = re.compile(r"[0-3]|[0-9]+:[0-3](,[0-9]+:[0-3])*", re.ASCII)


@dataclass(frozen=True)
class Options:
    """What the user asked of the launcher; None where nothing was said."""

    num_gpus: int | None = None
    nodes: Nodes = field(default_factory=Nodes)
    max_restarts: int = 0
    log_all_ranks: bool = False
    tee: str | None = None
    log_dir: Path | None = None
    hang_timeout_s: float | None = None
    """After which a rank that does not move is ended; 0 for never, None for what the environment says."""
    coordinator_address: str | None = None
    """Where the processes of JAX meet, as HOST:PORT; None for a free port that process 0 finds."""


@dataclass(frozen=True)
class Work:
    """What each rank runs, as the words that torchrun takes."""

    words: tuple[str, ...]
    device: str = "auto"
    """As in a config."""
    is_script: bool = False
    has_phases: bool = False
    """Whether its ranks tell all along where they are. A script, or a learner of the user's, need not."""
    envs_by_rank: tuple[int, ...] | None = None
    """Of the whole job, at its most nodes, for each process; None if it is the script's own affair."""
    fewest_envs: int | None = None
    """Of the whole job, if it starts on its fewest nodes; None if it is not elastic."""
    saves: bool = True
    """Whether a rank that is asked to stop has something to save first."""
    has_coordinator: bool = False
    """Whether its processes meet at a coordinator of their own, as those of JAX do."""
    warnings: tuple[str, ...] = ()
    """What may not be meant."""


@dataclass(frozen=True)
class Plan:
    """A launch, ready to go."""

    job: str
    work: Work
    rendezvous: Rendezvous
    places: tuple[RankPlace, ...]
    """By local rank."""
    teed: tuple[int, ...]
    """By local rank, the streams that go to a file and, with the rank before each line, to the screen."""
    max_restarts: int
    log_dir: Path
    keeps_logs: bool
    """Whether the user named the folder of the logs; else it is gone after a clean end."""
    folder: Path
    """Of the launch; made at its start, gone at its end."""
    command: tuple[str, ...]
    added: Mapping[str, str]
    """Environment variables that the job gets."""
    removed: tuple[str, ...]
    """Environment variables that it does not get."""
    warnings: tuple[str, ...]
    limits: Limits
    """For how long a rank may show nothing."""
    coordinator: str | None = None
    """Where the processes of JAX meet, as HOST:PORT; None if that is left to them."""

    @property
    def num_ranks(self) -> int:
        """Ranks on this node."""
        return len(self.places)

    @property
    def world_size(self) -> int:
        """Ranks of the whole job, if every node has as many as this one; the most there can be in an elastic one."""
        return self.num_ranks * self.rendezvous.num_nodes

    @property
    def backend(self) -> str:
        """Of the process group."""
        return "gloo" if self.places[0].entry is None else "nccl"

    @property
    def attempt_dir(self) -> Path:
        """Where ranks and agent leave how they ended."""
        return self.folder / ATTEMPT

    def first_rank(self) -> int | None:
        """Return the global rank of local rank 0, None if it is known only when the nodes have met."""
        node_rank = self.rendezvous.node_rank
        return None if node_rank is None else node_rank * self.num_ranks

    def streams_on_screen(self, local_rank: int) -> int:
        """Return which of a rank's streams the user sees: 1 stdout, 2 stderr, 3 both."""
        return STDOUT | STDERR if local_rank == 0 else self.teed[local_rank]

    def plain_torchrun(self) -> str:
        """Return the command that does the same by hand, without what the launcher adds to torchrun."""
        teed = f"--tee={','.join(f'{rank}:{streams}' for rank, streams in enumerate(self.teed))}"
        words = [
            "torchrun",
            *self.rendezvous.plain_arguments,
            f"--nproc_per_node={self.num_ranks}",
            *([f"--max_restarts={self.max_restarts}"] if self.max_restarts else []),
            *([f"--log_dir={self.log_dir}"] if self.keeps_logs else []),
            *([teed] if any(self.teed) else ["--local_ranks_filter=0"] if self.num_ranks > 1 else []),
            *_escaped(self.work.words),
        ]
        return shlex.join(words)


def check_surroundings(environment: Mapping[str, str] = os.environ, platform: str = sys.platform) -> None:
    """Raise UsageError where no job can be started: elsewhere than on Linux, or inside a rank of another job."""
    if platform != "linux":
        raise UsageError(f"train_multigpu needs Linux, and this is {platform}; use lockstep train, in one process")
    topology = from_environment(environment)
    if topology.world_size > 1:
        raise UsageError(
            f"this process is rank {topology.rank} of a job with WORLD_SIZE {topology.world_size} already; start "
            "train_multigpu outside of torchrun (or unset RANK and WORLD_SIZE), or use lockstep train inside it"
        )


def make_plan(
    options: Options,
    work: Work,
    gpus: Sequence[Gpu],
    environment: Mapping[str, str] = os.environ,
    job: str | None = None,
) -> Plan:
    """Return what a launch with these options will do. Nothing is started or written.

    Args:
        options: of the launcher.
        work: what each rank runs.
        gpus: what ``find_gpus`` returned.
        environment: of the launcher.
        job: an id that no other job has; None for a new one.

    Raises:
        UsageError: whatever can't work.
    """
    job = job or uuid.uuid4().hex
    rendezvous = plan_rendezvous(options.nodes, job)
    places = place_ranks(options.num_gpus, work.device, rendezvous.num_nodes > 1, environment, gpus)
    teed = _teed(options, len(places))
    check_port(rendezvous)
    coordinator = checked_address(options.coordinator_address, rendezvous)
    folder = Path(tempfile.gettempdir()) / f"{FOLDER_PREFIX}{job}"
    log_dir = folder / "logs" if options.log_dir is None else _checked_log_dir(options.log_dir)
    added = _added(options, work, places, environment, job, folder / ATTEMPT)
    redirected = [streams if rank == 0 else STDOUT | STDERR for rank, streams in enumerate(teed)]
    command = (
        sys.executable,
        "-m",
        AGENT,
        *rendezvous.arguments,
        f"--nproc_per_node={len(places)}",
        f"--max_restarts={options.max_restarts}",
        f"--log_dir={log_dir}",
        f"--redirects={','.join(f'{rank}:{streams}' for rank, streams in enumerate(redirected))}",
        *_escaped(work.words),
    )
    return Plan(
        job=job,
        work=work,
        rendezvous=rendezvous,
        places=places,
        teed=teed,
        max_restarts=options.max_restarts,
        log_dir=log_dir,
        keeps_logs=options.log_dir is not None,
        folder=folder,
        command=command,
        added=added,
        removed=tuple(sorted(name for name in environment if _OF_ANOTHER_JOB.fullmatch(name))),
        warnings=(*work.warnings, *_warnings(rendezvous, places, options.max_restarts)),
        limits=_limits(options, work, environment),
        coordinator=coordinator,
    )


def _limits(options: Options, work: Work, environment: Mapping[str, str]) -> Limits:
    asked_s = options.hang_timeout_s
    limits = Limits.from_environment(environment) if asked_s is None else Limits(asked_s)
    return limits.for_training() if work.has_phases else limits


def _added(
    options: Options,
    work: Work,
    places: Sequence[RankPlace],
    environment: Mapping[str, str],
    job: str,
    attempt_dir: Path,
) -> dict[str, str]:
    added = {"PYTHONUNBUFFERED": "1", JOB: job, ATTEMPT_DIR: str(attempt_dir)}
    if places[0].entry is None:
        added["LOCKSTEP_DEVICE"] = "cpu"
        if work.is_script:  # which need not import lockstep
            added["CUDA_VISIBLE_DEVICES"] = ""
    elif work.device.startswith("cuda:") and work.is_script:
        added["CUDA_VISIBLE_DEVICES"] = str(places[0].entry)
    if options.coordinator_address is not None:
        added[COORDINATOR] = options.coordinator_address
    if options.hang_timeout_s is not None:
        added[HANG_TIMEOUT] = f"{options.hang_timeout_s:g}"
    if options.log_all_ranks:
        added["LOCKSTEP_LOG_ALL_RANKS"] = "1"
    if "OMP_NUM_THREADS" not in environment:  # torchrun would set 1, however many cores there are
        added["OMP_NUM_THREADS"] = str(max(1, allowed_cores() // len(places)))
    return added


def _teed(options: Options, num_ranks: int) -> tuple[int, ...]:
    if options.log_all_ranks and options.tee is not None:
        raise UsageError("--log_all_ranks is --tee 3 for every rank; keep one of them")
    if options.log_all_ranks:
        return (STDOUT | STDERR,) * num_ranks
    tee = "0" if options.tee is None else options.tee
    if not _TEE.fullmatch(tee):
        raise UsageError(f"tee {tee!r} must be 0, 1 (stdout), 2 (stderr) or 3 (both), or by local rank as 0:3,1:2")
    if ":" not in tee:
        return (int(tee),) * num_ranks
    by_rank: dict[int, int] = {}
    for part in tee.split(","):
        rank, streams = map(int, part.split(":"))
        if rank >= num_ranks:
            raise UsageError(f"tee {tee!r} names local rank {rank}, but this node has ranks 0 to {num_ranks - 1}")
        if rank in by_rank:
            raise UsageError(f"tee {tee!r} names local rank {rank} twice")
        by_rank[rank] = streams
    return tuple(by_rank.get(rank, 0) for rank in range(num_ranks))


def _checked_log_dir(path: Path) -> Path:
    path = path.absolute()
    require_place("log_dir", path)
    return path


def _escaped(words: Sequence[str]) -> list[str]:
    """Return words that torchrun hands on as they are: it takes a dollar sign for the start of a macro."""
    return [word.replace("$", "$$") for word in words]


def _warnings(rendezvous: Rendezvous, places: Sequence[RankPlace], max_restarts: int) -> tuple[str, ...]:
    found = [concern(rendezvous)] if rendezvous.endpoint is not None else []
    if rendezvous.is_elastic and not max_restarts:
        found.append("without --max_restarts N the job ends with the first node that is lost")
    cores = allowed_cores()
    if places[0].entry is None and len(places) > cores:
        have = f"{cores} core{'s' if cores > 1 else ''}"
        found.append(f"{len(places)} ranks share {have}; they will wait for one another")
    return tuple(line for line in found if line is not None)
