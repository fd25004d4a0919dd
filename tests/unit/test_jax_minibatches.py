"""Batches as rows of one matrix: what goes in comes out, padding without weight, chunks of one size."""

import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.learn.jax.minibatches import Batch, Dealer, PackedBatch, in_chunks, samples_per_pass

pytestmark = pytest.mark.usefixtures("double_precision")

NUM_STEPS, NUM_ENVS = 3, 4


def batch() -> Batch:
    """Every entry says which sample it is: 100 * step + env. The last env is padding, with nonsense in it."""
    names = 100.0 * np.arange(NUM_STEPS)[:, None] + np.arange(NUM_ENVS)
    names[:, 3] = np.nan
    wide = names[..., None] + np.array([0.0, 0.25])
    weights = np.broadcast_to(np.arange(NUM_ENVS) < 3, names.shape)
    arrays = (wide, wide + 0.5, wide, np.nan_to_num(names).astype(np.int32), *[names] * 4, names > 99, weights)
    return Batch(*(jnp.asarray(array) for array in arrays))._replace(weights=jnp.asarray(weights, jnp.float64))


def assert_samples(found: Batch, names: np.ndarray) -> None:
    """The samples of these names, in their dtypes; of those named -1 all entries are zero."""
    real = names >= 0
    kept = np.where(real, names, 0.0)
    for name, array in found._asdict().items():
        expected = {"done": kept > 99, "weights": real}.get(name, kept)
        if array.ndim > names.ndim:
            offset = np.array([0.0, 0.25]) + 0.5 * (name == "critic_observations")
            expected = np.where(real[..., None], kept[..., None] + offset, 0.0)
        assert np.array_equal(array, expected), name
        assert array.dtype == getattr(batch(), name).dtype, name


def test_samples() -> None:
    # Number 3 is of the padded env, 12 is past the end.
    found = PackedBatch(batch()).samples(jnp.array([9, 0, 3, 6, 12]))
    assert_samples(found, np.array([201.0, 0.0, -1.0, 102.0, -1.0]))


def test_sequences() -> None:
    found = PackedBatch(batch()).sequences(jnp.array([2, 3, 4]))
    assert_samples(found, np.array([[2.0, -1.0, -1.0], [102.0, -1.0, -1.0], [202.0, -1.0, -1.0]]))


@pytest.mark.parametrize(
    ("num_indices", "chunk_size", "shape"), [(10, 100, (1, 10)), (10, 5, (2, 5)), (10, 4, (3, 4)), (0, 4, (1, 0))]
)
def test_chunks_are_of_one_size_and_hold_everything_once(
    num_indices: int, chunk_size: int, shape: tuple[int, int]
) -> None:
    chunks = np.asarray(in_chunks(jnp.arange(num_indices), chunk_size, fill=99))
    assert chunks.shape == shape
    assert chunks.flatten()[:num_indices].tolist() == list(range(num_indices))
    assert set(chunks.flatten()[num_indices:]) <= {99}


def test_passes_on_a_cpu_fit_its_cache() -> None:
    assert samples_per_pass(8192, 64, "float32") == 2048
    assert samples_per_pass(8192, 64, "float64") == 1024
    assert samples_per_pass(100, 64, "float32") == 100
    assert samples_per_pass(8192, 10**6, "float32") == 256


def test_envs_that_are_no_whole_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="6 envs can't be dealt to 4 minibatches"):
        Dealer(1, 4).sequence_indices(jnp.arange(6, dtype=jnp.int32), jnp.int32(0), 1)
