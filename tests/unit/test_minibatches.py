"""Dealing samples: each exactly once per epoch, blockwise, and the same whatever the number of ranks."""

from collections import Counter
from itertools import chain, pairwise

import pytest
import torch

from lockstep.learn.torch.minibatches import Batch, Dealer, Sequences
from lockstep.learn.torch.networks import PolicyState

NUM_STEPS = 5


def dealer(
    first_env: int, num_envs: int, num_mini_batches: int, recurrent: bool = False, chunk_size: int = 7
) -> Dealer:
    ids = torch.arange(first_env, first_env + num_envs, dtype=torch.int32)
    return Dealer(1, ids, num_mini_batches, recurrent, chunk_size)


def batch_of(first_env: int, num_envs: int) -> tuple[Batch, PolicyState]:
    """A batch whose every entry says which sample it is: 1000 * step + global env id."""
    names = 1000.0 * torch.arange(NUM_STEPS).unsqueeze(1) + torch.arange(first_env, first_env + num_envs)
    wide = names.unsqueeze(2).expand(-1, -1, 3).contiguous()
    memory = torch.arange(first_env, first_env + num_envs).reshape(1, -1, 1).expand(1, -1, 4).contiguous()
    batch = Batch(wide, wide, names, names, wide, names, names, names, names.bool())
    return batch, PolicyState(memory, memory)


def names(minibatch: Sequences) -> list[int]:
    """The samples of a minibatch; every tensor of it must tell the same."""
    found = minibatch.batch.advantages.flatten()
    for name, tensor in minibatch.batch._asdict().items():
        first = tensor if tensor.ndim == minibatch.batch.advantages.ndim else tensor[..., 0]
        assert torch.equal(first.flatten(), found.bool() if name == "done" else found)
    return found.long().tolist()


def deal(first_env: int, num_envs: int, num_mini_batches: int, recurrent: bool, epoch: int) -> list[Sequences]:
    batch, state = batch_of(first_env, num_envs)
    return list(dealer(first_env, num_envs, num_mini_batches, recurrent).deal(batch, state, epoch))


