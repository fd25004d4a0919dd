"""Moments of samples, merged exactly over ranks. Nothing here looks for a communicator: it is handed one."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import torch

from lockstep.core.types import Comm


@dataclass(frozen=True)
class Moments:
    """Count, mean and sum of squared deviations from the mean of a set of samples, in float64."""

    count: torch.Tensor  # ()
    mean: torch.Tensor  # (...) the shape of one sample
    m2: torch.Tensor  # (...)

    @classmethod
    def of(cls, samples: torch.Tensor) -> "Moments":
        """Return the moments of vectors ``samples (..., size)``, over all axes but the last; there may be none."""
        flat = samples.detach().reshape(math.prod(samples.shape[:-1]), samples.shape[-1]).double()
        mean = flat.sum(0) / max(flat.shape[0], 1)
        count = torch.full((), float(flat.shape[0]), dtype=torch.float64, device=flat.device)
        return cls(count, mean, (flat - mean).square().sum(0))

    def std(self) -> torch.Tensor:
        """Return the population's standard deviation ``(...)``; zeros without samples."""
        return (self.m2 / self.count.clamp(min=1.0)).sqrt()

    def merge(self, other: "Moments") -> "Moments":
        """Return the moments of the union, exact for any split of the data, an empty part included.

        Chan, Golub and LeVeque 1983, "Algorithms for computing the sample variance", equation 2.1.
        """
        count = self.count + other.count
        weight = other.count / count.clamp(min=1.0)
        difference = other.mean - self.mean
        mean = self.mean + weight * difference
        return Moments(count, mean, self.m2 + other.m2 + weight * self.count * difference.square())

    def pack(self) -> torch.Tensor:
        """Return ``(1 + 2 * size,)`` float64: count, mean, m2, to be sent to other ranks in one piece."""
        return torch.cat([part.double().reshape(-1) for part in (self.count, self.mean, self.m2)])

    @classmethod
    def unpack(cls, packed: torch.Tensor, shape: Sequence[int]) -> "Moments":
        """The inverse of ``pack``; ``shape`` is that of one sample."""
        size = math.prod(shape)
        whole = tuple(shape)  # which is () where a sample is one number
        return cls(packed[0], packed[1 : 1 + size].reshape(whole), packed[1 + size :].reshape(whole))


def merge_over_ranks(parts: Sequence[Moments], comm: Comm) -> list[Moments]:
    """Return each of this rank's moments merged with the other ranks' of the same place: one exchange for all.

    The result is the same on every rank, bit for bit.
    """
    packed = [moments.pack() for moments in parts]
    gathered = comm.gather(torch.cat(packed), "moments")  # (world_size, sum of sizes)
    by_part = gathered.split([each.shape[0] for each in packed], dim=1)
    return [
        reduce(Moments.merge, (Moments.unpack(row, moments.mean.shape) for row in rows))
        for rows, moments in zip(by_part, parts, strict=True)
    ]
