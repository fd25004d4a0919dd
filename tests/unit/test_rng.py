"""The random streams: published vectors, independence of how numbers are asked for, and their distribution."""

import math
import warnings
from typing import Any

import array_api_compat.numpy
import array_api_compat.torch
import numpy as np
import pytest
import torch

from lockstep.core.rng import Stream, Words, as_int32, stream_seed, threefry_2x32

# Random123's known answers for threefry2x32 with 20 rounds (its file kat_vectors): counter, key, result.
KNOWN_ANSWERS = [
    ((0x00000000, 0x00000000), (0x00000000, 0x00000000), (0x6B200159, 0x99BA4EFE)),
    ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
    ((0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), (0xC4923A9C, 0x483DF7A0)),
]


@pytest.fixture(params=[array_api_compat.numpy, array_api_compat.torch], ids=["numpy", "torch"])
def xp(request: pytest.FixtureRequest) -> Any:
    return request.param


def words(xp: Any, pair: tuple[int, int]) -> Words:
    return Words(*(xp.asarray([as_int32(word)], dtype=xp.int32) for word in pair))


def int32(*values: int) -> torch.Tensor:
    return torch.tensor([as_int32(value) for value in values], dtype=torch.int32)


def stream(seed: int = 1, purpose: str = "test") -> Stream:
    return Stream(seed, purpose, array_api_compat.torch)


