"""What the ranks of a pool do in the tests of the communicator."""

from typing import Any

import torch

from lockstep.core.errors import LockstepError, RunError, UsageError
from lockstep.core.types import Comm


def tensors_of(rank: int) -> dict[str, torch.Tensor]:
    """Tensors of many kinds, other ones on every rank."""
    payload = torch.tensor([0x7FF8_0000_0000_0000 + rank, -(2**63)], dtype=torch.int64).view(torch.float64)
    return {
        "odd": torch.tensor([rank == 0, True, False]),
        "nan and minus zero": payload,
        "half": torch.full((3,), 1.5 + rank, dtype=torch.bfloat16),
        "strided": (torch.arange(12.0).reshape(3, 4) + rank).T,
        "channels last": (torch.arange(36.0).reshape(1, 3, 3, 4) * (rank + 1)).to(memory_format=torch.channels_last),
        "scalar": torch.tensor(rank, dtype=torch.int64),
        "nothing": torch.zeros((0, 4)),
        "byte": torch.tensor([rank], dtype=torch.uint8),
        "parameter": torch.nn.Parameter(torch.full((2,), float(rank))),
    }


def broadcast(comm: Comm) -> dict[str, list[Any]]:
    """Return the bits of everything after rank 0's have come, and how it lies in memory."""
    own = tensors_of(comm.rank)
    before = {name: (tensor.data_ptr(), tensor.stride()) for name, tensor in own.items()}
    comm.broadcast_(own, "test")
    assert {name: (tensor.data_ptr(), tensor.stride()) for name, tensor in own.items()} == before
    return {name: bits(tensor) for name, tensor in own.items()}


def bits(tensor: torch.Tensor) -> list[Any]:
    flat = tensor.detach().contiguous().flatten()
    found: list[Any] = (flat.int() if tensor.dtype == torch.bool else flat.view(torch.uint8)).tolist()
    return found


def gather_rows(comm: Comm, counts: list[int], dtype: torch.dtype, width: tuple[int, ...]) -> Any:
    """Return all rows (rank 0) or this rank's; entry = rank * 10 + row."""
    count = counts[comm.rank]
    rows = (torch.arange(count) + 10 * comm.rank).reshape(-1, *(1 for _ in width)).expand(count, *width)
    gathered = comm.gather_rows(rows.to(dtype), "test")
    assert gathered.dtype == dtype
    return gathered.double().tolist()


def gather_text(comm: Comm, texts: list[str]) -> list[str]:
    return comm.gather_text(texts[comm.rank], "test")


def on_main(comm: Comm, fault: str) -> str:
    """Return what this rank makes of a piece of work that fails on rank 0 in some way."""

    def work() -> str:
        assert comm.rank == 0
        if fault == "usage":
            raise UsageError("no such thing")
        if fault == "run":
            raise RunError("the disk is full")
        if fault == "bug":
            raise ZeroDivisionError("oh\nno")
        return "fine, größer"

    try:
        return comm.on_main(work, "test")
    except LockstepError as error:
        return f"{type(error).__name__} {error.shared}: {error}"
    except ZeroDivisionError as error:
        return f"as it was: {error}"


def wait_s(comm: Comm, delays_s: list[float]) -> tuple[float, float]:
    """Return what was waited in an exchange that ranks come to at different times, and in none."""
    import time

    comm.gather(torch.zeros(1), "start")
    comm.take_waits()
    time.sleep(delays_s[comm.rank])
    comm.gather(torch.zeros(1), "test")
    return tuple(sum(wait.seconds for wait in comm.take_waits()) for _ in range(2))  # type: ignore[return-value]
