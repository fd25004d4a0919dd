"""Joining the other ranks of the job, for scripts of the user's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lockstep.session.make_env import resolve_device
from lockstep.session.process import seed_generators

if TYPE_CHECKING:
    import torch

    from lockstep.core.types import Comm


@dataclass(frozen=True)
class Place:
    """Where this process stands in the job."""

    rank: int
    """Number among all ranks, from 0 on."""
    local_rank: int
    """Number among the ranks of this node."""
    world_size: int
    """How many ranks there are; 1 without torchrun."""
    device: torch.device
    """Where this rank computes: its GPU, which it sees as ``cuda:0``, or the CPU."""


def init(device: str = "auto", backend: str | None = None, *, seed: int | None = None) -> Place:
    """Join the other ranks, if there are any, and return this process's place among them.

    Call it first, before any env or module is built: ranks that still wait for one another should hold no simulator.
    (``import lockstep`` has given this rank its own GPU by then.) The ranks check that they run the same lockstep and
    torch. A second call returns the same place. ``lockstep.train`` uses the group that is there and leaves it open; it
    is left at the end of the process, or by ``lockstep.distributed.cleanup``.

    Args:
        device: ``auto`` (a GPU if there is one), ``cpu``, ``cuda`` or ``cuda:<index>``.
        backend: ``nccl`` or ``gloo``; None for the one that suits the device.
        seed: seed the generators of Python, numpy and torch by a hash of this and the global rank, so that no two ranks
            draw the same numbers; None leaves them alone. Envs have streams of their own, seeded by ``make_env``.

    Raises:
        UsageError: no such device or backend, torchrun did not start this process, ranks run different versions, or
            LOCKSTEP_HANG_TIMEOUT_S is no number of seconds.
        RunError: ranks are missing; they are named.
    """
    import torch

    from lockstep.distributed import heartbeat
    from lockstep.distributed.torch_group import current, setup

    heartbeat.begin()
    chosen = resolve_device(device)
    if chosen.type == "cuda":
        chosen = torch.device("cuda", chosen.index or 0)  # with its index: the group asks for one
    topology = setup(backend, chosen)
    _compare_versions(current(), chosen)
    if seed is not None:
        seed_generators(seed, topology.rank)
    return Place(topology.rank, topology.local_rank, topology.world_size, chosen)


_compared: set[int] = set()


def _compare_versions(comm: Comm, device: torch.device) -> None:
    """Check, the first time, that all ranks run the same code."""
    from lockstep.distributed.torch_exchange import gather_json
    from lockstep.session.placement import compare, describe_rank

    if comm.world_size in _compared:
        return
    compare(gather_json(describe_rank(None, device), comm, "placement"))
    _compared.add(comm.world_size)
