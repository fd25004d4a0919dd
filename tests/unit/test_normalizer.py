"""Running moments: numbers worked out by hand, exact merging, and merging over ranks."""

import itertools
import math

import pytest
import torch

from lockstep.distributed.torch_comm import SoloComm
from lockstep.learn.torch.normalizer import Identity, Normalizer
from lockstep.learn.torch.statistics import Moments, merge_over_ranks, standardise
from tests.unit.learner_fixtures import Meeting, on_every_rank, thread_comm


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64).unsqueeze(1)


def assert_moments(moments: Moments, count: float, mean: list[float], m2: list[float]) -> None:
    assert moments.count.item() == count
    assert moments.mean.tolist() == pytest.approx(mean, rel=1e-12, abs=1e-12)
    assert moments.m2.tolist() == pytest.approx(m2, rel=1e-12, abs=1e-12)


def test_moments_by_hand() -> None:
    # Columns (1, 3, 8) and (2, 2, 2): means 4 and 2, squared deviations 9 + 1 + 16 and 0.
    moments = Moments.of(torch.tensor([[1.0, 2.0], [3.0, 2.0], [8.0, 2.0]]))
    assert_moments(moments, 3, [4, 2], [26, 0])
    assert moments.mean.dtype == moments.m2.dtype == moments.count.dtype == torch.float64


def test_leading_axes_are_samples() -> None:
    assert_moments(Moments.of(column(1, 3, 8, 0).reshape(2, 2, 1)), 4, [3], [38])  # 4 + 0 + 25 + 9


def test_merging_by_hand() -> None:
    # 1, 3 and 5, 7, 9: mean 5, squared deviations 16 + 4 + 0 + 4 + 16.
    assert_moments(Moments.of(column(1, 3)).merge(Moments.of(column(5, 7, 9))), 5, [5], [40])


def test_an_empty_part_changes_nothing() -> None:
    some, none = Moments.of(column(1, 3)), Moments.of(column())
    assert_moments(none, 0, [0], [0])
    assert_moments(some.merge(none), 2, [2], [2])
    assert_moments(none.merge(some), 2, [2], [2])
    assert_moments(none.merge(none), 0, [0], [0])


@pytest.mark.parametrize("offset", [0.0, 1e6])
def test_unequal_parts_merge_to_the_pooled_moments(offset: float) -> None:
    generator = torch.Generator().manual_seed(1)
    sizes = [1, 2, 500, 3, 64, 1, 256]
    shifts = [0.0, 5.0, -1.0, 100.0, 0.5, 3.0, 2.0]
    parts = [
        torch.randn((size, 3), generator=generator, dtype=torch.float64) + shift + offset
        for size, shift in zip(sizes, shifts, strict=True)
    ]
    pooled = torch.cat(parts)
    # Each order of merging rounds differently, none loses anything.
    for order in itertools.islice(itertools.permutations(parts), 0, None, 997):
        merged = Moments.of(order[0])
        for part in order[1:]:
            merged = merged.merge(Moments.of(part))
        assert merged.count.item() == sum(sizes)
        torch.testing.assert_close(merged.mean, pooled.mean(0), rtol=1e-12, atol=1e-12)
        variance = merged.m2 / merged.count
        torch.testing.assert_close(variance, pooled.var(0, correction=0), rtol=1e-9 if offset else 1e-12, atol=0)


def test_packed_and_unpacked_is_the_same() -> None:
    moments = Moments.of(torch.tensor([[1.0, 2.0], [3.0, 7.0]]))
    assert moments.pack().tolist() == [2, 2, 4.5, 2, 12.5]
    assert_moments(Moments.unpack(moments.pack(), (2,)), 2, [2, 4.5], [2, 12.5])


# --- the normaliser ------------------------------------------------------------------------------------------------


def test_until_the_first_merge_it_is_the_identity() -> None:
    samples = torch.tensor([[1.0, -200.0]])
    assert torch.equal(Normalizer(2)(samples), samples)


def test_normalised_by_mean_and_standard_deviation() -> None:
    normalizer = Normalizer(1)
    normalizer.merge_(Moments.of(column(1, 3)))
    # Mean 2, standard deviation 1 (of the population), and 0.01 in case it were 0.
    assert normalizer(column(2, 3.01)).flatten().tolist() == pytest.approx([0.0, 1.0], abs=1e-12)
    normalizer.merge_(Moments.of(column(5, 7, 9)))
    # Mean 5, variance 40 / 5.
    assert normalizer(column(5, 5 + math.sqrt(8) + 0.01)).flatten().tolist() == pytest.approx([0.0, 1.0], abs=1e-12)
    assert normalizer.count.item() == 5


def test_the_count_is_exact_after_many_merges() -> None:
    normalizer = Normalizer(1)
    for _ in range(1000):
        normalizer.merge_(Moments.of(column(1, 3, 8)))
    # Each batch has mean 4 and squared deviations 26.
    assert normalizer.count.item() == 3000
    assert normalizer.mean.item() == pytest.approx(4, rel=1e-12)
    assert normalizer.m2.item() == pytest.approx(26000, rel=1e-12)


def test_forward_changes_nothing_and_keeps_the_dtype() -> None:
    normalizer = Normalizer(1).train()
    normalizer.merge_(Moments.of(column(1, 3)))
    before = {name: buffer.clone() for name, buffer in normalizer.state_dict().items()}
    for dtype in (torch.float32, torch.float64):
        assert normalizer(torch.full((4, 5, 1), 1e6, dtype=dtype)).dtype == dtype
    assert all(torch.equal(buffer, before[name]) for name, buffer in normalizer.state_dict().items())
    assert before.keys() == {"count", "mean", "m2"}
    assert list(normalizer.parameters()) == []


def test_a_constant_entry_stays_finite() -> None:
    normalizer = Normalizer(1)
    normalizer.merge_(Moments.of(column(7, 7, 7)))
    assert normalizer(column(7, 7.01)).flatten().tolist() == pytest.approx([0.0, 1.0], abs=1e-12)


def test_the_identity_takes_no_notice() -> None:
    identity = Identity()
    identity.merge_(Moments.of(column(1, 3)))
    assert torch.equal(identity(column(5)), column(5))
    assert identity.state_dict() == {}


# --- over ranks ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(4, 9), (1, 20), (6, 0), (0, 6)])
def test_ranks_with_shifted_and_unequal_data_get_the_pooled_moments(sizes: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(2)
    wide = [torch.randn((size, 3), generator=generator, dtype=torch.float64) + 10 * size for size in sizes]
    narrow = [part[:, :1] * 2 for part in wide]
    meeting = Meeting(2)
    results = on_every_rank(
        meeting,
        lambda rank: merge_over_ranks([Moments.of(wide[rank]), Moments.of(narrow[rank])], thread_comm(rank, meeting)),
    )
    for index, parts in enumerate((wide, narrow)):
        pooled = torch.cat(parts)
        assert_moments(
            results[0][index],
            sum(sizes),
            pooled.mean(0).tolist(),
            (pooled.var(0, correction=0) * sum(sizes)).tolist(),
        )
        assert torch.equal(results[0][index].pack(), results[1][index].pack())


def test_a_single_rank_keeps_its_own_moments() -> None:
    (merged,) = merge_over_ranks([Moments.of(column(1, 3))], SoloComm())
    assert_moments(merged, 2, [2], [2])


def test_standardise() -> None:
    # Mean 2, standard deviation 1.
    advantages = torch.tensor([[1.0, 3.0]])
    standardised = standardise(advantages, Moments.of(column(1, 3)))
    assert standardised.dtype == torch.float32
    assert standardised.flatten().tolist() == pytest.approx([-1.0, 1.0], abs=1e-6)
    assert standardise(torch.tensor([5.0]), Moments.of(column(5, 5))).item() == 0.0
