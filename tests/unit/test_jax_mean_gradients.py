"""Gradients and what rides with them, reduced over ranks with unequal numbers of samples."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.distributed.jax import REPLICATED, SHARDED
from lockstep.learn.jax.gradients import clip_scale, mean_gradients
from lockstep.learn.jax.statistics import local_parameters
from tests.unit.jax_fixtures import on_ranks

pytestmark = pytest.mark.usefixtures("double_precision")

# Of the four samples the last is padding. The loss of one is 2 * slope * sample + offset.
SAMPLES = np.array([1.0, 2.0, 6.0, np.nan])
WEIGHTS = np.array([1.0, 1.0, 1.0, 0.0])
PARAMETERS = {"offset": np.array(1.0), "slope": np.array([5.0])}


def loss(parameters: Any, samples: jax.Array, weights: jax.Array) -> jax.Array:
    each = 2.0 * parameters["slope"][0] * jnp.where(weights > 0, samples, 0.0) + parameters["offset"]
    return jnp.where(weights > 0, each, 0.0).sum()


def reduced(num_ranks: int, *, own: Any = local_parameters, bad_rank: int = -1, samples: np.ndarray = SAMPLES) -> Any:
    def on_rank(parameters: Any, samples: jax.Array, weights: jax.Array, is_bad: jax.Array) -> Any:
        gradients = jax.grad(loss)(own(parameters), samples, weights)
        riders = jnp.stack((loss(parameters, samples, weights), weights.sum() * 10.0))
        mean = mean_gradients(gradients, riders, weights.sum(), is_bad[0])
        return mean, clip_scale(mean, 1.0)

    flags = np.arange(num_ranks) == bad_rank
    specs = (REPLICATED, SHARDED, SHARDED, SHARDED)
    return on_ranks(num_ranks, on_rank, PARAMETERS, samples, WEIGHTS, flags, in_specs=specs)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_means_are_over_the_samples_of_all_ranks(num_ranks: int) -> None:
    # Of the slope: 2 * (1 + 2 + 6) / 3 = 6, of the offset 1; the loss: 5 * 6 + 1.
    mean, scale = reduced(num_ranks)
    assert mean.gradients == {"offset": pytest.approx(1.0), "slope": pytest.approx([6.0])}
    assert mean.flat.tolist() == pytest.approx([1.0, 6.0])
    assert mean.riders.tolist() == pytest.approx([31.0, 10.0])
    assert mean.norm == pytest.approx(37**0.5)
    assert scale == pytest.approx(1 / (37**0.5 + 1e-6))
    assert mean.nonfinite.tolist() == [False] * num_ranks


def test_gradients_of_replicated_parameters_would_be_too_large() -> None:
    # The fault that local_parameters is there for: summed over ranks twice.
    mean, _ = reduced(2, own=lambda parameters: parameters)
    assert mean.gradients["offset"] == pytest.approx(2.0)


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_a_rank_with_bad_sums_or_another_bad_tensor_is_named(num_ranks: int) -> None:
    samples = np.where(np.arange(4) == 2, np.inf, SAMPLES)
    expected = [rank == num_ranks * 2 // 4 for rank in range(num_ranks)]
    mean, _ = reduced(num_ranks, samples=samples)
    assert mean.nonfinite.tolist() == expected
    mean, _ = reduced(num_ranks, bad_rank=num_ranks - 1)
    assert mean.nonfinite.tolist() == [rank == num_ranks - 1 for rank in range(num_ranks)]
    assert mean.flat.tolist() == pytest.approx([1.0, 6.0])


def test_weights_may_add_up_to_less_than_one() -> None:
    of_a_quarter = mean_gradients({"a": jnp.array([0.5])}, jnp.array([1.0]), jnp.array(0.25), jnp.zeros((), bool))
    assert (of_a_quarter.flat.tolist(), of_a_quarter.riders.tolist()) == ([2.0], [4.0])


def test_without_samples_means_are_zero() -> None:
    mean = mean_gradients({"a": jnp.zeros(2)}, jnp.zeros(1), jnp.zeros(()), jnp.zeros((), bool))
    assert mean.flat.tolist() == [0.0, 0.0]
    assert float(clip_scale(mean, 1.0)) == 1.0
