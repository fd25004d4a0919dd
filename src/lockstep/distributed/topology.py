"""Who this process is among the ranks of the job: the one reader of the launcher's variables."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from lockstep.core.errors import UsageError


@dataclass(frozen=True)
class Topology:
    """Where this process stands in the job."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1


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
    return Topology(rank, local_rank, world_size, local_world_size)


def require_one_process(topology: Topology) -> None:
    """Raise UsageError if the job has several ranks, which training does not take yet."""
    if topology.world_size > 1:
        raise UsageError(
            f"this version trains with one process, and WORLD_SIZE is {topology.world_size}; start it without torchrun"
        )


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