ALL_IDS = torch.arange(4096, dtype=torch.int32)


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN_ANSWERS)
def test_threefry_gives_the_published_numbers(
    xp: Any, counter: tuple[int, int], key: tuple[int, int], result: tuple[int, int]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # numpy would warn of an overflow
        low, high = threefry_2x32(xp, words(xp, key), words(xp, counter))
    assert (low.dtype, high.dtype) == (xp.int32, xp.int32)
    assert (int(low[0]) & 0xFFFFFFFF, int(high[0]) & 0xFFFFFFFF) == result


def test_as_int32_keeps_the_lowest_32_bits() -> None:
    assert [as_int32(value) for value in (0, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**32 + 5, -1, -(2**31))] == [
        0,
        2**31 - 1,
        -(2**31),
        -1,
        0,
        5,
        -1,
        -(2**31),
    ]


def test_what_an_env_sees_does_not_depend_on_who_asks_along() -> None:
    counters = int32(3, 4, 5, 6)
    everyone = stream().bits(counters, ALL_IDS, 3)
    assert everyone.shape == (3, 4, 4096)
    assert torch.equal(stream().bits(counters, int32(37), 3), everyone[:, :, 37:38])
    assert torch.equal(stream().bits(counters, int32(4000, 37, 1), 3), everyone[:, :, [4000, 37, 1]])
    assert torch.equal(stream().bits(int32(5), ALL_IDS, 3), everyone[:, 2:3])
    assert torch.equal(stream().bits(int32(6, 3), ALL_IDS, 3), everyone[:, [3, 0]])


def test_asking_for_more_columns_leaves_the_first_as_they_are() -> None:
    many = stream().bits(int32(0, 1), ALL_IDS, 8)
    for num_columns in range(9):
        assert torch.equal(stream().bits(int32(0, 1), ALL_IDS, num_columns), many[:num_columns])


def test_floats_are_laid_out_by_counter_env_and_column() -> None:
    for draw in (stream().uniform, stream().normal):
        floats = draw(int32(7, 8), int32(10, 11, 12), 5, torch.float64)
        assert floats.shape == (2, 3, 5)
        assert floats.dtype == torch.float64
        assert torch.equal(draw(int32(8), int32(12), 5, torch.float64)[0, 0], floats[1, 2])
        assert len(floats.unique()) == 30


def test_no_columns_is_allowed() -> None:
    assert stream().uniform(int32(0, 1), ALL_IDS, 0, torch.float32).shape == (2, 4096, 0)


SEEDS = [0, 1, 2, 3, 4, 2**32, 2**32 + 1, 2**63 - 1, 2**64 - 1]


def test_seeds_and_purposes_give_different_streams() -> None:
    made = [stream(seed) for seed in SEEDS] + [stream(1, purpose) for purpose in ("a", "b", "train/a", "")]
    tables = [one.uniform(int32(0), ALL_IDS, 4, torch.float64).flatten() for one in made]
    correlation = torch.corrcoef(torch.stack(tables)) - torch.eye(len(tables), dtype=torch.float64)
    # Of 16384 independent pairs, one standard deviation is 1 / 128; the largest of 78 stays below five.
    assert correlation.abs().max() < 5 / 128
    # "seed + rank" is the classic mistake: env k + 1 of one seed must not be env k of the next.
    streams = [one.bits(int32(0), ALL_IDS, 1).flatten() for one in made]
    assert len(torch.cat(streams).unique()) > 0.999 * len(made) * 4096


def test_neighbouring_envs_counters_and_columns_are_unrelated() -> None:
    table = stream().uniform(torch.arange(64, dtype=torch.int32), ALL_IDS[:64], 64, torch.float64)
    for axis in range(3):
        pair = torch.stack((table.narrow(axis, 0, 63).flatten(), table.narrow(axis, 1, 63).flatten()))
        assert abs(torch.corrcoef(pair)[0, 1]) < 5 / math.sqrt(pair.shape[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_uniforms_are_uniform(dtype: torch.dtype) -> None:
    number = 2**18
    values = stream().uniform(torch.arange(64, dtype=torch.int32), ALL_IDS, 1, dtype).flatten().double()
    assert values.shape == (number,)
    assert values.min() >= 0
    assert values.max() < 1
    # Standard deviations of the mean and of the mean square: sqrt(1 / 12 / n) and sqrt(4 / 45 / n).
    assert abs(values.mean() - 1 / 2) < 5 * math.sqrt(1 / 12 / number)
    assert abs(values.square().mean() - 1 / 3) < 5 * math.sqrt(4 / 45 / number)
    counts = torch.histc(values, bins=256, min=0, max=1)
    chi_square = ((counts - 1024).square() / 1024).sum()
    # 255 degrees of freedom: mean 255, standard deviation sqrt(510) = 22.6. Too even is wrong as well.
    assert 255 - 5 * 22.6 < chi_square < 255 + 5 * 22.6
    low_bits = (values * 2**24).long() & 255
    chi_square = ((low_bits.bincount(minlength=256) - 1024).square() / 1024).sum()
    assert 255 - 5 * 22.6 < chi_square < 255 + 5 * 22.6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_normals_are_normal(dtype: torch.dtype) -> None:
    values = stream().normal(torch.arange(64, dtype=torch.int32), ALL_IDS, 2, dtype).reshape(-1, 2).double()
    number = values.numel()
    # Moments 0, 1, 0, 3; their variances over n samples are 1, 2, 15 and 96.
    for power, (moment, variance) in enumerate([(0, 1), (1, 2), (0, 15), (3, 96)], start=1):
        assert abs((values**power).mean() - moment) < 5 * math.sqrt(variance / number)
    # 68.27 % within one standard deviation, 95.45 % within two.
    for width, share in ((1, 0.682689), (2, 0.954500)):
        spread = math.sqrt(share * (1 - share) / number)
        assert abs((values.abs() < width).double().mean() - share) < 5 * spread
    # Box and Muller's method makes pairs: neither the values nor their sizes go together.
    for pair in (values.T, values.square().T):
        assert abs(torch.corrcoef(pair)[0, 1]) < 5 / math.sqrt(values.shape[0])


class Fixed(Stream):
    """A stream whose bits are given."""

    def __init__(self, *rows: int) -> None:
        super().__init__(0, "fixed", array_api_compat.torch)
        self._rows = int32(*rows).reshape(-1, 1, 1)

    def bits(self, counters: Any, ids: Any, num_columns: int) -> Any:
        return self._rows[:num_columns]


def test_the_extreme_bits_stay_in_range() -> None:
    # The upper 24 bits count: all ones are 1 - 2**-24, the largest float32 below 1.
    table = Fixed(0xFFFFFFFF, 0x00000000, 0x80000000, 0x7FFFFFFF, 0x000000FF, 0x00000100)
    values = table.uniform(int32(0), int32(0), 6, torch.float32).flatten().tolist()
    assert values == [1 - 2**-24, 0.0, 0.5, 0.5 - 2**-24, 0.0, 2**-24]


def test_the_extreme_normals_are_finite() -> None:
    # u = 1 - 2**-24, v = 0: radius sqrt(-2 ln 2**-24) = sqrt(48 * 0.6931472) = 5.7681, angle 0. u = 0: radius 0.
    values = Fixed(0xFFFFFFFF, 0, 0, 0x40000000).normal(int32(0), int32(0), 4, torch.float32).flatten()
    assert values.tolist() == pytest.approx([5.7681, 0.0, 0.0, 0.0], abs=1e-4)
    # v = 1/4 turns by a right angle.
    assert Fixed(-1, 0x40000000).normal(int32(0), int32(0), 2, torch.float32).flatten().tolist() == pytest.approx(
        [0.0, 5.7681], abs=1e-4
    )


def test_counters_wrap_around_without_a_word(xp: Any) -> None:
    numbers = [as_int32(2**31 - 2 + offset) for offset in range(4)]  # ..., 2**31 - 1, -2**31, ...
    assert numbers[1] > 0 > numbers[2]
    table = Stream(1, "test", xp)
    counters = xp.asarray([*numbers, -1, 0], dtype=xp.int32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bits = np.asarray(table.bits(counters, xp.asarray([-1, 0, 2**31 - 1], dtype=xp.int32), 2))
    assert bits.dtype == np.int32
    assert len(np.unique(bits)) == 6 * 3 * 2


def test_stream_seed_is_a_hash_that_is_the_same_everywhere() -> None:
    # printf '1/policy' | b2sum --length 64: 8 bytes, read from the lowest on, without the lowest bit.
    assert stream_seed(1, "policy") == int.from_bytes(bytes.fromhex("d42aa2c504742f1e"), "little") >> 1
    seeds = {stream_seed(seed, purpose) for seed in range(50) for purpose in ("policy", "model")}
    assert len(seeds) == 100
    assert all(0 <= seed < 2**63 for seed in seeds)
