"""Learning itself, in JAX: the toy is learned within seconds."""

import numpy as np
import pytest

from lockstep.core.config import merge
from lockstep.recipes.cartpole import cartpole_classic
from tests.unit.jax_ppo_fixtures import PpoOnRanks

pytestmark = pytest.mark.usefixtures("double_precision")


def test_the_classic_cartpole_is_learned() -> None:
    agent = {"num_steps_per_env": 64, "num_learning_epochs": 10, "schedule": "fixed"}
    overrides = {"num_envs": 64, "device": "cpu", "agent": agent, "env": {"action_kind": "discrete"}}
    training = PpoOnRanks(merge(cartpole_classic(), overrides), (32, 32))
    before = training.evaluate(32)
    metrics = [training.iterate() for _ in range(20)]
    after = training.evaluate(32)
    assert before["mean_return"] < 200
    assert after["mean_return"] >= 400  # of 500
    assert after["mean_return"] == after["mean_episode_length"]
    assert np.isfinite([each["kl"] for each in metrics]).all()
