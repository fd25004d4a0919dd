"""Moments over all ranks, in one exchange."""

from collections.abc import Sequence
from functools import reduce

import torch

from lockstep.core.types import Comm
from lockstep.learn.torch.normalizer import Moments


def merge_over_ranks(parts: Sequence[Moments], comm: Comm) -> list[Moments]:
    """Return each of this rank's moments merged with the other ranks' of the same place, equal on every rank."""
    sizes = [1 + 2 * moments.mean.shape[0] for moments in parts]
    gathered = comm.gather(torch.cat([moments.pack() for moments in parts]), "moments")  # (world_size, sum of sizes)
    return [
        reduce(Moments.merge, (Moments.unpack(packed) for packed in of_ranks))
        for of_ranks in gathered.split(sizes, dim=1)
    ]


def standardise(samples: torch.Tensor, moments: Moments) -> torch.Tensor:
    """Return ``samples`` shifted and scaled by moments of size 1 (the standard deviation is the population's)."""
    std = (moments.m2 / moments.count.clamp(min=1.0)).sqrt()
    return (samples - moments.mean.to(samples.dtype)) / (std + 1e-8).to(samples.dtype)
