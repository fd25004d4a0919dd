"""Moments of samples, merged exactly over the ranks of a mesh."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from lockstep.distributed.jax_collectives import AXIS_NAME, AxisName, all_gather, is_bound


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Moments:
    """Count, mean and sum of squared deviations from the mean of a set of samples, in float64; a pytree."""

    count: jax.Array  # () the sum of the weights
    mean: jax.Array  # (...) the shape of one sample
    m2: jax.Array  # (...)

    @classmethod
    def of(cls, samples: jax.Array, weights: jax.Array | None = None) -> "Moments":
        """Return the moments of vectors, over all axes but the last; there may be none.

        Args:
            samples: ``(..., size)``, of any dtype.
            weights: ``(...)``, how often each vector counts; 0 leaves it out, whatever it holds. None: once each.

        Raises:
            ValueError: JAX's 64-bit types are off, or the weights have another shape.
        """
        if jnp.result_type(float) != jnp.float64:
            raise ValueError("moments are float64, which JAX has switched off; use them inside jax.enable_x64(True)")
        if weights is None:
            weights = jnp.ones(samples.shape[:-1], jnp.float64)
        if weights.shape != samples.shape[:-1]:
            raise ValueError(
                f"weights have shape {weights.shape} and samples {samples.shape}; there must be one weight per vector, "
                f"{samples.shape[:-1]}"
            )
        weight = weights.astype(jnp.float64).reshape(-1, 1)  # (num_samples, 1)
        flat = samples.reshape(weight.shape[0], samples.shape[-1]).astype(jnp.float64)
        flat = jnp.where(weight > 0, flat, 0.0)
        count = weight.sum()
        mean = (weight * flat).sum(0) / _divisor(count)
        return cls(count, mean, (weight * (flat - mean) ** 2).sum(0))

    def std(self) -> jax.Array:
        """Return the population's standard deviation ``(...)``; zeros without samples."""
        return jnp.sqrt(self.m2 / _divisor(self.count))

    def merge(self, other: "Moments") -> "Moments":
        """Return the moments of the union, exact for any split of the data, an empty part included.

        Chan, Golub and LeVeque 1983, "Algorithms for computing the sample variance", equation 2.1.
        """
        count = self.count + other.count
        weight = other.count / _divisor(count)
        difference = other.mean - self.mean
        return Moments(count, self.mean + weight * difference, self.m2 + other.m2 + weight * self.count * difference**2)

    def pack(self) -> jax.Array:
        """Return ``(1 + 2 * size,)`` float64: count, mean, m2, to be sent to other ranks in one piece."""
        return jnp.concatenate([part.astype(jnp.float64).reshape(-1) for part in (self.count, self.mean, self.m2)])

    @classmethod
    def unpack(cls, packed: jax.Array, shape: Sequence[int]) -> "Moments":
        """The inverse of ``pack``; ``shape`` is that of one sample."""
        size, whole = math.prod(shape), tuple(shape)
        return cls(packed[0], packed[1 : 1 + size].reshape(whole), packed[1 + size :].reshape(whole))


def merge_over_ranks(parts: Sequence[Moments], axis_name: AxisName = AXIS_NAME) -> list[Moments]:
    """Return each of this rank's moments merged with the other ranks' of the same place: one exchange for all.

    The result is the same on every rank, bit for bit, and without an axis what it was.
    """
    if not is_bound(axis_name) or not parts:
        return list(parts)
    rows = all_gather(jnp.concatenate([moments.pack() for moments in parts]), axis_name)  # (num_ranks, sum of sizes)
    merged, start = [], 0
    for moments in parts:
        end = start + 1 + 2 * moments.mean.size
        merged.append(_merge_rows(rows[:, start:end], moments.mean.shape))
        start = end
    return merged


def _merge_rows(rows: jax.Array, shape: tuple[int, ...]) -> Moments:
    """Merge packed moments ``(num_ranks, 1 + 2 * size)``: ``Moments.merge`` for any number of parts at once."""
    every = jax.vmap(lambda row: Moments.unpack(row, shape))(rows)
    counts = every.count.reshape(-1, *(1 for _ in shape))  # (num_ranks, 1, ...)
    count = every.count.sum()
    # From the first rank's mean, so that a single rank's comes out as it went in.
    mean = every.mean[0] + (counts / _divisor(count) * (every.mean - every.mean[0])).sum(0)
    return Moments(count, mean, (every.m2 + counts * (every.mean - mean) ** 2).sum(0))


def _divisor(count: jax.Array) -> jax.Array:
    return jnp.where(count > 0, count, 1.0)
