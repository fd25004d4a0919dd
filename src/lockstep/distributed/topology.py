"""Who this process is among the ranks of the job: the one reader of the launcher's variables."""

import json
import os
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from lockstep.core.errors import UsageError


@dataclass(frozen=True)
class Topology:
    """Where this process stands in the job."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    node: int | None = None
    """Of the job, as torchrun numbers its nodes; None where nobody does."""

    @property
    def command(self) -> str:
        """The command of lockstep that starts such a job."""
        return "train" if self.world_size == 1 else "train_multigpu"


def from_environment(environment: Mapping[str, str] = os.environ) -> Topology:
    """Return the topology that torchrun described; only RANK and WORLD_SIZE make a job distributed.

    Raises:
        UsageError: a variable is missing, no whole number, or out of range.
    """
    if "RANK" not in environment and "WORLD_SIZE" not in environment:
        return Topology()
    rank, world_size = _number(environment, "RANK"), _number(environment, "WORLD_SIZE")
    local_rank = _number(environment, "LOCAL_RANK", default=rank)
    local_world_size = _number(environment, "LOCAL_WORLD_SIZE", default=world_size)
    if not 0 <= rank < world_size:
        raise UsageError(f"RANK is {rank} but WORLD_SIZE is {world_size}; RANK must lie in 0 to WORLD_SIZE - 1")
    if not 0 <= local_rank < local_world_size:
        raise UsageError(f"LOCAL_RANK is {local_rank} but LOCAL_WORLD_SIZE is {local_world_size}; start with torchrun")
    node = _number(environment, "GROUP_RANK") if "GROUP_RANK" in environment else None
    return Topology(rank, local_rank, world_size, local_world_size, node)


RANK_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "ROLE_NAME",
    "MASTER_ADDR",
    "MASTER_PORT",
)
"""What torchrun tells each rank, besides variables of its own prefix. A user may have others called ``LOCAL_...``."""
_JOB_PREFIXES = ("TORCHELASTIC_", "LOCKSTEP_", "SLURM_", "PMI_")


def environment_apart(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return an environment for a process that is no rank of the job that this one may be in."""
    return {
        name: value
        for name, value in environment.items()
        if name not in RANK_VARIABLES and not name.startswith(_JOB_PREFIXES)
    }


def require_launcher(environment: Mapping[str, str] = os.environ) -> None:
    """Refuse several tasks of a SLURM step that know nothing of each other: each would train a policy of its own.

    Raises:
        UsageError: srun has started more than one task, and torchrun none of them.
    """
    num_tasks = environment.get("SLURM_STEP_NUM_TASKS", "1")
    if "RANK" not in environment and num_tasks.isdecimal() and int(num_tasks) > 1:
        raise UsageError(
            f"srun has started {num_tasks} tasks, which are no ranks of one job; use --ntasks-per-node 1 and lockstep "
            "train_multigpu, or torchrun"
        )


START = "LOCKSTEP_START"
"""Variable by which our agent tells the ranks what the agents of all nodes have agreed on, as JSON; see ``Start``."""


@dataclass(frozen=True)
class Start:
    """Which start of the ranks of a launch this is: torchrun starts them again after a failure and for other nodes."""

    launch_id: str = ""
    """The same for all starts of one launch, and of no other; empty where nothing starts ranks again."""
    number: int = 0
    """Starts before this one."""
    num_failures: int = 0
    """Of them, those that failed; the others ended because a node came or went."""
    last_failure: str = ""
    """How the last of these failed, in one line; empty if that is not known."""
    run_path: str = ""
    """Where an earlier start has trained, on the host of its rank 0; empty if none has come so far, or nobody knows."""


def start_from_environment(environment: Mapping[str, str] = os.environ) -> Start:
    """Return which start this is, by our agent or, under a bare torchrun, as far as torchrun tells."""
    if "RANK" not in environment:  # no rank, but perhaps the child of one
        return Start()
    if START in environment:
        return Start(**json.loads(environment[START]))
    count = environment.get("TORCHELASTIC_RESTART_COUNT", "")
    restarts = int(count) if count.isdecimal() else 0
    run_id = environment.get("TORCHELASTIC_RUN_ID", "")
    if run_id == "none":  # torchrun's word where nodes meet at a given address; its agent is the same all along
        run_id = environment.get("LOCKSTEP_JOB") or f"agent {_in_full(os.getppid())} of {socket.gethostname()}"
    return Start(run_id, restarts, restarts)


def _in_full(pid: int) -> str:
    """Return a process's id and when it began: containers give the same few ids again and again.

    On Linux that is told by clock ticks since the boot, which stay when somebody sets the clock.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        # proc(5): field 22; the second one, the command in parentheses, may itself hold anything
        ticks = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[19]
        return f"{pid} (begun {ticks} ticks after boot {boot})"
    except (OSError, IndexError):
        import psutil  # type: ignore[import-untyped]  # not before it is needed: every command imports this module

        try:
            return f"{pid} (begun {psutil.Process(pid).create_time():.2f})"
        except psutil.Error:
            return str(pid)


ISOLATED = "LOCKSTEP_ISOLATED"
"""Variable that holds the ``identity`` of the rank whose environment is set up already; its child processes have it."""

_IDENTITY = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
)
_START_OF_NODE = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")


def identity(environment: Mapping[str, str] = os.environ) -> str:
    """Return one text for this rank of this job. The ranks of a job started inside a rank have others."""
    return _in_one(_IDENTITY, environment)


def start_of_node(environment: Mapping[str, str] = os.environ) -> str:
    """Return one text for this start of this node's ranks, the same for all of them."""
    return _in_one(_START_OF_NODE, environment)


def _in_one(names: Iterable[str], environment: Mapping[str, str]) -> str:
    return " ".join(f"{name}={environment.get(name, '')}" for name in names)


def is_isolated(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether this process or the one that started it has isolated this rank."""
    return environment.get(ISOLATED) == identity(environment)


def require_distributed(kind: type, name: str, world_size: int) -> None:
    """Refuse a class whose attribute ``distributed_unsupported`` says why it can't take part on several ranks.

    Raises:
        UsageError: with that reason, word for word.
    """
    reason = getattr(kind, "distributed_unsupported", None)
    if world_size > 1 and reason is not None:
        raise UsageError(f"{name} can't train on {world_size} ranks: {reason}; run it with one process")


def require_several(world_size: int, asked_by: str) -> None:
    """Refuse to go on alone where the user asked for several ranks.

    Args:
        world_size: ranks of the job.
        asked_by: the flag that asks for them.

    Raises:
        UsageError: there is one rank.
    """
    if world_size == 1:
        raise UsageError(f"{asked_by} needs WORLD_SIZE > 1, which torchrun sets; for one process, leave it out")


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name)
    if text is None and default is not None:
        return default
    if text is None:
        raise UsageError(f"{name} is not set although the job is distributed; start with torchrun, which sets it")
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{name} is '{text}', not a whole number; start with torchrun, which sets it") from None
