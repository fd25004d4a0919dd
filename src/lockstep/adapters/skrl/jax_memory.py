"""What skrl's agents remember: rollouts, whose advantages all ranks normalise alike, and replays (JAX)."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from skrl.memories.jax import RandomMemory

from lockstep.adapters.skrl.jax_parts import SharedValueScaler, gather_moments, merged, no_moments
from lockstep.distributed.jax_guests import Exchange

_EPSILON = 1e-8  # as the library has it


class OwnMemory(RandomMemory):  # type: ignore[misc]
    """The library's memory, which draws from a generator of this rank's and writes in place."""

    memory_index: int
    filled: bool

    def __init__(self, **named: Any) -> None:
        super().__init__(**named)
        self.generator = np.random.default_rng(0)

    def reseed(self, seed: Sequence[int]) -> None:
        """Draw from here on what follows from some numbers."""
        self.generator = np.random.default_rng(list(seed))

    def sample(
        self, names: list[str], *, batch_size: int, mini_batches: int = 1, sequence_length: int = 1
    ) -> list[list[jax.Array]]:
        """Return ``mini_batches`` lists of samples, of each name; no sample comes twice."""
        size = len(self)
        indexes = self.generator.choice(size, min(size, batch_size), replace=False)
        samples: list[list[jax.Array]] = self.sample_by_index(names, indexes=indexes, mini_batches=mini_batches)
        return samples

    def add_samples(self, **tensors: Any) -> None:
        """Keep a step ``(num_envs, size)`` of every env, in the place of the oldest."""
        new = {name: tensor for name, tensor in tensors.items() if name in self.tensors and tensor is not None}
        old = {name: self.tensors[name] for name in new}
        self.tensors |= _written(old, new, self.memory_index)
        self.memory_index = (self.memory_index + 1) % self.memory_size
        self.filled = self.filled or self.memory_index == 0


class RolloutMemory(OwnMemory):
    """A rollout in which advantages are normalised over the samples of all ranks; the library does it on each alone.

    Attributes:
        value_scaler: of the agent; None if it has none.
    """

    def __init__(self, *, exchange: Exchange, **named: Any) -> None:
        super().__init__(**named)
        self.exchange = exchange
        self.value_scaler: SharedValueScaler | None = None
        self._values: Any = None

    def set_tensor_by_name(self, name: str, tensor: jax.Array) -> None:
        """Overwrite a tensor ``(num_steps, num_envs, size)``; an update does so with values, returns, advantages."""
        if name == "values":
            self._values = self.tensors["values"]  # as they were before any scaling
        elif name == "advantages":
            tensor = self._normalised_advantages()
        super().set_tensor_by_name(name, tensor)

    def _normalised_advantages(self) -> jax.Array:
        returns = self.tensors["returns"] if self.value_scaler is None else self.value_scaler.given
        advantages, self._values = returns - self._values, None
        (rows,) = gather_moments([advantages], self.exchange, "moments of advantages")
        moments = merged(no_moments((1,)), rows)
        mean, std = moments["mean"], np.sqrt(moments["m2"] / np.maximum(moments["count"], 1))
        normalised: jax.Array = (advantages - np.float32(mean[0])) / np.float32(std[0] + _EPSILON)
        return normalised


@partial(jax.jit, donate_argnums=0)
def _written(old: dict[str, jax.Array], new: dict[str, jax.Array], index: int) -> dict[str, jax.Array]:
    return {name: old[name].at[index].set(tensor.astype(old[name].dtype)) for name, tensor in new.items()}
