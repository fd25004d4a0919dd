"""The whole learner: from equal weights, torch and JAX train the same policy, iteration by iteration.

In double precision they differ by the order in which sums are made, and by what iterations make of that: measured over
these 5 iterations up to 2e-14 in parameters and normalisers.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from lockstep.core.config import merge
from lockstep.learn.config import TrainConfig
from lockstep.learn.torch.training import Training
from lockstep.recipes.cartpole import cartpole_swingup
from lockstep.tasks.cartpole_classic.task import CartpoleClassic
from lockstep.tasks.cartpole_swingup.task import CartpoleSwingup
from tests.parity.torch_weights import from_torch, to_torch
from tests.unit.jax_ppo_fixtures import PpoOnRanks
from tests.unit.learner_fixtures import make_training
from tests.unit.ppo_fixtures import config_of
from tests.unit.watched_fixtures import watched

pytestmark = pytest.mark.usefixtures("double_precision")

TOLERANCE = 1e-11
NOT_OF_JAX = ("time/", "steps_per_s")  # which the harness measures


@pytest.fixture(autouse=True)
def _watched() -> Iterator[None]:
    with watched(CartpoleClassic, CartpoleSwingup):
        yield


def swingup() -> TrainConfig:
    config = config_of(schedule="fixed", use_clipped_value_loss=True, entropy_coef=0.01, chunk_size=5)
    env = {"observation_noise": 0.02, "max_episode_steps": 9}
    return merge(cartpole_swingup(), {"num_envs": 8, "device": "cpu", "dtype": "float64", "env": env}).model_copy(
        update={"agent": config.agent}
    )


def state_of(training: Training) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in training.policy.state_dict().items()}


@pytest.mark.parametrize(
    ("config", "num_iterations"),
    [
        pytest.param(config_of("continuous", schedule="fixed"), 5, id="continuous"),
        pytest.param(config_of("discrete", schedule="fixed", normalize_advantages=False), 5, id="discrete"),
        pytest.param(swingup(), 5, id="swingup"),
        pytest.param(config_of("continuous", "gru", schedule="adaptive", chunk_size=13), 3, id="gru-adaptive"),
        pytest.param(config_of("discrete", "lstm", schedule="fixed", normalize_observations=False), 2, id="lstm"),
    ],
)
def test_the_same_training(config: TrainConfig, num_iterations: int) -> None:
    torchs, ours = make_training(config), PpoOnRanks(config)
    ours.load(from_torch(state_of(torchs)))
    rates = set()
    for iteration in range(1, num_iterations + 1):
        expected, metrics = torchs.iterate(), ours.iterate()
        assert not metrics.pop("nonfinite").any()
        compare_metrics(metrics, {name: value for name, value in expected.items() if not name.startswith(NOT_OF_JAX)})
        assert metrics["iteration"] == iteration
        rates.add(metrics["learning_rate"])
    compare_states(to_torch(ours.replicated.weights), state_of(torchs))
    if config.agent.schedule == "adaptive":  # type: ignore[attr-defined]
        assert len(rates) > 1
    for part, memory in zip(torchs.memory, ours.state.sharded.memory, strict=True):
        np.testing.assert_allclose(np.asarray(memory).swapaxes(0, 1), part.numpy(), atol=TOLERANCE)


def compare_states(ours: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert ours.keys() >= expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(ours[name], array, rtol=TOLERANCE, atol=TOLERANCE, err_msg=name)


def compare_metrics(ours: dict[str, Any], expected: dict[str, Any]) -> None:
    num_steps = ours.pop("num_steps")  # an iteration's; torch's training adds it up
    assert num_steps == 6 * 8
    assert ours.keys() == expected.keys() >= {"metric/distance", "metric/is_step"}
    for name, value in expected.items():
        if value is None:
            assert np.isnan(ours[name]), name
        else:
            assert ours[name] == pytest.approx(value, rel=1e-9, abs=1e-12), name
            assert isinstance(value, int) == np.issubdtype(ours[name].dtype, np.integer), name
