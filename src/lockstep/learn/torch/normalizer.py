"""Running mean and standard deviation of observations, merged exactly once per iteration."""

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Moments:
    """Count, mean and sum of squared deviations of a set of vectors, in float64."""

    count: torch.Tensor  # ()
    mean: torch.Tensor  # (size,)
    m2: torch.Tensor  # (size,)

    @classmethod
    def of(cls, samples: torch.Tensor) -> "Moments":
        """Return the moments of ``samples (..., size)``."""
        flat = samples.reshape(-1, samples.shape[-1]).double()
        mean = flat.sum(0) / max(flat.shape[0], 1)
        count = torch.full((), float(flat.shape[0]), dtype=torch.float64, device=flat.device)
        return cls(count, mean, (flat - mean).square().sum(0))

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
        """Return ``(1 + 2 * size,)``: count, mean, m2, to be sent to other ranks in one piece."""
        return torch.cat((self.count.reshape(1), self.mean, self.m2))

    @classmethod
    def unpack(cls, packed: torch.Tensor) -> "Moments":
        """The inverse of ``pack``."""
        size = (packed.shape[0] - 1) // 2
        return cls(packed[0], packed[1 : 1 + size], packed[1 + size :])


class Normalizer(nn.Module):
    """Shifts and scales vectors by the mean and standard deviation of all that was merged so far.

    Until the first merge it is the identity. ``forward`` never changes it: during a rollout and an update it is frozen.

    Args:
        size: length of the vectors.
        epsilon: added to the standard deviation, so that a constant entry stays finite.
    """

    count: torch.Tensor
    mean: torch.Tensor
    m2: torch.Tensor

    def __init__(self, size: int, epsilon: float = 1e-2) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(size, dtype=torch.float64))
        self.register_buffer("m2", torch.zeros(size, dtype=torch.float64))

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        """Return ``samples (..., size)`` normalised, in their own dtype."""
        std = (self.m2 / self.count.clamp(min=1.0)).sqrt()
        scale = torch.where(self.count > 0, 1.0 / (std + self.epsilon), 1.0)
        return (samples - self.mean.to(samples.dtype)) * scale.to(samples.dtype)

    @torch.no_grad()
    def merge_(self, moments: Moments) -> None:
        """Take up new data."""
        merged = Moments(self.count, self.mean, self.m2).merge(moments)
        self.count.copy_(merged.count)
        self.mean.copy_(merged.mean)
        self.m2.copy_(merged.m2)


class Identity(nn.Module):
    """What stands in for a normaliser that the config turned off."""

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        """Return ``samples`` as they are."""
        return samples

    def merge_(self, moments: Moments) -> None:
        """Ignore new data."""
