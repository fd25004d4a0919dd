"""Action distributions: what the actor's last layer means."""

import math
from typing import Protocol, Self

import jax
import jax.numpy as jnp

HALF_LOG_TWO_PI = 0.5 * math.log(2.0 * math.pi)


class Distribution(Protocol):
    """A batch of action distributions; the leading axes are called ``...`` below."""

    def sample(self, noise: jax.Array) -> jax.Array:
        """Return actions made of pre-drawn noise ``(..., num_noise)`` of the kind the policy head names."""

    def mode(self) -> jax.Array:
        """Return the most likely action."""

    def log_prob(self, action: jax.Array) -> jax.Array:
        """Return ``(...)`` log densities or log probabilities."""

    def entropy(self) -> jax.Array:
        """Return ``(...)`` entropies in nats."""

    def kl_from(self, old: Self) -> jax.Array:
        """Return ``(...)`` divergences KL(old || self) in nats."""

    def pack(self) -> jax.Array:
        """Return ``(..., num_parameters)``: what ``unpack`` of the class makes the same distribution from."""


class Gaussian:
    """Independent normals: ``mean (..., size)`` and ``log_std`` of a shape that broadcasts to it."""

    def __init__(self, mean: jax.Array, log_std: jax.Array) -> None:
        self.mean, self.log_std = mean, log_std

    def sample(self, noise: jax.Array) -> jax.Array:
        """Scale and shift standard normals ``(..., size)``."""
        return self.mean + jnp.exp(self.log_std) * noise

    def mode(self) -> jax.Array:
        """Return the mean."""
        return self.mean

    def log_prob(self, action: jax.Array) -> jax.Array:
        """Return the log density of ``action (..., size)``."""
        deviation = (action - self.mean) * jnp.exp(-self.log_std)
        return (-0.5 * jnp.square(deviation) - self.log_std - HALF_LOG_TWO_PI).sum(-1)

    def entropy(self) -> jax.Array:
        """Return the differential entropy."""
        return jnp.broadcast_to(self.log_std + 0.5 + HALF_LOG_TWO_PI, self.mean.shape).sum(-1)

    def kl_from(self, old: "Gaussian") -> jax.Array:
        """Return KL(old || self) in closed form."""
        log_ratio = old.log_std - self.log_std
        distance = (old.mean - self.mean) * jnp.exp(-self.log_std)
        return (0.5 * (jnp.exp(2.0 * log_ratio) + jnp.square(distance) - 1.0) - log_ratio).sum(-1)

    def pack(self) -> jax.Array:
        """Return ``(..., 2 * size)``."""
        return jnp.concatenate((self.mean, jnp.broadcast_to(self.log_std, self.mean.shape)), axis=-1)

    @classmethod
    def unpack(cls, packed: jax.Array) -> "Gaussian":
        """The inverse of ``pack``."""
        return cls(*jnp.split(packed, 2, axis=-1))


class Categorical:
    """One of ``size`` choices with the given ``logits (..., size)``."""

    def __init__(self, logits: jax.Array) -> None:
        self.log_probs = jax.nn.log_softmax(logits, axis=-1)

    def sample(self, noise: jax.Array) -> jax.Array:
        """Invert the cumulative distribution at uniforms ``(..., 1)`` in [0, 1); the choices are int32."""
        cumulative = jnp.cumsum(jnp.exp(self.log_probs), axis=-1)
        # Their sum is 1 only to rounding; measured against it, the noise never points past the last possible choice.
        return (cumulative <= noise * cumulative[..., -1:]).sum(-1, dtype=jnp.int32)

    def mode(self) -> jax.Array:
        """Return the likeliest choice, int32."""
        return jnp.argmax(self.log_probs, axis=-1).astype(jnp.int32)

    def log_prob(self, action: jax.Array) -> jax.Array:
        """Return the log probability of the choices ``action (...)``."""
        # A comparison instead of a look-up, whose gradient would be a scatter.
        is_chosen = action[..., None] == jnp.arange(self.log_probs.shape[-1], dtype=action.dtype)
        return jnp.where(is_chosen, self.log_probs, 0.0).sum(-1)

    def entropy(self) -> jax.Array:
        """Return the Shannon entropy."""
        return -(jnp.exp(self.log_probs) * self.log_probs).sum(-1)

    def kl_from(self, old: "Categorical") -> jax.Array:
        """Return KL(old || self)."""
        return (jnp.exp(old.log_probs) * (old.log_probs - self.log_probs)).sum(-1)

    def pack(self) -> jax.Array:
        """Return ``(..., size)`` log probabilities."""
        return self.log_probs

    @classmethod
    def unpack(cls, packed: jax.Array) -> "Categorical":
        """The inverse of ``pack``."""
        return cls(packed)
