"""Threads that play the ranks of direct exchanges."""

import socket
import threading
from collections.abc import Callable
from itertools import combinations
from typing import Any

import torch

from lockstep.core.errors import RunError
from lockstep.distributed.torch_collectives import _DirectSum
from lockstep.distributed.torch_direct import DirectExchange

Rank = Callable[[DirectExchange], Any]


def connected(num_ranks: int, timeout_s: float = 30.0) -> list[DirectExchange]:
    """Return the ends of ranks that are connected pair by pair."""
    sockets: list[dict[int, socket.socket]] = [{} for _ in range(num_ranks)]
    for one, other in combinations(range(num_ranks), 2):
        sockets[one][other], sockets[other][one] = socket.socketpair()
    return [DirectExchange(rank, own, timeout_s) for rank, own in enumerate(sockets)]


def together(ends: list[DirectExchange], *ranks: Rank) -> list[Any]:
    """Let every rank do its work in a thread (the same, if there is only one); return results or the errors raised."""
    works = ranks if len(ranks) > 1 else ranks * len(ends)
    found: list[Any] = [None] * len(ends)

    def run(rank: int) -> None:
        try:
            found[rank] = works[rank](ends[rank])
        except RunError as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(len(ends))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "deadlock"
    return found


def summed(end: DirectExchange, tensor: torch.Tensor, tag: str = "sum of test") -> torch.Tensor:
    _DirectSum(end.start(tensor, "sum", tag), tensor).wait()
    return tensor
