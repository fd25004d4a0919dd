"""Moments of observations and advantages over all ranks, and what is done with them."""

import torch

# The one way by which the algorithms reach distributed/: arithmetic that is handed a communicator.
from lockstep.distributed.torch_moments import Moments, merge_over_ranks

__all__ = ["Moments", "merge_over_ranks", "standardise"]


def standardise(samples: torch.Tensor, moments: Moments) -> torch.Tensor:
    """Return ``samples`` shifted and scaled by moments of size 1 (the standard deviation is the population's)."""
    return (samples - moments.mean.to(samples.dtype)) / (moments.std() + 1e-8).to(samples.dtype)
