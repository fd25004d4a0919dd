"""A task is written once: numpy, torch and JAX give the same numbers, also under jax.jit, and change no input."""

from collections.abc import Callable, Iterator
from typing import Any

import array_api_compat.numpy
import array_api_compat.torch
import numpy as np
import pytest
import torch

from lockstep.core.types import State, Task
from lockstep.tasks.cartpole_balance.config import CartpoleBalanceConfig
from lockstep.tasks.cartpole_balance.task import CartpoleBalance
from lockstep.tasks.cartpole_classic.config import CartpoleClassicConfig
from lockstep.tasks.cartpole_classic.task import CartpoleClassic
from lockstep.tasks.cartpole_swingup.config import CartpoleSwingupConfig
from lockstep.tasks.cartpole_swingup.task import CartpoleSwingup
from lockstep.tasks.quadruped_velocity_flat.config import QuadrupedVelocityFlatConfig
from lockstep.tasks.quadruped_velocity_flat.task import QuadrupedVelocityFlat

jax = pytest.importorskip("jax")

NUM_ENVS = 17
TASKS: dict[str, Callable[[], Task]] = {
    "classic, continuous": lambda: CartpoleClassic(CartpoleClassicConfig()),
    "classic, discrete": lambda: CartpoleClassic(CartpoleClassicConfig(action_kind="discrete")),
    "balance": lambda: CartpoleBalance(CartpoleBalanceConfig(observation_noise=0.02)),
    "balance, no noise": lambda: CartpoleBalance(CartpoleBalanceConfig()),
    "swingup": lambda: CartpoleSwingup(CartpoleSwingupConfig(observation_noise=0.02)),
    "quadruped": lambda: QuadrupedVelocityFlat(QuadrupedVelocityFlatConfig()),
}
WITH_A_GOAL = [name for name in TASKS if name != "quadruped"]
"""Tasks whose rewards are not negative, and largest where everything is zero."""
Arrays = dict[str, Any]


@pytest.fixture(autouse=True)
def _double_precision() -> Iterator[None]:
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)


@pytest.fixture(params=list(TASKS))
def task(request: pytest.FixtureRequest) -> Task:
    return TASKS[request.param]()


def draw(task: Task, dtype: type) -> Arrays:
    """States beyond every limit as well as within, actions that need clipping, and noise."""
    random = np.random.default_rng(7)
    reset_noise = random.random((NUM_ENVS, task.num_reset_noise))
    start = task.reset(array_api_compat.numpy, reset_noise)
    num_positions, num_velocities = start.qpos.shape[1], start.qvel.shape[1]
    spread = np.array([3.0, 4.0]) if num_positions == 2 else np.full(num_positions, 0.6)
    num_actions = task.action_space.size if task.action_space.kind == "continuous" else 1
    arrays = {
        "qpos": random.uniform(-1, 1, (NUM_ENVS, num_positions)) * spread,
        "qvel": random.normal(size=(NUM_ENVS, num_velocities)) * 2,
        "ctrl": random.uniform(-1, 1, (NUM_ENVS, num_actions)),
        "sensordata": np.zeros((NUM_ENVS, 0)),
        "action": random.uniform(-2, 2, (NUM_ENVS, num_actions)),
        "reset_noise": reset_noise,
        "step_noise": random.random((NUM_ENVS, task.num_step_noise)),
    }
    # Counters that have run out as well as such that have not, feet in the air and on the floor.
    for name, initial in start.variables.items():
        arrays[f"variables.{name}"] = np.round(random.uniform(-2, 2, initial.shape), 1) * (random.random() + 0.5)
    arrays["qpos"][:4] = arrays["qpos"][:4] * 0.02 + (start.qpos[:4] if num_positions > 2 else 0)
    converted: Arrays = {name: array.astype(dtype) for name, array in arrays.items()}
    if task.action_space.kind == "discrete":
        converted["action"] = random.integers(0, 2, NUM_ENVS)
    return converted


def evaluate(task: Task, xp: Any, given: Arrays) -> Arrays:
    """Return what every function of the task makes of the given arrays, by name."""
    variables = {name.partition(".")[2]: array for name, array in given.items() if name.startswith("variables.")}
    state = State(given["qpos"], given["qvel"], given["ctrl"], given["sensordata"], variables)
    action, step_noise = given["action"], given["step_noise"]
    start = task.reset(xp, given["reset_noise"])
    control = task.control(xp, state, action)
    push = task.push(xp, state, step_noise)
    state = task.advance(xp, state, action, step_noise)
    results = {
        "reset.qpos": start.qpos,
        "reset.qvel": start.qvel,
        **{f"reset.{name}": array for name, array in start.variables.items()},
        "control": control,
        **({} if push is None else {"push": push}),
        **{f"advance.{name}": getattr(state, name) for name in ("qpos", "qvel", "ctrl")},
        **{f"advance.{name}": array for name, array in state.variables.items()},
        **{f"observations.{name}": array for name, array in task.observations(xp, state, step_noise).items()},
        **{f"rewards.{name}": array for name, array in task.rewards(xp, state, action).items()},
        **{f"metrics.{name}": array for name, array in task.metrics(xp, state, action).items()},
        "terminations": task.terminations(xp, state),
    }
    if hasattr(task, "dynamics"):
        results["dynamics.qpos"], results["dynamics.qvel"] = task.dynamics(xp, state.qpos, state.qvel, control)
    return results


