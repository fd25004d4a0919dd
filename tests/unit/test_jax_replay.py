"""The replay as a ring, and batches that are the same wherever the envs live."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy
import pytest

from lockstep.learn.jax.replay import Experience, Layout, Places, SampleNoise, Sampler, empty_memory, remember

SIZES = {"actor": 2, "critic": 3}


@pytest.fixture(autouse=True)
def _float64(double_precision: None) -> None:
    """As in a training."""


def ids_of(first: int, count: int) -> jax.Array:
    return jnp.arange(first, first + count, dtype=jnp.int32)


def drawn(sampler: Sampler, env_ids: jax.Array, num_updates: int, num_remembered: int) -> Places:
    """Return the places of many batches, each array with a leading axis of updates."""
    draw = jax.jit(jax.vmap(lambda update: sampler.draw(env_ids, update, jnp.array(num_remembered))))
    places: Places = jax.tree.map(numpy.asarray, draw(jnp.arange(num_updates, dtype=jnp.int32)))
    return places


def pairs_of(places: Places) -> list[tuple[int, int]]:
    """Return (global env id, slot) of every sample of real envs."""
    slots = places.slots
    ids = numpy.broadcast_to(places.env_ids[..., None], slots.shape)
    pairs = zip(ids.ravel().tolist(), slots.ravel().tolist(), strict=True)
    return [(env_id, slot) for env_id, slot in pairs if env_id >= 0]


def test_steps_come_out_as_they_went_in() -> None:
    generator = numpy.random.default_rng(0)
    widths = {"actor_observations": (2,), "critic_observations": (3,), "actions": (1,), "rewards": ()}
    widths |= {"next_actor_observations": (2,), "next_critic_observations": (3,)}
    parts = {name: jnp.asarray(generator.normal(size=(4, 5, *width))) for name, width in widths.items()}
    steps = Experience(**parts, terminated=jnp.asarray(generator.random((4, 5)) < 0.5))
    layout = Layout(SIZES, 1, jnp.float64)
    back = layout.unpack(layout.pack(steps))
    assert back.terminated.dtype == jnp.bool_
    for name, expected in steps._asdict().items():
        numpy.testing.assert_array_equal(getattr(back, name), expected, err_msg=name)


def test_the_ring_keeps_the_newest_steps_of_each_env() -> None:
    layout = Layout({"actor": 1, "critic": 1}, 1, jnp.float64)
    memory, add = empty_memory(3, 6, layout), jax.jit(remember)
    for first_step in range(0, 10, 2):
        # Column c of env e at step t is 100 e + t + c / 10.
        steps, envs = jnp.arange(first_step, first_step + 2.0)[:, None, None], jnp.arange(3.0)[None, :, None]
        memory = add(memory, 100 * envs + steps + jnp.arange(layout.width) / 10, jnp.array(first_step))
    kept = numpy.asarray(memory)
    assert kept.shape == (3, 6, layout.width)
    for env in range(3):
        # Steps 4 to 9 are left: 6, 7, 8 and 9 lie where 0, 1, 2 and 3 did.
        assert kept[env, :, 0].tolist() == [100 * env + step for step in (6, 7, 8, 9, 4, 5)]
        numpy.testing.assert_allclose(kept[env, :, 3] - kept[env, :, 0], 0.3)
    with pytest.raises(ValueError, match="a memory of 6 steps per env can't take 4"):
        remember(memory, jnp.zeros((4, 3, layout.width)), jnp.array(0))


def test_a_batch_is_read_from_the_places_it_was_dealt() -> None:
    memory = jnp.arange(4 * 5, dtype=jnp.float64).reshape(4, 5, 1)  # 5 row + slot
    memory = memory.at[1].set(jnp.nan)
    places = Places(jnp.array([8, -1]), jnp.array([3, 1]), jnp.array([[0, 4], [2, 2]]))
    assert places.of(memory)[:, 0].tolist() == [15, 19, 0, 0]
    assert places.weights(jnp.float32).tolist() == [1, 1, 0, 0]


@pytest.mark.parametrize(
    ("total_envs", "batch_size", "shares"),
    [(8, 24, (8,)), (8, 8, (5, 3)), (12, 4, (6, 3, 0, 3)), (12, 1, (12,))],
)
def test_the_union_of_the_ranks_parts_is_the_batch_of_one_rank(
    total_envs: int, batch_size: int, shares: tuple[int, ...]
) -> None:
    sampler = Sampler(7, total_envs, batch_size)
    whole = pairs_of(drawn(sampler, ids_of(0, total_envs), 3, 50))
    assert len(whole) == 3 * batch_size
    parts, first = [], 0
    for share in shares:
        # Padded to the largest share, as the ranks of a mesh are.
        padded = jnp.concatenate((ids_of(first, share), jnp.full(max(shares) - share, -1, jnp.int32)))
        parts.extend(pairs_of(drawn(sampler, padded, 3, 50)))
        first += share
    assert sorted(parts) == sorted(whole)


@pytest.mark.parametrize(("total_envs", "batch_size"), [(4, 8), (8, 2)])
def test_samples_are_uniform_over_envs_and_the_steps_that_were_made(total_envs: int, batch_size: int) -> None:
    num_updates, num_remembered = 4000, 5
    pairs = pairs_of(drawn(Sampler(3, total_envs, batch_size), ids_of(0, total_envs), num_updates, num_remembered))
    counts = Counter(pairs)
    expected = num_updates * batch_size / (total_envs * num_remembered)
    assert set(counts) == {(env, slot) for env in range(total_envs) for slot in range(num_remembered)}
    # Each is binomial, with a standard deviation of about the root of its mean.
    assert max(abs(count - expected) for count in counts.values()) < 4.5 * expected**0.5


def test_batches_differ_and_follow_from_seed_and_number_alone() -> None:
    ids = ids_of(0, 4)
    batches = drawn(Sampler(3, 4, 16), ids, 3, 1000).slots
    assert not (batches[0] == batches[1]).any(axis=-1).all()
    assert not (batches[0] == drawn(Sampler(4, 4, 16), ids, 1, 1000).slots[0]).any(axis=-1).all()
    again = jax.jit(Sampler(3, 4, 16).draw)(ids, jnp.array(2, jnp.int32), jnp.array(1000))
    numpy.testing.assert_array_equal(again.slots, batches[2])


def test_a_very_long_memory_is_used_to_its_end() -> None:
    length = 2**31 - 1
    slots = drawn(Sampler(3, 1, 4096), ids_of(0, 1), 1, length).slots
    assert 0 <= slots.min() < length * 0.01
    assert length * 0.99 < slots.max() < length
    assert numpy.unique(slots & 1023).size > 900  # down to the last bits, where floats would run out of them


def test_the_noise_of_a_sample_follows_its_env() -> None:
    noise, sampler = SampleNoise(5, 3, jnp.float64), Sampler(5, 6, 12)

    def rows(ids: jax.Array, update: int) -> numpy.ndarray:
        number = jnp.array(update, jnp.int32)
        drawn_rows = jax.jit(noise.draw)(sampler.draw(ids, number, jnp.array(9)), number)
        return numpy.asarray(drawn_rows).reshape(-1, 2, 3)

    whole = rows(ids_of(0, 6), 4)
    numpy.testing.assert_array_equal(rows(ids_of(4, 2), 4), whole[4:])
    assert numpy.unique(numpy.concatenate((whole, rows(ids_of(0, 6), 5)))).size == 2 * whole.size


def test_what_can_not_be_dealt_evenly_is_refused() -> None:
    with pytest.raises(ValueError, match="a batch of 6 samples can't be dealt to 4 envs evenly"):
        Sampler(0, 4, 6)
    with pytest.raises(ValueError, match="3 envs of a rank are not whole blocks of 2"):
        Sampler(0, 8, 4).draw(ids_of(0, 3), jnp.array(0, jnp.int32), jnp.array(1))
