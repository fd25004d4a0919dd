"""Communicators for torch. A single process has a real one, so no learner asks whether it is distributed."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from lockstep.distributed.main_process import run_on_main

if TYPE_CHECKING:
    from lockstep.core.types import FlatGradients, Wait
    from lockstep.distributed.torch_collectives import Collectives, Work
    from lockstep.distributed.torch_debug import CheckedCollectives


def _nothing() -> None:
    pass


class SoloComm:
    """The ``Comm`` of a job of one process: every collective over one rank, with the same flat gradient buffer."""

    rank = 0
    world_size = 1
    num_ranks = 1

    def broadcast_(self, tensors: Mapping[str, torch.Tensor], tag: str) -> None:
        """Rank 0's tensors are everyone's already."""

    def last_backward(self, gradients: "FlatGradients") -> AbstractContextManager[None]:
        """There is nothing to send while the backward pass goes on."""
        return nullcontext()

    def mean_gradients_(self, gradients: "FlatGradients", meanwhile: Callable[[], None] = _nothing) -> None:
        """Divide the buffer's sums by its sample count, after noting whether this rank's are finite."""
        meanwhile()
        for part in gradients.parts:
            gradients.flag_nonfinite_(self.rank, part)
        gradients.divide_by_count_()

    def gather(self, tensor: torch.Tensor, tag: str) -> torch.Tensor:
        """Return ``(1, *tensor.shape)``."""
        return tensor.unsqueeze(0)

    def gather_rows(self, rows: torch.Tensor, tag: str) -> torch.Tensor:
        """Return the rows: they are all there are."""
        return rows

    def gather_text(self, text: str, tag: str) -> list[str]:
        """Return the one text."""
        return [text]

    def on_main(self, work: Callable[[], str], tag: str) -> str:
        """Run ``work``."""
        return work()

    def log_to(self, folder: Path) -> None:
        """Nothing is exchanged."""

    def take_waits(self) -> "list[Wait]":
        """Return nothing: there is nobody to wait for."""
        return []

    def close(self) -> None:
        """There is no group to leave."""


class GroupComm:
    """The ``Comm`` of several processes.

    Args:
        collectives: on the process group.
        leave: called by ``close``.
    """

    def __init__(
        self, collectives: "Collectives | CheckedCollectives", leave: Callable[[], None] = lambda: None
    ) -> None:
        self.collectives = collectives
        self.rank, self.world_size = collectives.rank, collectives.world_size
        self.num_ranks = self.world_size
        self._leave = leave
        self._sent: list[Work] = []

    def broadcast_(self, tensors: Mapping[str, torch.Tensor], tag: str) -> None:
        """Overwrite every tensor with rank 0's: one message of bytes for all of them, whatever their types."""
        # Widest types first, so that every tensor's bytes begin where its type may begin.
        ordered = sorted(tensors.values(), key=lambda tensor: -tensor.element_size())
        device = self.collectives.device
        parts = [tensor.detach().to(device).contiguous().view(-1).view(torch.uint8) for tensor in ordered]
        message = torch.cat(parts)
        self.collectives.broadcast_(message, tag)
        with torch.no_grad():
            for tensor, part in zip(ordered, message.split([part.numel() for part in parts]), strict=True):
                tensor.copy_(part.view(tensor.dtype).view(tensor.shape))

    @contextmanager
    def last_backward(self, gradients: "FlatGradients") -> Iterator[None]:
        """Send each part of the buffer as soon as the backward pass is done with it."""
        with gradients.watch(lambda part: self._send(gradients, part)):
            yield

    def mean_gradients_(self, gradients: "FlatGradients", meanwhile: Callable[[], None] = _nothing) -> None:
        """Sum over ranks what ``last_backward`` has not sent yet, wait for all of it, divide by the sample count."""
        # A rank without samples, or whose loss left parameters out, sends here what others sent during backward: the
        # parts travel in the same order everywhere.
        for part in gradients.parts[len(self._sent) :]:
            self._send(gradients, part)
        meanwhile()
        for work in self._sent:
            work.wait()
        self._sent.clear()
        gradients.divide_by_count_()

    def _send(self, gradients: "FlatGradients", part: slice) -> None:
        gradients.flag_nonfinite_(self.rank, part)
        self._sent.append(self.collectives.start_all_reduce_(gradients.flat[part], "gradients"))

    def gather(self, tensor: torch.Tensor, tag: str) -> torch.Tensor:
        """Return ``(world_size, *tensor.shape)``, the same on every rank."""
        return self.collectives.all_gather(tensor, tag)

    def gather_rows(self, rows: torch.Tensor, tag: str) -> torch.Tensor:
        """Return all ranks' rows on rank 0; two exchanges, the first of the number of rows."""
        count = torch.tensor([rows.shape[0]], device=self.collectives.device)
        counts = self.collectives.all_gather(count, tag).flatten().tolist()
        padded = rows.new_zeros((max(counts), *rows.shape[1:]))
        padded[: rows.shape[0]] = rows
        width = padded.element_size()
        # As bytes, since not every backend knows every type.
        gathered = self.collectives.gather(padded.view(-1).view(torch.uint8), tag)
        if gathered is None:
            return rows
        row_bytes = width * padded[0].numel() if max(counts) else 0
        whole = torch.cat([own[: count * row_bytes] for own, count in zip(gathered, counts, strict=True)])
        return whole.clone().view(rows.dtype).view(sum(counts), *rows.shape[1:])

    def gather_text(self, text: str, tag: str) -> list[str]:
        """Return every rank's text; two exchanges, the first of the lengths."""
        encoded = text.encode()
        device = self.collectives.device
        lengths = self.collectives.all_gather(torch.tensor([len(encoded)], device=device), tag).flatten().tolist()
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: len(encoded)] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8) if encoded else padded[:0]
        table = self.collectives.all_gather(padded.to(device), tag).cpu()
        return [bytes(row[:length].tolist()).decode() for row, length in zip(table, lengths, strict=True)]

    def on_main(self, work: Callable[[], str], tag: str) -> str:
        """Run ``work`` on rank 0 and share its outcome, an error included.

        Raises:
            LockstepError: what ``work`` raised, marked as ``shared``: rank 0 says it for all.
        """
        return run_on_main(work, self.rank, lambda text: self.gather_text(text, tag))

    def log_to(self, folder: Path) -> None:
        """Let the debug mode, if it is on, write ``collectives_rank_<r>.log`` there."""
        self.collectives.log_to(folder / f"collectives_rank_{self.rank}.log")

    def take_waits(self) -> "list[Wait]":
        """Return the exchanges since the last call."""
        return self.collectives.take_waits()

    def close(self) -> None:
        """Leave the group."""
        self._leave()
