"""The envs that peers are timed in are the task that lockstep is timed in."""

import importlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.core.types import State
from lockstep.recipes.cartpole import cartpole_classic
from lockstep.tasks.cartpole_classic.task import CartpoleClassic

PEERS = Path(__file__).parents[2] / "benchmarks" / "peers"
NUM_ENVS = 512
Array = np.ndarray[Any, Any]


class Torch:
    def __init__(self) -> None:
        self.env = importlib.import_module("lean_torch_env").LeanCartpole(NUM_ENVS)

    def put(self, observations: Array, episode_length: Array) -> None:
        self.env.observations = torch.from_numpy(observations)
        self.env.episode_length = torch.from_numpy(episode_length)

    def step(self, actions: Array) -> tuple[Array, Array, Array]:
        """Return who has ended and whose time was up, (num_envs,) bool, and the observations (num_envs, 4)."""
        terminated, time_outs, done = self.env.step(torch.from_numpy(actions))
        assert torch.equal(done, terminated | time_outs)
        return done.numpy(), time_outs.numpy(), self.env.observations.numpy()


class Numpy:
    def __init__(self) -> None:
        self.env = importlib.import_module("lean_numpy_env").LeanNumpyCartpole(NUM_ENVS, seed=1)

    def put(self, observations: Array, episode_length: Array) -> None:
        self.env.observations, self.env.episode_length = observations, episode_length

    def step(self, actions: Array) -> tuple[Array, Array, Array]:
        done, late, self.last_seen = self.env.step(actions)
        time_outs = np.zeros(NUM_ENVS, dtype=bool)
        time_outs[late] = True
        return done, time_outs, self.env.observations


@pytest.fixture(params=[Torch, Numpy])
def lean(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Torch | Numpy:
    monkeypatch.syspath_prepend(PEERS)
    make: Callable[[], Torch | Numpy] = request.param
    return make()


@pytest.fixture
def states() -> tuple[Array, Array, Array]:
    """Observations and ages on both sides of every limit, and actions up to the largest."""
    generator = np.random.default_rng(0)
    scale = np.array([3.0, math.radians(14.0), 2.0, 3.0])
    observations = (generator.uniform(-1, 1, (NUM_ENVS, 4)) * scale).astype(np.float32)
    actions = generator.uniform(-1, 1, (NUM_ENVS, 1)).astype(np.float32)
    max_episode_steps = cartpole_classic().env.max_episode_steps
    return observations, actions, generator.integers(max_episode_steps - 4, max_episode_steps, NUM_ENVS)


def expected(observations: Array, actions: Array, age: Array) -> tuple[Array, Array, Array]:
    """Return what lockstep's task makes of it: the states after a step, who failed, and whose time is up."""
    config = cartpole_classic().env
    task = CartpoleClassic(config)  # type: ignore[arg-type]
    nothing = np.zeros((NUM_ENVS, 0))
    before = State(observations[:, :2].astype(float), observations[:, 2:].astype(float), nothing, nothing, {})
    force = task.control(np, before, actions.astype(float))
    qpos, qvel = task.dynamics(np, before.qpos, before.qvel, force)
    failed = task.terminations(np, State(qpos, qvel, force, nothing, {}))
    return np.concatenate((qpos, qvel), axis=1), failed, ~failed & (age + 1 >= config.max_episode_steps)


def test_a_lean_env_steps_as_lockstep_does(lean: Torch | Numpy, states: tuple[Array, Array, Array]) -> None:
    observations, actions, age = states
    after, failed, late = expected(observations, actions, age)
    assert 50 < failed.sum() < 450
    assert late.sum() > 50

    lean.put(observations.copy(), age.copy())
    done, time_outs, seen = lean.step(actions)

    np.testing.assert_array_equal(done, failed | late)
    np.testing.assert_array_equal(time_outs, late)
    np.testing.assert_allclose(seen[~done], after[~done], atol=2e-6)
    if isinstance(lean, Numpy):
        np.testing.assert_allclose(lean.last_seen, after[late], atol=2e-6)


def test_a_lean_env_starts_anew_as_lockstep_does(lean: Torch | Numpy, states: tuple[Array, Array, Array]) -> None:
    observations, actions, age = states
    lean.put(observations, age)
    done, _, seen = lean.step(actions)

    starts = np.abs(seen[done]) / cartpole_classic().env.reset_range  # type: ignore[attr-defined]
    assert starts.max() <= 1
    np.testing.assert_allclose(starts.mean(axis=0), 0.5, atol=0.1)  # uniform
    assert (np.asarray(lean.env.episode_length)[done] == 0).all()
