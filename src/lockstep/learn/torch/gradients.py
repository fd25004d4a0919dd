"""One flat buffer for all gradients and whatever must be reduced with them: one collective per minibatch."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

PART_BYTES = 32 * 2**20
"""Size from which a buffer travels in parts, so that sending overlaps with the backward pass (one part is at least
this large, as a message should be)."""


class GradientBuffer:
    """Preallocated memory that holds every parameter's ``.grad`` as a view, then what rides along.

    Layout of ``flat``: gradients, riders, sample count, one non-finite flag per rank. Sums go in; after the
    communicator's ``mean_gradients_`` gradients and riders are means over all samples of all ranks. A parameter that a
    loss did not touch keeps its zeros, so the layout is the same on every rank.

    A buffer of up to ``part_bytes`` travels in one piece. A larger one has ``parts`` that are sent while the backward
    pass goes on: those of the last parameters first, since it comes to them first, what rides along at the end.

    Args:
        parameters: name to parameter, all of one dtype on one device, neither of which may change afterwards.
        riders: names of scalars that are summed with the gradients.
        world_size: number of ranks.
        part_bytes: least size of a part of gradients.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        riders: tuple[str, ...],
        world_size: int,
        part_bytes: int = PART_BYTES,
    ) -> None:
        first = next(iter(parameters.values()))
        for name, parameter in parameters.items():
            if (parameter.dtype, parameter.device) != (first.dtype, first.device):
                raise ValueError(f"parameter {name} is {parameter.dtype} on {parameter.device}, others {first.dtype}")
        self.parameters = dict(parameters)
        self.riders = riders
        self._num_gradients = sum(parameter.numel() for parameter in parameters.values())
        self._count_index = self._num_gradients + len(riders)
        self.flat = torch.zeros(self._count_index + 1 + world_size, dtype=first.dtype, device=first.device)
        # Made once: an update looks at each of these some sixty times.
        self.gradients = self.flat[: self._num_gradients]
        """``(num_gradients,)`` view of the gradients alone."""
        self.means = self.flat[self._num_gradients : self._count_index]
        """``(num_riders,)`` view of what rode along, in the order of ``riders``."""
        self.flags = self.flat[self._count_index + 1 :]
        """``(world_size,)`` view: 1 where a rank's sums were not finite."""
        self._count = self.flat[self._count_index]
        self._attach()
        self._complete: Callable[[slice], None] | None = None
        self._split(max(1, part_bytes // first.element_size()))

    def _attach(self) -> None:
        offset = 0
        for parameter in self.parameters.values():
            parameter.grad = self.flat[offset : offset + parameter.numel()].view_as(parameter)
            offset += parameter.numel()

    def _split(self, part_size: int) -> None:
        """Divide the buffer into parts and watch the parameters of each."""
        self.parts: Sequence[slice] = [slice(0, self.flat.shape[0])]
        self._parameters_of_part = [len(self.parameters)]
        if self._num_gradients <= part_size:
            return
        parts: list[slice] = []
        self._parameters_of_part = []
        end = start = self._num_gradients
        num_parameters = 0
        for parameter in reversed(self.parameters.values()):
            start -= parameter.numel()
            num_parameters += 1
            index = len(parts)
            parameter.register_post_accumulate_grad_hook(lambda _, index=index: self._one_done(index))
            if end - start >= part_size or start == 0:
                parts.append(slice(start, end))
                self._parameters_of_part.append(num_parameters)
                end, num_parameters = start, 0
        self.parts = [*parts, slice(self._num_gradients, self.flat.shape[0])]

    @contextmanager
    def watch(self, complete: Callable[[slice], None]) -> Iterator[None]:
        """Call ``complete`` with a part as soon as the backward pass of the context is done with it, in their order.

        The last part, with what rides along, never completes here; nor does one with a parameter that the loss left
        out, or any part after it. A buffer of one piece has nothing to watch.
        """
        self._pending, self._next = list(self._parameters_of_part), 0
        self._complete = complete if len(self.parts) > 1 else None
        try:
            yield
        finally:
            self._complete = None

    def _one_done(self, index: int) -> None:
        if self._complete is None:
            return
        self._pending[index] -= 1
        while self._next < len(self._pending) and self._pending[self._next] == 0:
            self._complete(self.parts[self._next])
            self._next += 1

    def zero_(self) -> None:
        """Empty the buffer; the views stay attached."""
        self.flat.zero_()

    def ride_(self, sums: tuple[torch.Tensor, ...], num_samples: int) -> None:
        """Add scalars, in the order of ``riders``, and the number of samples that all sums are over."""
        self.means.add_(torch.stack(sums))
        self._count.add_(num_samples)

    def flag_nonfinite_(self, rank: int, part: slice) -> None:
        """Set this rank's flag if any of its sums in ``part`` is not finite (before the reduction)."""
        # The sum over all is finite only if every term is, so one pass finds out.
        total = self.flat[part.start : min(part.stop, self._count_index)].sum()
        bad = (~torch.isfinite(total)).to(self.flat.dtype)
        self.flags[rank] = torch.maximum(self.flags[rank], bad)

    def divide_by_count_(self) -> None:
        """Turn sums into means (after the reduction); without a single sample they stay zero."""
        self.flat[: self._count_index].div_(self._count.clamp(min=1.0))

    def clip_(self, max_norm: float) -> torch.Tensor:
        """Scale the gradients down to ``max_norm`` if theirs is larger; return the norm they had, a scalar."""
        norm: torch.Tensor = torch.linalg.vector_norm(self.gradients)
        self.gradients.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm
