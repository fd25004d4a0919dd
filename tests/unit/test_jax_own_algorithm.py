"""The example of a user's own algorithm: the same on one device and on four, and it learns."""

from typing import Any

import jax
import numpy as np
import pytest

from examples.own_jax_algorithm import Algorithm
from lockstep.core.config import merge
from lockstep.distributed.jax import make_mesh
from lockstep.distributed.jax_comm import JaxComm, OwnStore
from lockstep.learn.jax.loop import JaxRunner
from lockstep.recipes.cartpole import cartpole_classic
from tests.unit.jax_ppo_fixtures import jax_env
from tests.unit.jax_training_fixtures import Recorder

pytestmark = pytest.mark.usefixtures("double_precision")


def trained(num_envs: list[int], max_iterations: int, **settings: Any) -> tuple[JaxRunner, list[dict[str, Any]]]:
    own = {"env": {"action_kind": "discrete"}, "evaluation": {"interval": 5, "num_episodes": 6}}
    agent = {"num_steps_per_env": 32, "gamma": 0.95, "num_mini_batches": 1}
    config = merge(
        cartpole_classic(),
        {
            "ml_framework": "jax",
            "num_envs": num_envs,
            "max_iterations": max_iterations,
            "agent": agent,
            **own,
            **settings,
        },
    )
    num_ranks = len(num_envs)
    training = JaxRunner(
        config,
        Algorithm,
        jax_env(config),
        jax_env(config, "evaluation"),
        make_mesh(jax.devices()[:num_ranks]),
        JaxComm(0, 1, num_ranks, OwnStore()),
    )
    observer = Recorder()
    assert training.train(observer) == "finished"
    return training, observer.recorded


def test_one_device_and_four_give_the_same_curve() -> None:
    one, curve = trained([24], 5, dtype="float64")
    four, other_curve = trained([9, 0, 12, 3], 5, dtype="float64")
    for metrics, other in zip(curve, other_curve, strict=True):
        for name in ("env_steps", "mean_return", "mean_episode_length", "loss/policy", "eval/mean_return"):
            assert other.get(name) == (pytest.approx(metrics[name], abs=1e-6) if name in metrics else None), name
    assert curve[-1]["env_steps"] == 24 * 32 * 5
    weights = [jax.tree.leaves(training.state.replicated) for training in (one, four)]
    for array, other_array in zip(*weights, strict=True):
        np.testing.assert_allclose(np.asarray(array), np.asarray(other_array), atol=1e-9)


def test_it_learns_to_keep_the_pole_up() -> None:
    _, curve = trained([128], 30)
    assert curve[1]["mean_return"] < 60
    assert curve[-1]["eval/mean_return"] > 400