def in_numpy(task: Task, given: Arrays) -> Arrays:
    return evaluate(task, array_api_compat.numpy, given)


def in_torch(task: Task, given: Arrays) -> Arrays:
    results = evaluate(task, array_api_compat.torch, {name: torch.from_numpy(array) for name, array in given.items()})
    return {name: tensor.numpy() for name, tensor in results.items()}


def in_jax(task: Task, given: Arrays) -> Arrays:
    results = evaluate(task, jax.numpy, {name: jax.numpy.asarray(array) for name, array in given.items()})
    return {name: np.asarray(array) for name, array in results.items()}


def in_jitted_jax(task: Task, given: Arrays) -> Arrays:
    jitted = jax.jit(lambda arrays: evaluate(task, jax.numpy, arrays))
    return {name: np.asarray(array) for name, array in jitted(given).items()}


@pytest.mark.parametrize("framework", [in_torch, in_jax, in_jitted_jax])
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float64, 1e-12), (np.float32, 2e-5)])
def test_all_frameworks_agree(
    task: Task, framework: Callable[[Task, Arrays], Arrays], dtype: type, tolerance: float
) -> None:
    given = draw(task, dtype)
    expected, measured = in_numpy(task, given), framework(task, given)
    assert measured.keys() == expected.keys()
    for name in expected:
        assert measured[name].dtype == expected[name].dtype, name
        np.testing.assert_allclose(measured[name], expected[name], rtol=tolerance, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_shapes_and_dtypes_are_as_declared(task: Task, dtype: type) -> None:
    results = in_numpy(task, draw(task, dtype))
    sizes: dict[str, tuple[int, ...]] = {
        f"observations.{name}": (NUM_ENVS, size) for name, size in task.num_observations.items()
    }
    sizes |= {f"rewards.{name}": (NUM_ENVS,) for name in task.reward_terms}
    sizes |= {f"metrics.{name}": (NUM_ENVS,) for name in task.metric_terms}
    assert {name: results[name].shape for name in results if name.startswith(("obs", "rew", "metrics."))} == sizes
    assert results["control"].shape[0] == NUM_ENVS
    if "push" in results:
        assert results["push"].shape == results["advance.qvel"].shape
    # What a reset begins with and a step goes on with are of one kind.
    for name in (name.partition(".")[2] for name in results if name.startswith("reset.")):
        assert results[f"reset.{name}"].shape == results[f"advance.{name}"].shape, name
    assert {name for name, array in results.items() if array.dtype != dtype} == {"terminations"}
    assert results["terminations"].dtype == np.bool_
    assert {"actor", "critic"} <= task.num_observations.keys()


def test_the_states_drawn_reach_both_outcomes() -> None:
    for name in ("classic, continuous", "balance", "quadruped"):
        task = TASKS[name]()
        assert 0 < in_numpy(task, draw(task, np.float64))["terminations"].sum() < NUM_ENVS


@pytest.mark.parametrize("framework", [in_numpy, in_torch])
def test_inputs_are_left_as_they_were(task: Task, framework: Callable[[Task, Arrays], Arrays]) -> None:
    given = draw(task, np.float64)
    copies = {name: array.copy() for name, array in given.items()}
    framework(task, given)
    for name, array in given.items():
        np.testing.assert_array_equal(array, copies[name], err_msg=name)


def test_rewards_stay_below_the_declared_maximum(task: Task) -> None:
    given = draw(task, np.float64)
    given["ctrl"] = np.clip(given["ctrl"], -1, 1)
    rewards = np.array([array for name, array in in_numpy(task, given).items() if name.startswith("rewards.")])
    assert rewards.sum(axis=0).max() <= task.max_step_reward


@pytest.mark.parametrize("name", WITH_A_GOAL)
def test_the_goal_state_earns_the_declared_maximum(name: str) -> None:
    task = TASKS[name]()
    given = draw(task, np.float64)
    assert all(values.min() >= 0 for term, values in in_numpy(task, given).items() if term.startswith("rewards."))
    for array in ("qpos", "qvel", "ctrl"):
        given[array] = np.zeros_like(given[array])
    results = in_numpy(task, given)
    total = sum(results[f"rewards.{term}"] for term in task.reward_terms)
    np.testing.assert_allclose(total, task.max_step_reward, rtol=1e-15)
