"""Ranks that follow a script of operations under the debug mode."""

import time
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

from lockstep.core.errors import RunError
from lockstep.distributed.torch_collectives import Collectives
from lockstep.distributed.torch_comm import GroupComm
from lockstep.distributed.torch_debug import CheckedCollectives

Step = tuple[str, tuple[int, ...], str, str]
"""Operation, shape, dtype and tag; or ``("sleep", ...)``, ``("end", ...)`` and ``("raise", ...)``."""


def follow(comm: GroupComm, script: list[Step], store: str, timeout_s: float) -> dict[str, Any]:
    """Go through the script; return what the debug mode said, and what was done by then."""
    checked = CheckedCollectives(Collectives(comm.collectives.device), _store(store), timeout_s=timeout_s)
    checked.log_to(Path(f"collectives_rank_{comm.rank}.log"))
    results: list[Any] = []
    began = time.monotonic()
    answer: dict[str, Any] = {"error": "", "shared": False}
    try:
        for operation, shape, dtype, tag in script:
            if operation == "sleep":
                time.sleep(shape[0])
            elif operation == "end":
                break
            else:
                tensor = torch.full(shape, comm.rank + 1).to(getattr(torch, dtype))
                results.append(perform(checked, operation, tensor, tag))
    except RunError as error:
        answer = {"error": str(error), "shared": error.shared}
    finally:
        answer["took_s"] = time.monotonic() - began
        checked.close()
    return answer | {
        "results": results,
        "num_started": checked.num_started,
        "wait_s": sum(wait.seconds for wait in checked.take_waits()),
    }


def perform(collectives: CheckedCollectives, operation: str, tensor: torch.Tensor, tag: str) -> Any:
    """Carry out one operation; return its result as nested lists."""
    if operation == "all_reduce":
        collectives.all_reduce_(tensor, tag)
    elif operation == "start_all_reduce":
        collectives.start_all_reduce_(tensor, tag).wait()
    elif operation == "broadcast":
        collectives.broadcast_(tensor, tag)
    else:
        gathered = getattr(collectives, operation)(tensor, tag)
        return None if gathered is None else gathered.tolist()
    return tensor.tolist()


def _store(path: str) -> Store:
    return PrefixStore("debug", FileStore(path, -1))


def count_keys(comm: GroupComm, num_operations: int) -> tuple[int, int]:
    """Return how many keys the store has after a few operations and after many."""
    store = _tcp_store(comm)
    checked = CheckedCollectives(Collectives(comm.collectives.device), store)
    counts = []
    for number in range(num_operations):
        checked.all_reduce_(torch.ones(1), "count")
        if number in (2, num_operations - 1):
            comm.gather(torch.zeros(1), "all have published")
            counts.append(store.num_keys())
            comm.gather(torch.zeros(1), "all have counted")
    return counts[0], counts[1]


def lose_the_store(comm: GroupComm) -> tuple[str, bool]:
    """Let rank 0, where the store lives, end between two collectives; return what the other says."""
    store = _tcp_store(comm)
    checked = CheckedCollectives(Collectives(comm.collectives.device), store, timeout_s=20)
    checked.all_reduce_(torch.ones(1), "first")
    comm.gather(torch.zeros(1), "both are through")
    if comm.rank == 0:
        del checked, store
        return "", False
    try:
        checked.all_reduce_(torch.ones(1), "second")
    except RunError as error:
        return str(error), error.shared
    return "no error", False


def _tcp_store(comm: GroupComm) -> TCPStore:
    if comm.rank == 0:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        comm.gather(torch.tensor(store.port), "port")
        return store
    port = int(comm.gather(torch.tensor(0), "port")[0])
    return TCPStore("127.0.0.1", port, is_master=False)


def through_comm(comm: GroupComm, store: str) -> list[str]:
    """Exchange through a ``GroupComm`` over checked collectives; return the log's lines without their times."""
    path = Path(f"through_comm_{comm.rank}.log")
    checked = CheckedCollectives(Collectives(comm.collectives.device), _store(store))
    above: Any = GroupComm(checked)
    assert above.gather_text(f"from {comm.rank}", "greeting") == [f"from {rank}" for rank in range(comm.world_size)]
    checked.log_to(path)
    above.broadcast_({"a": torch.ones(2)}, "state")
    checked.close()
    return [line.split(" ", 1)[1] for line in path.read_text().splitlines()]
