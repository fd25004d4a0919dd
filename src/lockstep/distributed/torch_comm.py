"""Communicators for torch. A single process has a real one, so no learner asks whether it is distributed."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from lockstep.core.types import FlatGradients


class SoloComm:
    """The ``Comm`` of a job of one process: every collective over one rank, with the same flat gradient buffer."""

    rank = 0
    world_size = 1

    def broadcast_(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Rank 0's tensors are everyone's already."""

    def mean_gradients_(self, gradients: "FlatGradients") -> None:
        """Divide the buffer's sums by its sample count, after noting whether this rank's are finite."""
        gradients.flag_nonfinite_(self.rank)
        gradients.divide_by_count_()

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return ``(1, *tensor.shape)``."""
        return tensor.unsqueeze(0)

    def close(self) -> None:
        """There is no group to leave."""
