"""Running mean and standard deviation of observations, merged exactly once per iteration."""

import torch
from torch import nn

from lockstep.learn.torch.statistics import Moments


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
