"""The few operations on a process group that everything between ranks is made of: counted, timed and tagged."""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

from lockstep.core import beats
from lockstep.core.outcome import LOST_A_RANK
from lockstep.core.types import Wait
from lockstep.distributed.torch_direct import MAX_WAITS, DirectExchange, Exchange
from lockstep.distributed.wording import torch_errors_in_words


class Work(Protocol):
    """An operation under way."""

    def wait(self) -> None:
        """Return when its result may be used: on a GPU by whatever is launched from now on, on a CPU at once."""


class Collectives:
    """Operations that every rank of the group must call in the same order. Sums and copies are the same on all ranks.

    Args:
        device: where tensors live that are made for an exchange; those of other devices are staged.
        direct: a shorter way for what is small, where all ranks are on one host.
    """

    def __init__(self, device: torch.device, direct: DirectExchange | None = None) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.device = device
        self._direct = direct
        self.num_started = 0
        self._wait = _WaitOnDevice() if device.type == "cuda" else _WaitOnHost()

    def all_reduce_(self, tensor: torch.Tensor, tag: str) -> None:
        """Sum a tensor over ranks, in place."""
        self.start_all_reduce_(tensor, tag).wait()

    def start_all_reduce_(self, tensor: torch.Tensor, tag: str) -> Work:
        """Begin to sum a tensor (contiguous) over ranks, in place; it may not be touched before ``wait``."""
        self.num_started += 1
        if self._direct is not None and self._direct.fits(tensor):
            return _DirectSum(self._direct.start(tensor, "sum", tag), tensor)
        staged = self._staged(tensor)
        with _lost_ranks_in_words(tag):
            return _Pending(dist.all_reduce(staged, async_op=True), self._wait, tensor, staged, tag)

    def broadcast_(self, tensor: torch.Tensor, tag: str) -> None:
        """Overwrite a tensor (contiguous) with rank 0's."""
        self.num_started += 1
        staged = self._staged(tensor)
        with _lost_ranks_in_words(tag):
            _Pending(dist.broadcast(staged, 0, async_op=True), self._wait, tensor, staged, tag).wait()

    def all_gather(self, tensor: torch.Tensor, tag: str) -> torch.Tensor:
        """Return ``(world_size, *tensor.shape)`` on every rank."""
        self.num_started += 1
        if self._direct is not None and self._direct.fits(tensor):
            return torch.stack(self._direct.start(tensor.contiguous(), "gather", tag).wait())
        staged = self._staged(tensor.contiguous())
        gathered = staged.new_empty((self.world_size, *tensor.shape))
        with _lost_ranks_in_words(tag):
            work = dist.all_gather(list(gathered.unbind(0)), staged, async_op=True)
            _Pending(work, self._wait, staged, staged, tag).wait()
        return gathered.to(tensor.device)

    def gather(self, tensor: torch.Tensor, tag: str) -> torch.Tensor | None:
        """Return ``(world_size, *tensor.shape)`` on rank 0, None on the others."""
        self.num_started += 1
        staged = self._staged(tensor.contiguous())
        gathered = staged.new_empty((self.world_size, *tensor.shape)) if self.rank == 0 else None
        parts = None if gathered is None else list(gathered.unbind(0))
        with _lost_ranks_in_words(tag):
            _Pending(dist.gather(staged, parts, 0, async_op=True), self._wait, staged, staged, tag).wait()
        return None if gathered is None else gathered.to(tensor.device)

    def watching(self, tag: str, num_bytes: int) -> AbstractContextManager[None]:
        """Return the context in which other people's code makes an exchange of its own on the same group."""
        return self._wait.watching(tag, num_bytes)

    def log_to(self, path: Path) -> None:
        """Do nothing: only the debug mode keeps a log."""

    def take_waits(self) -> list[Wait]:
        """Return the operations since the last call, in an order that is the same on all ranks.

        Their seconds include waiting for other ranks. On a GPU they are the time that its stream stood in them; asking
        waits for the stream.
        """
        return self._wait.take() + ([] if self._direct is None else self._direct.take_waits())

    def _staged(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.device.type == self.device.type else tensor.to(self.device)


def _lost_ranks_in_words(tag: str) -> AbstractContextManager[None]:
    what = f"{LOST_A_RANK} {tag}"
    return torch_errors_in_words(what, "it has ended or can't be reached: see what it says, and its log")


# Gloo's thread lets go of an operation a moment after it is over. If it were the last to do so it would free Python
# objects, and abort a process whose interpreter is already ending.
_RECENT: deque[dist.Work] = deque(maxlen=8)


class _WaitOnHost:
    """Time that the host stood still in operations."""

    def __init__(self) -> None:
        self._waits: deque[Wait] = deque(maxlen=MAX_WAITS)

    def wait_for(self, work: dist.Work, tag: str, num_bytes: int) -> None:
        _RECENT.append(work)
        began = time.perf_counter()
        with beats.exchange(tag):
            work.wait()
        self._waits.append(Wait(tag, time.perf_counter() - began, num_bytes))

    @contextmanager
    def watching(self, tag: str, num_bytes: int) -> Iterator[None]:
        began = time.perf_counter()
        with beats.exchange(tag), _lost_ranks_in_words(tag):
            yield
        self._waits.append(Wait(tag, time.perf_counter() - began, num_bytes))

    def take(self) -> list[Wait]:
        taken = list(self._waits)
        self._waits.clear()
        return taken


class _Pair(NamedTuple):
    begin: torch.cuda.Event
    end: torch.cuda.Event
    tag: str
    num_bytes: int


class _WaitOnDevice:
    """Time that the current CUDA stream stood still in operations, by events: the host never waits for it."""

    def __init__(self) -> None:
        self._pairs: deque[_Pair] = deque(maxlen=MAX_WAITS)

    def wait_for(self, work: dist.Work, tag: str, num_bytes: int) -> None:
        with self.watching(tag, num_bytes):
            work.wait()

    @contextmanager
    def watching(self, tag: str, num_bytes: int) -> Iterator[None]:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        yield
        end.record()
        self._pairs.append(_Pair(begin, end, tag, num_bytes))
        beats.exchanges_on_device(tag)  # whoever reads the result waits for it

    def take(self) -> list[Wait]:
        if self._pairs:
            self._pairs[-1].end.synchronize()
        taken = [Wait(pair.tag, pair.begin.elapsed_time(pair.end) / 1e3, pair.num_bytes) for pair in self._pairs]
        self._pairs.clear()
        return taken


class _DirectSum:
    def __init__(self, exchange: Exchange, target: torch.Tensor) -> None:
        self._exchange, self._target = exchange, target.detach()  # a parameter takes no sum in place

    def wait(self) -> None:
        first, second, *others = self._exchange.wait()
        torch.add(first, second, out=self._target)
        for other in others:  # in the order of ranks, so the sum is the same on all of them
            self._target += other


class _Pending:
    def __init__(
        self,
        work: dist.Work | None,
        wait: _WaitOnHost | _WaitOnDevice,
        target: torch.Tensor,
        staged: torch.Tensor,
        tag: str,
    ) -> None:
        self._work, self._wait, self._target, self._staged, self._tag = work, wait, target, staged, tag

    def wait(self) -> None:
        if self._work is not None:
            with _lost_ranks_in_words(self._tag):
                self._wait.wait_for(self._work, self._tag, self._staged.nbytes)
        if self._staged is not self._target:
            self._target.copy_(self._staged)
