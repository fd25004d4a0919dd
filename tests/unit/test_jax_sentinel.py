"""Checksums over raw bits in JAX, and what the sentinel says of a rank whose copy differs."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.core.errors import RunError
from lockstep.distributed.jax_mesh import RankMesh
from lockstep.distributed.jax_sentinel import Sentinel, checksum
from tests.unit.jax_fixtures import ranks_of

pytestmark = pytest.mark.usefixtures("double_precision")

DTYPES = [
    "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "complex64", "complex128",
    "int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64", "bool",
]  # fmt: skip
Say = Callable[[str, str], list[str]]

_sum = jax.jit(checksum)


def sum_of(array: Any) -> int:
    return int(_sum(array))


def random_bytes(num_bytes: int, dtype: Any) -> np.ndarray:
    limit = 2 if dtype == np.bool_ else 256
    return np.random.default_rng(3).integers(limit, size=num_bytes, dtype=np.uint8).view(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_single_bit_counts(dtype: str) -> None:
    array = random_bytes(16, jnp.dtype(dtype))
    seen = {sum_of(array)}
    num_bits = 1 if dtype == "bool" else 8
    for index in range(16):
        for bit in range(num_bits):
            changed = array.copy()
            changed.view(np.uint8)[index] ^= 1 << bit
            seen.add(sum_of(changed))
    assert len(seen) == 1 + 16 * num_bits


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "int64", "int8"])
def test_changes_do_not_cancel(dtype: str) -> None:
    array = np.arange(1, 7).astype(jnp.dtype(dtype))
    sums = [sum_of(array)]
    for first in range(6):
        for second in range(first):
            swapped, flipped, shifted = array.copy(), array.copy(), array.copy()
            swapped[[first, second]] = array[[second, first]]
            flipped[[first, second]] = -array[[first, second]]  # the highest bit of both, for floats
            shifted[first] += 1
            shifted[second] -= 1
            sums += [sum_of(swapped), sum_of(flipped), sum_of(shifted)]
    assert len(set(sums)) == 1 + 15 * 3


def test_zeros_give_the_published_numbers_of_splitmix64() -> None:
    # The first outputs of the generator for seed 0, of which the checksum of zeros is the sum.
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    for count in (1, 2, 3):
        assert sum_of(np.zeros(count)) == sum(published[:count]) % 2**64
    assert sum_of(np.zeros((0, 3))) == 0


def test_keys_and_small_integers_have_bits_too() -> None:
    assert len({sum_of(jax.random.key(seed)) for seed in range(5)}) == 5
    assert len({sum_of(jnp.asarray([value, 3], jnp.int4)) for value in range(-8, 8)}) == 16


def replicated(ranks: RankMesh) -> dict[str, Any]:
    tree: dict[str, Any] = ranks.replicate(
        {
            "parameters": {"actor": [np.ones((3, 2), np.float32)]},
            "optimizer": np.zeros(6),
            "counter": np.int32(3),
            "key": jax.random.key(1),
        }
    )
    return tree


def with_other_copies(array: Any, changes: dict[int, Any]) -> Any:
    """Return an array that claims to be replicated; some ranks have something else."""
    copies = [
        jax.device_put(changes.get(rank, np.asarray(shard.data)), shard.device)
        for rank, shard in enumerate(array.addressable_shards)
    ]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, copies)


def alone(text: str, tag: str) -> list[str]:
    raise AssertionError("one process has nobody to ask")


def line_of(sentinel: Sentinel, tree: Any, iteration: int = 40) -> str:
    with pytest.raises(RunError) as raised:
        sentinel.check(iteration, tree)
    assert raised.value.shared
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_equal_copies_pass() -> None:
    for num_ranks in (1, 2, 4):
        ranks = ranks_of(num_ranks)
        Sentinel(ranks, 1, alone).check(40, replicated(ranks))
        Sentinel(ranks, 1, alone).check(40, {})


def test_the_line_in_full() -> None:
    ranks = ranks_of(4)
    tree = replicated(ranks)
    weight = np.ones((3, 2), np.float32)
    weight[1, 1] = np.nextafter(np.float32(1), np.float32(2))
    tree["parameters"]["actor"][0] = with_other_copies(tree["parameters"]["actor"][0], {2: weight})
    sentinel = Sentinel(ranks, 10, alone)
    assert line_of(sentinel, tree) == (
        "ranks are out of step in iteration 40: parameters.actor.0 differs on rank 2 (of 4), and no other array does; "
        "look for what changes it from one rank's own data, such as a value that is not reduced under check_vma=False"
    )
    sentinel.check(50, replicated(ranks))
    sentinel.check(55, tree)  # not due
    assert "and no other array does (all were equal in iteration 50); look" in line_of(sentinel, tree, 60)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"counter": {1: np.int32(4), 3: np.int32(4)}}, "counter differs on ranks 1 and 3 (of 4), and no other array"),
        ({"counter": {1: np.int32(4), 3: np.int32(5)}}, "counter differs on ranks 1 and 3 (of 4), and no other array"),
        ({"counter": {rank: np.int32(4) for rank in (0, 1, 2)}}, "counter differs on rank 3 (of 4)"),
        (
            {"counter": {0: np.int32(4)}, "optimizer": {2: -np.zeros(6)}},
            "counter differs on rank 0 (of 4), and so does 1 other array",
        ),
    ],
)
def test_the_first_array_and_the_minority_are_named(changed: dict[str, dict[int, Any]], expected: str) -> None:
    ranks = ranks_of(4)
    tree = replicated(ranks)
    for name, changes in changed.items():
        tree[name] = with_other_copies(tree[name], changes)
    assert expected in line_of(Sentinel(ranks, 1, alone), tree)


def test_it_compares_when_due_or_told_to() -> None:
    ranks = ranks_of(2)
    sentinel = Sentinel(ranks, 3, alone)
    assert [iteration for iteration in range(1, 8) if sentinel.is_due(iteration)] == [3, 6]
    assert sentinel.is_due(1, force=True)
    assert not Sentinel(ranks, 0, alone).is_due(3, force=True)
    assert not Sentinel(ranks_of(1), 1, alone).is_due(1, force=True)
    tree = with_other_copies(ranks.replicate(np.zeros(3)), {1: np.ones(3)})
    sentinel.check(1, tree)
    with pytest.raises(RunError, match=r"in iteration 1: the array differs on rank 1 \(of 2\)"):
        sentinel.check(1, tree, force=True)


def test_a_64_bit_sum_needs_no_64_bit_types_around_it() -> None:
    ranks = ranks_of(2)
    with jax.enable_x64(False):
        tree = ranks.replicate(np.zeros(3, np.float32))
        Sentinel(ranks, 1, alone).check(1, tree)
        with pytest.raises(RunError, match="the array differs"):
            Sentinel(ranks, 1, alone).check(1, with_other_copies(tree, {1: np.ones(3, np.float32)}))


class OfTwoProcesses(RankMesh):
    """A mesh that is said to belong to two processes; the other one's words are given to the sentinel."""

    is_multiprocess = True


def test_processes_in_other_iterations_or_with_other_arrays_are_named() -> None:
    ranks = OfTwoProcesses(ranks_of(2).mesh)
    tree = replicated(ranks)

    def with_other(other: Say) -> str:
        own: list[str] = []

        def gather_text(text: str, tag: str) -> list[str]:
            own.append(text)
            return [text, *other(text, tag)]

        return line_of(Sentinel(ranks, 1, gather_text), tree)

    assert with_other(lambda text, tag: [text.replace("40 ", "41 ")]) == (
        "processes are out of step: process 1 is in iteration 41, process 0 in iteration 40; look for a loop that one "
        "process left early"
    )

    def without_counter(text: str, tag: str) -> list[str]:
        if tag == "sentinel":
            return ["40 0123456789abcdef"]
        return ["\n".join(line for line in text.split("\n") if not line.startswith("counter"))]

    assert with_other(without_counter) == (
        "processes are out of step in iteration 40: process 1 has key (key<fry> ()) where process 0 has counter "
        "(int32 ()); build the same state from the same config on every process"
    )
    Sentinel(ranks, 1, lambda text, tag: [text, text]).check(40, tree)
