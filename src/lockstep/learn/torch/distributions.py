"""Action distributions: what the actor's last layer means."""

import math
from typing import Protocol, Self

import torch

HALF_LOG_TWO_PI = 0.5 * math.log(2.0 * math.pi)


class Distribution(Protocol):
    """A batch of action distributions; the leading axes are called ``...`` below."""

    def sample(self, noise: torch.Tensor) -> torch.Tensor:
        """Return actions made of pre-drawn noise ``(..., num_noise)`` of the kind the policy head names."""

    def mode(self) -> torch.Tensor:
        """Return the most likely action."""

    def log_prob(self, action: torch.Tensor) -> torch.Tensor:
        """Return ``(...)`` log densities or log probabilities."""

    def entropy(self) -> torch.Tensor:
        """Return ``(...)`` entropies in nats."""

    def kl_from(self, old: Self) -> torch.Tensor:
        """Return ``(...)`` divergences KL(old || self) in nats."""

    def pack(self) -> torch.Tensor:
        """Return ``(..., num_parameters)``: what ``unpack`` of the class makes the same distribution from."""


class Gaussian:
    """Independent normals: ``mean (..., size)`` and ``log_std`` of a shape that broadcasts to it."""

    def __init__(self, mean: torch.Tensor, log_std: torch.Tensor) -> None:
        self.mean, self.log_std = mean, log_std

    def sample(self, noise: torch.Tensor) -> torch.Tensor:
        """Scale and shift standard normals ``(..., size)``."""
        return self.mean + self.log_std.exp() * noise

    def mode(self) -> torch.Tensor:
        """Return the mean."""
        return self.mean

    def log_prob(self, action: torch.Tensor) -> torch.Tensor:
        """Return the log density of ``action (..., size)``."""
        deviation = (action - self.mean) * (-self.log_std).exp()
        return (-0.5 * deviation.square() - self.log_std - HALF_LOG_TWO_PI).sum(-1)

    def entropy(self) -> torch.Tensor:
        """Return the differential entropy."""
        return (self.log_std + 0.5 + HALF_LOG_TWO_PI).expand_as(self.mean).sum(-1)

    def kl_from(self, old: "Gaussian") -> torch.Tensor:
        """Return KL(old || self) in closed form."""
        log_ratio = old.log_std - self.log_std
        distance = (old.mean - self.mean) * (-self.log_std).exp()
        return (0.5 * ((2.0 * log_ratio).exp() + distance.square() - 1.0) - log_ratio).sum(-1)

    def pack(self) -> torch.Tensor:
        """Return ``(..., 2 * size)``."""
        return torch.cat((self.mean, self.log_std.expand_as(self.mean)), dim=-1)

    @classmethod
    def unpack(cls, packed: torch.Tensor) -> "Gaussian":
        """The inverse of ``pack``."""
        return cls(*packed.chunk(2, dim=-1))


class Categorical:
    """One of ``size`` choices with the given ``logits (..., size)``."""

    def __init__(self, logits: torch.Tensor) -> None:
        self.log_probs = torch.log_softmax(logits, dim=-1)

    def sample(self, noise: torch.Tensor) -> torch.Tensor:
        """Invert the cumulative distribution at uniforms ``(..., 1)`` in [0, 1)."""
        cumulative = self.log_probs.exp().cumsum(-1)
        # Their sum is 1 only to rounding; measured against it, the noise never points past the last possible choice.
        return (cumulative <= noise * cumulative[..., -1:]).sum(-1)

    def mode(self) -> torch.Tensor:
        """Return the likeliest choice."""
        return self.log_probs.argmax(-1)

    def log_prob(self, action: torch.Tensor) -> torch.Tensor:
        """Return the log probability of the choices ``action (...)``."""
        return self.log_probs.gather(-1, action.unsqueeze(-1)).squeeze(-1)

    def entropy(self) -> torch.Tensor:
        """Return the Shannon entropy."""
        return -(self.log_probs.exp() * self.log_probs).sum(-1)

    def kl_from(self, old: "Categorical") -> torch.Tensor:
        """Return KL(old || self)."""
        return (old.log_probs.exp() * (old.log_probs - self.log_probs)).sum(-1)

    def pack(self) -> torch.Tensor:
        """Return ``(..., size)`` log probabilities."""
        return self.log_probs

    @classmethod
    def unpack(cls, packed: torch.Tensor) -> "Categorical":
        """The inverse of ``pack``."""
        return cls(packed)
