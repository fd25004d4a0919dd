"""What the ranks of a pool do in the tests of direct exchanges."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._C._distributed_c10d import FileStore, PrefixStore

from lockstep.core.errors import RunError
from lockstep.distributed import torch_direct, torch_group
from lockstep.distributed.topology import Topology
from lockstep.distributed.torch_collectives import Collectives
from lockstep.distributed.torch_comm import GroupComm
from lockstep.distributed.torch_debug import CheckedCollectives
from lockstep.distributed.torch_direct import DirectExchange

CPU = torch.device("cpu")


@contextmanager
def direct_of(comm: GroupComm, store: str) -> Iterator[DirectExchange | None]:
    """Connect the ranks as the start of a job does; nothing of it stays in the pool."""
    topology = Topology(comm.rank, comm.rank, comm.world_size, comm.world_size)
    try:
        torch_group._connect_neighbours(topology, FileStore(store, -1))
        yield torch_group._direct
    finally:
        if torch_group._direct is not None:
            torch_group._direct.close()
        torch_group._direct = None


def compare_with_gloo(comm: GroupComm, store: str, num_bytes: int, dtype: torch.dtype) -> dict[str, Any]:
    """Sum and gather in both ways; return whether the results are the same bits, and which way they went."""
    generator = torch.Generator().manual_seed(comm.rank)
    numel = num_bytes // dtype.itemsize
    own = (torch.rand(numel, generator=generator, dtype=torch.float64) * 1000 - 500).to(dtype)
    with direct_of(comm, store) as direct:
        assert direct is not None
        plain, quick = Collectives(CPU), Collectives(CPU, direct)
        results = []
        for way in (plain, quick):
            total = own.clone()
            way.all_reduce_(total, "total")
            results.append((total, way.all_gather(own.reshape(-1, 2).T, "table")))
        (total, table), (quick_total, quick_table) = results
        return {
            "same sum": torch.equal(total, quick_total),
            "same table": torch.equal(table, quick_table),
            "direct": bool(direct.take_waits()),
            "counted": quick.num_started,
            "digest": quick_total.double().sum().item(),
        }


def cannot_connect(comm: GroupComm, store: str, unlucky: int) -> tuple[bool, float, list[float]]:
    """Let one rank have no sockets; return whether this one has connections, how long it took, and a sum."""
    original = torch_direct.socket.socket  # type: ignore[attr-defined]

    def refuse(*_: object) -> None:
        raise PermissionError("no sockets here")

    if comm.rank == unlucky:
        torch_direct.socket.socket = refuse  # type: ignore[attr-defined]
    began = time.monotonic()
    try:
        with direct_of(comm, store) as direct:
            took_s = time.monotonic() - began
            total = torch.full((3,), float(comm.rank + 1))
            Collectives(CPU, direct).all_reduce_(total, "total")
            return direct is not None, took_s, total.tolist()
    finally:
        torch_direct.socket.socket = original  # type: ignore[attr-defined]


def wait_s(comm: GroupComm, store: str, delays_s: list[float]) -> tuple[float, float]:
    """Return what was waited in an exchange that ranks come to at different times, and in none."""
    with direct_of(comm, store) as direct:
        collectives = Collectives(CPU, direct)
        comm.gather(torch.zeros(1), "all are here")
        time.sleep(delays_s[comm.rank])
        collectives.all_reduce_(torch.zeros(1), "late")
        return tuple(sum(wait.seconds for wait in collectives.take_waits()) for _ in range(2))  # type: ignore[return-value]


def part(comm: GroupComm, store: str, tags: list[str], checked: bool) -> str:
    """Sum three times, the last time with the rank's own tag; return what is said, or the sum."""
    with direct_of(comm, store) as direct:
        collectives: Any = Collectives(CPU, direct)
        if checked:
            debug_store = PrefixStore("debug", FileStore(store, -1))
            collectives = CheckedCollectives(collectives, debug_store, timeout_s=20.0)
        said = ""
        try:
            for tag in ("first", "second", tags[comm.rank]):
                total = torch.ones(2)
                collectives.all_reduce_(total, tag)
            said = str(total.tolist())
        except RunError as error:
            said = str(error)
        comm.gather(torch.zeros(1), "all have said it")  # before the connections close
        return said
