"""Dealing a rollout into minibatches whose union over ranks does not depend on the number of ranks."""

from collections.abc import Iterator
from typing import NamedTuple, cast

import array_api_compat.torch as xp
import torch

from lockstep.core.rng import Stream
from lockstep.learn.torch.networks import PolicyState


class Batch(NamedTuple):
    """Samples with leading axes ``(num_samples,)``, or ``(num_steps, num_sequences)`` where order in time counts."""

    actor_observations: torch.Tensor  # (..., num_observations["actor"]) normalised
    critic_observations: torch.Tensor  # (..., num_observations["critic"]) normalised
    actions: torch.Tensor  # (...[, size])
    log_probs: torch.Tensor  # (...) of the actions under the policy that chose them
    distributions: torch.Tensor  # (..., num_parameters) that policy's, packed
    values: torch.Tensor  # (...)
    advantages: torch.Tensor  # (...)
    targets: torch.Tensor  # (...) what the value should have been
    done: torch.Tensor  # (...) bool


class Sequences(NamedTuple):
    """A minibatch, and the memories that its sequences start from (without a memory: not used)."""

    batch: Batch
    start: PolicyState


class Dealer:
    """Deals samples to minibatches by permutations from the counter stream.

    In each block of ``num_mini_batches`` consecutive global envs every time step sends one sample to each minibatch
    (recurrent: each whole env sequence goes to one minibatch). So a minibatch has the same samples wherever the envs
    live, and all minibatches have one size.

    Args:
        seed: the run's seed.
        env_ids: ``(num_envs,)`` int32 global ids of this rank's envs; the first is the first of a block.
        num_mini_batches: minibatches per epoch; divides the number of envs.
        recurrent: keep whole sequences together.
        chunk_size: samples in one part of a minibatch, at most.
    """

    def __init__(
        self, seed: int, env_ids: torch.Tensor, num_mini_batches: int, recurrent: bool, chunk_size: int
    ) -> None:
        if env_ids.shape[0] % num_mini_batches:
            raise ValueError(f"{env_ids.shape[0]} envs can't be dealt to {num_mini_batches} minibatches evenly")
        self._stream = Stream(seed, "train/minibatches", xp, env_ids.device)
        self._env_ids = env_ids
        self._num_mini_batches = num_mini_batches
        self._recurrent, self._chunk_size = recurrent, chunk_size

    def deal(self, batch: Batch, state: PolicyState, epoch: int) -> Iterator[Sequences]:
        """Yield the minibatches of an epoch, counted over the whole run, of a batch ``(num_steps, num_envs)``."""
        num_steps = batch.advantages.shape[0]
        if self._recurrent:
            for indices in self.sequence_indices(epoch):
                sequences = Batch(*(tensor.index_select(1, indices) for tensor in batch))
                yield Sequences(sequences, PolicyState(*(memory.index_select(1, indices) for memory in state)))
            return
        flat = Batch(*(tensor.flatten(0, 1) for tensor in batch))
        for indices in self.sample_indices(epoch, num_steps):
            yield Sequences(Batch(*(tensor.index_select(0, indices) for tensor in flat)), state)

    def chunks(self, minibatch: Sequences) -> Iterator[Sequences]:
        """Yield parts of a minibatch that fit a processor's cache, as views."""
        batch, start = minibatch
        if not self._recurrent:
            for parts in zip(*(tensor.split(self._chunk_size) for tensor in batch), strict=True):
                yield Sequences(Batch(*parts), start)
            return
        num_sequences = max(1, self._chunk_size // batch.advantages.shape[0])
        batches = zip(*(tensor.split(num_sequences, 1) for tensor in batch), strict=True)
        starts = zip(*(memory.split(num_sequences, 1) for memory in start), strict=True)
        for tensors, memories in zip(batches, starts, strict=True):
            yield Sequences(Batch(*tensors), PolicyState(*memories))

    def sample_indices(self, epoch: int, num_steps: int) -> torch.Tensor:
        """Return ``(num_mini_batches, num_steps * num_blocks)`` indices into a flattened ``(num_steps, num_envs)``."""
        envs = self._deal(epoch, num_steps)
        step_offset = torch.arange(num_steps, device=envs.device).reshape(-1, 1, 1) * self._env_ids.shape[0]
        # Each minibatch's row is read once per tensor of the batch, so it had better be small and in one piece.
        indices = (envs + step_offset).to(torch.int32).permute(2, 0, 1)
        return indices.flatten(1).contiguous()

    def sequence_indices(self, epoch: int) -> torch.Tensor:
        """Return ``(num_mini_batches, num_blocks)`` env indices."""
        return self._deal(epoch, 1)[0].T.contiguous()

    def _deal(self, epoch: int, num_deals: int) -> torch.Tensor:
        """Return ``(num_deals, num_blocks, num_mini_batches)``: which env each block sends to each minibatch."""
        bits = self._stream.bits(self._stream.counters(epoch, 1), self._env_ids, num_deals)
        # Spelled out, since a rank may have no envs at all.
        num_blocks = self._env_ids.shape[0] // self._num_mini_batches
        blocks = bits.reshape(num_deals, num_blocks, self._num_mini_batches)
        first_env = torch.arange(blocks.shape[1], device=blocks.device).unsqueeze(1) * self._num_mini_batches
        return cast(torch.Tensor, blocks.argsort(dim=-1, stable=True) + first_env)
