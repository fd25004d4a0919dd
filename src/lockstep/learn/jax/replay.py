"""A replay of each env's last steps, kept where the env lives, and batches that do not depend on where that is.

Every rank keeps the steps of its own envs. A batch is dealt to the envs by their global ids, and each env draws which
of its steps to give from its own random stream, so the union of the ranks' parts is the same for any number of ranks.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from lockstep.core.rng import Stream


class Experience(NamedTuple):
    """Env steps to learn from, with any leading axes."""

    actor_observations: jax.Array  # (..., num_observations["actor"]) raw
    critic_observations: jax.Array  # (..., num_observations["critic"]) raw
    actions: jax.Array  # (..., size)
    rewards: jax.Array  # (...)
    terminated: jax.Array  # (...) bool: the step ended the episode for good; the time limit alone does not
    next_actor_observations: jax.Array  # of what the step led to, before any reset
    next_critic_observations: jax.Array


class Layout:
    """How the steps of an env lie in one row of numbers each, so that a batch is read in one piece.

    Args:
        num_observations: sizes of the groups ``actor`` and ``critic``.
        action_size: entries of an action.
        dtype: of the numbers.
    """

    def __init__(self, num_observations: Mapping[str, int], action_size: int, dtype: DTypeLike) -> None:
        actor, critic = num_observations["actor"], num_observations["critic"]
        self._widths = (actor, critic, action_size, 1, 1, actor, critic)
        self.width = sum(self._widths)
        self.dtype = dtype

    def pack(self, steps: Experience) -> jax.Array:
        """Return ``(..., width)``."""
        columns = [
            part.astype(self.dtype).reshape(*steps.rewards.shape, width)
            for part, width in zip(steps, self._widths, strict=True)
        ]
        return jnp.concatenate(columns, axis=-1)

    def unpack(self, rows: jax.Array) -> Experience:
        """The inverse of ``pack``."""
        bounds = [sum(self._widths[: index + 1]) for index in range(len(self._widths) - 1)]
        steps = Experience(*jnp.split(rows, bounds, axis=-1))
        return steps._replace(rewards=steps.rewards[..., 0], terminated=steps.terminated[..., 0] > 0.5)


def empty_memory(num_envs: int, capacity: int, layout: Layout) -> jax.Array:
    """Return the memory ``(num_envs, capacity, width)`` of so many envs before their first step."""
    return jnp.zeros((num_envs, capacity, layout.width), layout.dtype)


def remember(memory: jax.Array, rows: jax.Array, first_step: jax.Array) -> jax.Array:
    """Return the memory with new steps in it, the oldest ones overwritten where it is full.

    Args:
        memory: ``(num_envs, capacity, width)``, a ring along its second axis.
        rows: ``(num_steps, num_envs, width)`` packed; ``num_steps`` divides ``capacity`` and ``first_step``.
        first_step: () integer, how many steps of each env were remembered before.
    """
    capacity, num_steps = memory.shape[1], rows.shape[0]
    if capacity % num_steps:
        raise ValueError(f"a memory of {capacity} steps per env can't take {num_steps} at a time")
    slot = (first_step % capacity).astype(jnp.int32)
    zero = jnp.zeros_like(slot)
    return jax.lax.dynamic_update_slice(memory, jnp.swapaxes(rows, 0, 1), (zero, slot, zero))


class Places(NamedTuple):
    """Where this rank's part of a batch comes from: ``samples_per_env`` steps of each of ``num_givers`` envs."""

    env_ids: jax.Array  # (num_givers,) int32 global ids; -1 is padding, which counts nowhere
    rows: jax.Array  # (num_givers,) int32 of the memory
    slots: jax.Array  # (num_givers, samples_per_env) int32 along the ring

    def of(self, memory: jax.Array) -> jax.Array:
        """Return the packed steps, ``(num_givers * samples_per_env, width)``; zeros for padding, whatever it holds."""
        rows = memory[self.rows[:, None], self.slots].reshape(self.slots.size, memory.shape[-1])
        return jnp.where(self._are_real()[:, None], rows, 0)

    def weights(self, dtype: DTypeLike) -> jax.Array:
        """Return ``(num_givers * samples_per_env,)``: 1, or 0 for padding."""
        return self._are_real().astype(dtype)

    def _are_real(self) -> jax.Array:
        return jnp.repeat(self.env_ids >= 0, self.slots.shape[1], total_repeat_length=self.slots.size)


