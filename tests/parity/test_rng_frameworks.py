"""The random streams are one table: numpy, torch and JAX read the same numbers from it."""

from collections.abc import Iterator
from typing import Any

import array_api_compat.numpy
import array_api_compat.torch
import numpy as np
import pytest
import torch

from lockstep.core.rng import Stream, Words, as_int32, threefry_2x32

jax = pytest.importorskip("jax")

COUNTERS = [0, 1, -1, 2**31 - 1, -(2**31), 12345]
IDS = [0, 1, 37, 4095, -1, 2**31 - 1]


@pytest.fixture(autouse=True)
def _double_precision() -> Iterator[None]:
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)


def frameworks() -> dict[str, Any]:
    return {"numpy": array_api_compat.numpy, "torch": array_api_compat.torch, "jax": jax.numpy}


def ask(xp: Any, kind: str, num_columns: int, *dtype: Any) -> np.ndarray:
    stream = Stream(7, "parity", xp)
    counters, ids = xp.asarray(COUNTERS, dtype=xp.int32), xp.asarray(IDS, dtype=xp.int32)
    return np.asarray(getattr(stream, kind)(counters, ids, num_columns, *dtype))


@pytest.mark.parametrize(
    ("counter", "key", "result"),
    [
        # Random123's known answers for threefry2x32 with 20 rounds (its file kat_vectors).
        ((0x00000000, 0x00000000), (0x00000000, 0x00000000), (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
        ((0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_threefry_gives_the_published_numbers_in_jax(
    counter: tuple[int, int], key: tuple[int, int], result: tuple[int, int]
) -> None:
    def words(pair: tuple[int, int]) -> Words:
        return Words(*(jax.numpy.asarray([as_int32(word)], dtype=jax.numpy.int32) for word in pair))

    for function in (threefry_2x32, jax.jit(threefry_2x32, static_argnums=0)):
        low, high = function(jax.numpy, words(key), words(counter))
        assert (int(low[0]) & 0xFFFFFFFF, int(high[0]) & 0xFFFFFFFF) == result


@pytest.mark.parametrize("num_columns", [1, 2, 5])
def test_bits_are_the_same_everywhere(num_columns: int) -> None:
    tables = {name: ask(xp, "bits", num_columns) for name, xp in frameworks().items()}
    for name, table in tables.items():
        assert table.dtype == np.int32, name
        assert np.array_equal(table, tables["numpy"]), name
    assert len(np.unique(tables["numpy"])) == num_columns * len(COUNTERS) * len(IDS)


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_uniforms_are_bitwise_the_same_everywhere(precision: str) -> None:
    tables = {name: ask(xp, "uniform", 5, getattr(xp, precision)) for name, xp in frameworks().items()}
    for name, table in tables.items():
        assert table.dtype == precision, name
        assert table.tobytes() == tables["numpy"].tobytes(), name


@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 2e-6), ("float64", 4e-15)])
def test_normals_are_the_same_to_rounding(precision: str, tolerance: float) -> None:
    tables = {name: ask(xp, "normal", 5, getattr(xp, precision)) for name, xp in frameworks().items()}
    for name, table in tables.items():
        assert table.dtype == precision, name
        np.testing.assert_allclose(table, tables["numpy"], rtol=0, atol=tolerance, err_msg=name)


def test_a_compiled_draw_is_the_same() -> None:
    def draw(counters: Any, ids: Any) -> Any:
        return Stream(7, "parity", jax.numpy).uniform(counters, ids, 5, jax.numpy.float32)

    counters, ids = (jax.numpy.asarray(numbers, dtype=jax.numpy.int32) for numbers in (COUNTERS, IDS))
    expected = ask(array_api_compat.torch, "uniform", 5, torch.float32)
    assert np.asarray(jax.jit(draw)(counters, ids)).tobytes() == expected.tobytes()


def test_a_stream_is_compiled_with_a_traced_counter_again_and_again() -> None:
    # One stream serves several traces, and code outside of any: nothing of a trace may stay behind in it.
    stream = Stream(7, "parity", jax.numpy)
    ids = jax.numpy.asarray(IDS, dtype=jax.numpy.int32)

    def draw(first: Any) -> Any:
        return stream.uniform(stream.counters(first, 3), ids, 5, jax.numpy.float32)

    reference = Stream(7, "parity", array_api_compat.torch)
    for first in (0, 2**31 - 2, -1):
        counters = reference.counters(first, 3)
        expected = reference.uniform(counters, torch.tensor(IDS, dtype=torch.int32), 5, torch.float32).numpy()
        for function in (jax.jit(draw), jax.jit(draw), draw):
            assert np.asarray(function(jax.numpy.int32(first))).tobytes() == expected.tobytes()
        assert np.asarray(draw(first)).tobytes() == expected.tobytes()
        assert np.array_equal(stream.counters(np.int64(first), 3), counters)
