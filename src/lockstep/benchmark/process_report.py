"""What one process has measured of its ranks, as it tells the others: times by iteration, exchanges, resources."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import Field

from lockstep.benchmark.hardware import gpu_of, own_cores, own_node
from lockstep.benchmark.resources import Interval
from lockstep.benchmark.schema import NodeHardware, Record
from lockstep.core.gpu_mask import find_gpus
from lockstep.distributed.cores import threads_per_rank
from lockstep.distributed.topology import from_environment

if TYPE_CHECKING:
    from lockstep.core.types import Peers
    from lockstep.session.framework import Team


class OwnRank(Record):
    """A rank of this process."""

    rank: int
    device: str
    gpu_uuid: str | None
    pci_bus_id: str | None
    num_envs: int


class OwnExchange(Record):
    """One of the exchanges that every iteration has, in their order."""

    tag: str
    num_bytes: int


class ProcessReport(Record):
    """All that one process has to say."""

    process: int
    local_rank: int
    node: int | None
    """As torchrun numbers it."""
    hardware: NodeHardware
    ranks: tuple[OwnRank, ...]
    cores: tuple[int, ...] | None
    threads: int
    warm_up_iterations: int
    warm_up_s: float
    warm_up_steps: int
    """Of all ranks, as the learner counts them."""
    compile_s: float | None
    wall_s: float
    """Of all measured iterations, from the moment that all ranks began them together."""
    env_steps: int
    """Of all ranks, in the measured iterations."""
    iteration_s: tuple[float, ...]
    rank_s: dict[int, tuple[float, ...]] = Field(default_factory=dict)
    """The same for each rank, where the ranks of a process are timed one by one."""
    phases_s: dict[str, tuple[float, ...]]
    """By phase, of each measured iteration."""
    exchanges: tuple[OwnExchange, ...]
    waits_s: tuple[tuple[float, ...], ...]
    """``(num_iterations, num_exchanges)``."""
    alone_s: float | None
    """Mean iteration without the other processes, where that is how its own work is told from waiting."""
    intervals: tuple[Interval, ...]


def own_ranks(team: Team, shares: Sequence[int]) -> tuple[OwnRank, ...]:
    """Return the ranks of this process.

    Args:
        team: of the job.
        shares: envs of each rank.
    """
    process, gpus = team.comm.rank, find_gpus()
    found = []
    for rank, place in enumerate(team.ranks):
        if int(place.get("process", rank)) != process:
            continue
        device = str(place["device"])
        order = os.environ.get("CUDA_DEVICE_ORDER")
        gpu = gpu_of(device, gpus, os.environ.get("CUDA_VISIBLE_DEVICES"), order)
        found.append(
            OwnRank(
                rank=rank,
                device=device,
                gpu_uuid=None if gpu is None else gpu.uuid,
                pci_bus_id=None if gpu is None else gpu.pci_bus_id,
                num_envs=shares[rank],
            )
        )
    return tuple(found)


def place_of(comm: Peers) -> Mapping[str, Any]:
    """Return where this process runs, as fields of a report."""
    topology = from_environment()
    return {
        "process": comm.rank,
        "local_rank": topology.local_rank,
        "node": topology.node,
        "hardware": own_node(find_gpus()),
        "cores": own_cores(),
    }


def threads_of(team: Team, engine: object) -> int:
    """Return how many threads this process keeps busy at the same time, those of the framework or those of the physics.

    With torch they take turns: a policy's step, then the physics of all envs. JAX has as many as there are cores.

    Args:
        team: of the job.
        engine: of the envs.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None or team.mesh is not None:
        return threads_per_rank()
    return max(int(torch.get_num_threads()), int(getattr(engine, "num_threads", 1)))