class Sampler:
    """Deals the places of a batch to the envs of all ranks.

    Where there are fewer envs than places in a batch, each gives equally many samples. Where there are more, each block
    of consecutive global ids gives one, of the env that the stream chooses. So all batches have one size on each rank.

    Args:
        seed: the run's seed.
        total_envs: envs of all ranks.
        batch_size: samples of all ranks; a multiple or a divisor of ``total_envs``.
    """

    def __init__(self, seed: int, total_envs: int, batch_size: int) -> None:
        if batch_size % total_envs and total_envs % batch_size:
            raise ValueError(f"a batch of {batch_size} samples can't be dealt to {total_envs} envs evenly")
        self.samples_per_env = max(1, batch_size // total_envs)
        self.env_block = max(1, total_envs // batch_size)
        self._envs = Stream(seed, "train/replay_env", jnp)
        self._steps = Stream(seed, "train/replay_step", jnp)

    def draw(self, env_ids: jax.Array, update: jax.Array, num_remembered: jax.Array) -> Places:
        """Return where the samples of one batch come from: uniformly from all steps of all envs.

        Args:
            env_ids: ``(num_envs,)`` int32 global ids of this rank's envs, whole blocks; -1 is padding.
            update: () int32, which gradient step of the run the batch is for.
            num_remembered: () integer, steps that each env has in memory; at least 1.
        """
        counters = self._steps.counters(update, 1)
        rows = self._givers(env_ids, counters)
        givers = env_ids[rows]
        bits = self._steps.bits(counters, givers, self.samples_per_env)[:, 0]  # (samples_per_env, num_givers)
        # Whole numbers below num_remembered from 32 random bits each: exact in integers, whatever the floats are.
        unsigned = jax.lax.bitcast_convert_type(bits, jnp.uint32).astype(jnp.uint64)
        slots = (unsigned * num_remembered.astype(jnp.uint64)) >> 32
        return Places(givers, rows, slots.astype(jnp.int32).T)

    def _givers(self, env_ids: jax.Array, counters: jax.Array) -> jax.Array:
        """Return ``(num_givers,)`` int32: which of this rank's envs give samples."""
        num_envs, block = env_ids.shape[0], self.env_block
        if num_envs % block:
            raise ValueError(f"{num_envs} envs of a rank are not whole blocks of {block}")
        if block == 1:
            return jnp.arange(num_envs, dtype=jnp.int32)
        bits = self._envs.bits(counters, env_ids, 1)[0, 0].reshape(num_envs // block, block)
        first_of_block = jnp.arange(num_envs // block, dtype=jnp.int32) * block
        return first_of_block + jnp.argmin(bits, axis=1).astype(jnp.int32)


class SampleNoise:
    """Standard normals for every sample of a batch, keyed by the env that gave it: the same wherever it lives.

    Args:
        seed: the run's seed.
        num_columns: how many for each sample.
        dtype: float32 or float64.
    """

    def __init__(self, seed: int, num_columns: int, dtype: DTypeLike) -> None:
        self._stream = Stream(seed, "train/replay_noise", jnp)
        self._num_columns, self._dtype = num_columns, dtype

    def draw(self, places: Places, update: jax.Array) -> jax.Array:
        """Return ``(num_givers * samples_per_env, num_columns)`` for gradient step ``update`` of the run."""
        num_givers, samples_per_env = places.slots.shape
        num_columns = samples_per_env * self._num_columns
        noise = self._stream.normal(self._stream.counters(update, 1), places.env_ids, num_columns, self._dtype)
        return cast(jax.Array, noise).reshape(math.prod((num_givers, samples_per_env)), self._num_columns)
