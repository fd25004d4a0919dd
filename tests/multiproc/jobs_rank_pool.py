"""What ranks do in the tests of the pool itself."""

import ctypes
import os
import time
from pathlib import Path
from typing import Any

import torch

from lockstep.core.types import Comm


def add(comm: Comm, own: int, common: int) -> tuple[int, int, int, int]:
    """Return rank, world size, the sum of all ranks' own numbers plus the common one, and the process id."""
    total = comm.gather(torch.tensor([own]), "numbers").sum()
    return comm.rank, comm.world_size, int(total) + common, os.getpid()


def surroundings(comm: Comm) -> dict[str, str]:
    return dict(os.environ) | {"folder": str(Path.cwd()), "num_threads": str(torch.get_num_threads())}


def double(comm: Comm, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: 2 * tensor for name, tensor in tensors.items()}


def fail_on(comm: Comm, rank: int, what: str) -> None:
    """Fail on one rank while the others wait for it in a collective."""
    print(f"printed by rank {comm.rank}")
    if comm.rank == rank:
        {"raise": raise_inside, "exit": leave, "crash": crash, "sleep": sleep_for_ever}[what]()
    comm.gather(torch.zeros(1), "wait")


def raise_inside() -> None:
    raise ValueError("the ball is lost")


def leave() -> None:
    os._exit(7)


def crash() -> None:
    ctypes.CDLL(None).abort()


def sleep_for_ever() -> None:
    while True:
        time.sleep(1)


def speak(comm: Comm) -> None:
    print(f"printed by rank {comm.rank}")
    os.write(2, b"and past Python\n")


def something_unpicklable(comm: Comm) -> Any:
    return lambda: None