@pytest.mark.parametrize("recurrent", [False, True])
@pytest.mark.parametrize("num_mini_batches", [1, 2, 4, 8])
def test_every_sample_comes_up_once_per_epoch(num_mini_batches: int, recurrent: bool) -> None:
    minibatches = [names(minibatch) for minibatch in deal(0, 8, num_mini_batches, recurrent, epoch=3)]
    assert [len(minibatch) for minibatch in minibatches] == [NUM_STEPS * 8 // num_mini_batches] * num_mini_batches
    everything = [1000 * step + env for step in range(NUM_STEPS) for env in range(8)]
    assert sorted(chain.from_iterable(minibatches)) == everything


def test_every_block_sends_one_sample_per_step_to_each_minibatch() -> None:
    for minibatch in deal(0, 12, 4, recurrent=False, epoch=0):
        blocks = Counter((name // 1000, name % 1000 // 4) for name in names(minibatch))
        assert blocks == {(step, block): 1 for step in range(NUM_STEPS) for block in range(3)}


def test_every_block_sends_one_whole_sequence_to_each_minibatch_if_recurrent() -> None:
    for minibatch in deal(0, 12, 4, recurrent=True, epoch=0):
        assert minibatch.batch.advantages.shape == (NUM_STEPS, 3)
        envs = minibatch.batch.advantages[0].long()
        assert (envs // 4).tolist() == [0, 1, 2]
        assert minibatch.batch.advantages.long().tolist() == [
            (envs + 1000 * step).tolist() for step in range(NUM_STEPS)
        ]
        # Each sequence starts from the memory of its own env.
        assert torch.equal(minibatch.start.actor[0, :, 0], envs)
        assert torch.equal(minibatch.start.critic[0, :, 0], envs)


@pytest.mark.parametrize("recurrent", [False, True])
@pytest.mark.parametrize(
    ("num_mini_batches", "sizes"), [(4, (4, 4)), (4, (4, 12)), (2, (6, 2)), (1, (3, 5)), (2, (2,) * 4)]
)
def test_ranks_together_deal_as_one_process_does(
    num_mini_batches: int, sizes: tuple[int, ...], recurrent: bool
) -> None:
    for epoch in range(4):
        alone = deal(0, sum(sizes), num_mini_batches, recurrent, epoch)
        starts = [sum(sizes[:rank]) for rank in range(len(sizes))]
        ranks = [
            deal(start, size, num_mini_batches, recurrent, epoch) for start, size in zip(starts, sizes, strict=True)
        ]
        for index, whole in enumerate(alone):
            union = list(chain.from_iterable(names(minibatches[index]) for minibatches in ranks))
            assert sorted(union) == sorted(names(whole))
            assert len(set(union)) == len(union)


@pytest.mark.parametrize("recurrent", [False, True])
def test_epochs_and_seeds_deal_differently_and_repeatably(recurrent: bool) -> None:
    def first(seed: int, epoch: int) -> list[int]:
        ids = torch.arange(32, dtype=torch.int32)
        batch, state = batch_of(0, 32)
        minibatch = next(Dealer(seed, ids, 4, recurrent, 7).deal(batch, state, epoch))
        return sorted(names(minibatch))

    deals = [first(1, epoch) for epoch in range(6)]
    assert all(one != two for one, two in pairwise(deals))
    assert len({tuple(one) for one in deals}) == 6
    assert first(1, 2) == deals[2]
    assert first(2, 2) != deals[2]


def test_steps_of_one_epoch_deal_differently() -> None:
    (minibatch, *_) = deal(0, 32, 4, recurrent=False, epoch=0)
    by_step: dict[int, set[int]] = {}
    for name in names(minibatch):
        by_step.setdefault(name // 1000, set()).add(name % 1000)
    assert len({frozenset(envs) for envs in by_step.values()}) == NUM_STEPS


def test_no_env_prefers_a_minibatch() -> None:
    indices = dealer(0, 4, 4).sample_indices(0, 4000)  # (num_mini_batches, 4000) of one block
    counts = torch.stack([(row % 4).bincount(minlength=4) for row in indices])
    # Expected 1000 each; one standard deviation is sqrt(4000 * 1/4 * 3/4) = 27.
    assert ((counts - 1000).abs() < 5 * 27).all()


def test_epoch_numbers_beyond_32_bits_are_dealt_too() -> None:
    late = [names(minibatch) for minibatch in deal(0, 8, 4, recurrent=False, epoch=2**31 - 2)]
    assert len(set(chain.from_iterable(late))) == NUM_STEPS * 8


def test_envs_that_cannot_be_dealt_evenly_are_refused() -> None:
    with pytest.raises(ValueError, match="6 envs can't be dealt to 4 minibatches"):
        dealer(0, 6, 4)


@pytest.mark.parametrize("chunk_size", [1, 7, 10, 1000])
def test_chunks_are_views_that_cover_the_minibatch(chunk_size: int) -> None:
    batch, state = batch_of(0, 8)
    one = dealer(0, 8, 2, chunk_size=chunk_size)
    (minibatch, _) = one.deal(batch, state, 0)
    chunks = list(one.chunks(minibatch))
    assert [len(names(chunk)) <= chunk_size for chunk in chunks] == [True] * len(chunks)
    assert list(chain.from_iterable(names(chunk) for chunk in chunks)) == names(minibatch)
    storage = minibatch.batch.advantages.untyped_storage().data_ptr()
    assert all(chunk.batch.advantages.untyped_storage().data_ptr() == storage for chunk in chunks)


@pytest.mark.parametrize(("chunk_size", "sequences"), [(1, [1, 1, 1, 1]), (11, [2, 2]), (15, [3, 1]), (1000, [4])])
def test_recurrent_chunks_are_whole_sequences(chunk_size: int, sequences: list[int]) -> None:
    batch, state = batch_of(0, 8)
    one = dealer(0, 8, 2, recurrent=True, chunk_size=chunk_size)
    (minibatch, _) = one.deal(batch, state, 0)
    chunks = list(one.chunks(minibatch))
    assert [chunk.batch.advantages.shape for chunk in chunks] == [(NUM_STEPS, number) for number in sequences]
    assert sorted(chain.from_iterable(names(chunk) for chunk in chunks)) == sorted(names(minibatch))
    for chunk in chunks:
        assert torch.equal(chunk.start.actor[0, :, 0].float(), chunk.batch.advantages[0])
        assert torch.equal(chunk.start.critic[0, :, 0].float(), chunk.batch.advantages[0])
