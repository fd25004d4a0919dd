"""One flat buffer for all gradients and whatever must be reduced with them: one collective per minibatch."""

from collections.abc import Mapping

import torch
from torch import nn


class GradientBuffer:
    """Preallocated memory that holds every parameter's ``.grad`` as a view, then what rides along.

    Layout of ``flat``: gradients, riders, sample count, one non-finite flag per rank. Sums go in; after the
    communicator's ``mean_gradients_`` gradients and riders are means over all samples of all ranks. A parameter that a
    loss did not touch keeps its zeros, so the layout is the same on every rank.

    Args:
        parameters: name to parameter, all of one dtype on one device, neither of which may change afterwards.
        riders: names of scalars that are summed with the gradients.
        world_size: number of ranks.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], riders: tuple[str, ...], world_size: int) -> None:
        first = next(iter(parameters.values()))
        for name, parameter in parameters.items():
            if (parameter.dtype, parameter.device) != (first.dtype, first.device):
                raise ValueError(f"parameter {name} is {parameter.dtype} on {parameter.device}, others {first.dtype}")
        self.parameters = dict(parameters)
        self.riders = riders
        self._num_gradients = sum(parameter.numel() for parameter in parameters.values())
        self._count_index = self._num_gradients + len(riders)
        self.flat = torch.zeros(self._count_index + 1 + world_size, dtype=first.dtype, device=first.device)
        self._attach()

    def _attach(self) -> None:
        offset = 0
        for parameter in self.parameters.values():
            parameter.grad = self.flat[offset : offset + parameter.numel()].view_as(parameter)
            offset += parameter.numel()

    @property
    def gradients(self) -> torch.Tensor:
        """``(num_gradients,)`` view of the gradients alone."""
        return self.flat[: self._num_gradients]

    @property
    def means(self) -> torch.Tensor:
        """``(num_riders,)`` view of what rode along, in the order of ``riders``."""
        return self.flat[self._num_gradients : self._count_index]

    @property
    def flags(self) -> torch.Tensor:
        """``(world_size,)`` view: 1 where a rank's sums were not finite."""
        return self.flat[self._count_index + 1 :]

    def zero_(self) -> None:
        """Empty the buffer; the views stay attached."""
        self.flat.zero_()

    def ride_(self, sums: tuple[torch.Tensor, ...], num_samples: int) -> None:
        """Add scalars, in the order of ``riders``, and the number of samples that all sums are over."""
        self.means.add_(torch.stack(sums).to(self.flat.dtype))
        self.flat[self._count_index] += num_samples

    def flag_nonfinite_(self, rank: int) -> None:
        """Set this rank's flag if any of its sums is not finite (before the reduction)."""
        # The sum over all is finite only if every term is, so one pass finds out.
        self.flags[rank] = (~torch.isfinite(self.flat[: self._count_index].sum())).to(self.flat.dtype)

    def divide_by_count_(self) -> None:
        """Turn sums into means (after the reduction); without a single sample they stay zero."""
        self.flat[: self._count_index] /= self.flat[self._count_index].clamp(min=1.0)

    def clip_(self, max_norm: float) -> torch.Tensor:
        """Scale the gradients down to ``max_norm`` if theirs is larger; return the norm they had, a scalar."""
        norm: torch.Tensor = torch.linalg.vector_norm(self.gradients)
        self.gradients.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm
