"""Moments in JAX: those of torch, with weights, and merged over ranks as if one rank had had all samples."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from lockstep.distributed import torch_moments
from lockstep.distributed.jax_mesh import SHARDED
from lockstep.distributed.jax_moments import Moments, merge_over_ranks
from tests.unit.jax_fixtures import NUM_RANKS, on_ranks

# Mean 2 and 5 over rows 1, 2, 3 and 2, 5, 8.
ROWS = np.array([[1.0, 2.0], [2.0, 5.0], [3.0, 8.0]])


moments_of = jax.jit(Moments.of)
merge = jax.jit(Moments.merge)


def listed(moments: Any) -> list[Any]:
    return [np.asarray(part).tolist() for part in (moments.count, moments.mean, moments.m2)]


@pytest.mark.usefixtures("double_precision")
class TestMoments:
    """With 64-bit types."""

    def test_by_hand(self) -> None:
        moments = moments_of(ROWS)
        assert listed(moments) == [3.0, [2.0, 5.0], [2.0, 18.0]]
        assert moments.std().tolist() == pytest.approx([(2 / 3) ** 0.5, 6**0.5])
        assert {str(part.dtype) for part in jax.tree.leaves(moments)} == {"float64"}

    def test_weights_leave_out_and_repeat(self) -> None:
        rows = jnp.asarray([[[1.0], [jnp.nan]], [[4.0], [jnp.inf]]])  # (2, 2, 1)
        assert listed(moments_of(rows, jnp.asarray([[1.0, 0.0], [2.0, 0.0]]))) == [3.0, [3.0], [6.0]]
        assert listed(moments_of(rows, jnp.asarray([[True, False], [True, False]]))) == [2.0, [2.5], [4.5]]
        nothing = moments_of(rows, jnp.zeros((2, 2)))
        assert listed(nothing) == [0.0, [0.0], [0.0]]
        assert nothing.std().tolist() == [0.0]

    def test_samples_of_low_precision_are_summed_in_high(self) -> None:
        rows = jnp.asarray([[1e8], [1e8 + 8]], jnp.float32)
        assert listed(moments_of(rows)) == [2.0, [1e8 + 4], [32.0]]

    def test_as_in_torch(self) -> None:
        generator = np.random.default_rng(0)
        one, other = generator.normal(3.0, 2.0, (5, 7, 4)), generator.normal(-1.0, 0.1, (9, 4))
        ours = merge(moments_of(one), moments_of(other))
        theirs = torch_moments.Moments.of(torch.tensor(one)).merge(torch_moments.Moments.of(torch.tensor(other)))
        for part, expected in zip(listed(ours), listed(theirs), strict=True):
            np.testing.assert_allclose(part, expected, rtol=1e-14)
        np.testing.assert_allclose(ours.pack(), theirs.pack(), rtol=1e-14)
        assert listed(Moments.unpack(ours.pack(), (4,))) == listed(ours)

    def test_merged_with_nothing(self) -> None:
        some, nothing = moments_of(ROWS), moments_of(np.zeros((0, 2)))
        assert listed(merge(some, nothing)) == listed(merge(nothing, some)) == listed(some)
        assert listed(merge(nothing, nothing)) == listed(nothing)

    @pytest.mark.parametrize("num_ranks", NUM_RANKS)
    def test_merged_over_ranks(self, num_ranks: int) -> None:
        generator = np.random.default_rng(1)
        # Far from zero, which costs digits if it is done naively; unequal shares, and a rank without samples.
        rows = generator.normal(1e6, 1.0, (8, 3))
        weights = np.array([0.0, 0.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0])

        def function(rows: Any, weights: Any) -> Any:
            parts = [Moments.of(rows, weights), Moments.of(rows[:, 0], weights[0])]
            merged = merge_over_ranks(parts)
            return merged, jax.tree.map(lambda leaf: leaf[None], merge_over_ranks(merged[:1], None))

        (both, own) = on_ranks(num_ranks, function, rows, weights, out_specs=(jax.P(), SHARDED))
        real = rows[weights > 0]
        assert listed(both[0])[0] == 5.0
        np.testing.assert_allclose(both[0].mean, real.mean(0), rtol=1e-15)
        np.testing.assert_allclose(both[0].m2, ((real - real.mean(0)) ** 2).sum(0), rtol=1e-8)
        assert both[1].mean.shape == (8 // num_ranks,)
        assert (own[0].mean == both[0].mean).all()  # every rank has the same, bit for bit
        assert own[0].mean.shape == (num_ranks, 3)

    def test_one_number_each(self) -> None:
        def function(rows: Any) -> Any:
            moments = Moments.of(rows)
            return merge_over_ranks([Moments(moments.count, moments.mean[0], moments.m2[0])])[0]

        assert listed(on_ranks(2, function, np.array([[1.0], [2.0], [3.0], [6.0]]))) == [4.0, 3.0, 14.0]

    def test_one_exchange_for_all_and_none_alone(self) -> None:
        def function(rows: Any) -> Any:
            return merge_over_ranks([Moments.of(rows), Moments.of(2 * rows), Moments.of(rows[:1])])

        mapped = jax.jit(jax.shard_map(function, mesh=mesh_of_two(), in_specs=SHARDED, out_specs=jax.P()))
        text = str(jax.make_jaxpr(mapped)(np.ones((4, 2))))
        assert len(re.findall(r"\ball_gather\w*\[", text)) == 1
        assert "psum" not in text
        parts = [moments_of(ROWS)]
        assert merge_over_ranks(parts)[0] is parts[0]
        assert merge_over_ranks([]) == []

    def test_weights_of_another_shape_are_refused(self) -> None:
        with pytest.raises(ValueError, match=r"weights have shape \(2,\) and samples \(3, 2\)"):
            moments_of(ROWS, np.ones(2))


def mesh_of_two() -> Any:
    return jax.sharding.Mesh(np.array(jax.devices("cpu")[:2]), ("ranks",))


def test_without_64_bit_types_it_refuses() -> None:
    with pytest.raises(ValueError, match=r"use them inside jax.enable_x64\(True\)"):
        Moments.of(jnp.ones((2, 1)))
