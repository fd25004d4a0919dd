"""Envs in JAX go the same way as envs in torch, and alike however they are batched and compiled.

With the engine mjx they do so to a tolerance: ``test_mjx_env.py``.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.core.types import Task
from lockstep.envs.config import EnvConfig

jax = pytest.importorskip("jax")
pytest.importorskip("mujoco.mjx")
jnp = jax.numpy

from lockstep.envs.jax_env import EnvState, JaxEnv, Transition  # noqa: E402
from tests.parity.jax_env_pairs import CASES, Case, is_robot, make_pair, scatter_half, to_torch  # noqa: E402
from tests.unit.jax_env_fixtures import play, random_actions  # noqa: E402

pytestmark = pytest.mark.usefixtures("double_precision")

NUM_ENVS = 16
ALIKE = [case for case in CASES if case.engine != "mjx"]
PRECISIONS = [(case, dtype) for case in ALIKE for dtype in ("float64", "float32")]


def by_name(case: Any) -> str:
    return str(case)


def assert_same(measured: Any, expected: torch.Tensor, tolerance: float, name: str) -> None:
    array, reference = np.asarray(measured), expected.numpy()
    assert array.dtype == reference.dtype, name
    np.testing.assert_allclose(array, reference, rtol=tolerance, atol=tolerance, err_msg=name)


@pytest.mark.parametrize(("case", "dtype"), PRECISIONS, ids=by_name)
def test_the_same_state_gives_the_same_transition(case: Case, dtype: str) -> None:
    task = case.make_task()
    scatter_half(task)
    in_torch, in_jax = make_pair(case, task, dtype, NUM_ENVS, EnvConfig(randomize_initial_episode_length=False))
    actions = to_torch(random_actions(task, 1, NUM_ENVS), dtype)
    start = in_torch.observations
    state, _, transition = compiled(in_jax)(jnp.arange(NUM_ENVS, dtype=jnp.int32), jnp.asarray(actions.numpy()))
    tolerance = {"float64": 1e-12, "float32": 2e-5}[dtype]
    for name, array in start.items():
        assert_same(state.observations[name], array, tolerance, name)
    expected = in_torch.step(actions[0])
    assert_same_transitions(jax.tree.map(lambda leaf: leaf[0], transition), [expected], tolerance, squeeze=True)
    if case.task != "cartpole_swingup":
        assert 0 < int(expected.terminated.sum()) < NUM_ENVS
    in_torch.close()


def compiled(env: JaxEnv) -> Any:
    return jax.jit(program_of(env))


def program_of(env: JaxEnv) -> Any:
    """Return a function ``(env_ids, actions) -> (state at the start, state at the end, transitions)``."""

    def program(env_ids: Any, actions: Any) -> tuple[EnvState, EnvState, Transition]:
        start = env.reset(env_ids)
        return start, *play(env, start, actions)

    return program


def assert_same_transitions(measured: Transition, steps: list[Any], tolerance: float, *, squeeze: bool = False) -> None:
    def together(arrays: list[torch.Tensor]) -> torch.Tensor:
        return arrays[0] if squeeze else torch.stack(arrays)

    for name in ("reward", "terms", "terminated", "truncated"):
        assert_same(getattr(measured, name), together([getattr(step, name) for step in steps]), tolerance, name)
    for group in ("observations", "final_observations"):
        arrays: Mapping[str, Any] = getattr(measured, group)
        assert arrays.keys() == getattr(steps[0], group).keys()
        for name, array in arrays.items():
            assert_same(array, together([getattr(step, group)[name] for step in steps]), tolerance, f"{group}.{name}")


@pytest.mark.parametrize("case", ALIKE, ids=by_name)
def test_both_go_the_same_way_for_200_steps(case: Case) -> None:
    task = case.make_task()
    in_torch, in_jax = make_pair(case, task, "float64", NUM_ENVS, EnvConfig(max_episode_steps=30, decimation=2))
    actions = random_actions(task, 200, NUM_ENVS)
    _, end, transitions = compiled(in_jax)(jnp.arange(NUM_ENVS, dtype=jnp.int32), jnp.asarray(actions))
    assert_same_transitions(transitions, [in_torch.step(action) for action in torch.from_numpy(actions)], 1e-12)
    assert int(transitions.truncated.sum()) > (3 if case.task == "cartpole_classic" else 50)
    assert (int(transitions.terminated.sum()) > 10) == (case.task != "cartpole_swingup" and not is_robot(case))
    saved = in_torch.state_dict()
    assert_same(end.episode_length, saved["episode_length"], 0, "episode_length")
    assert_same(end.is_whole, saved["episodes"]["whole"], 0, "is_whole")
    assert_same(end.running, saved["episodes"]["running"], 1e-12, "running")
    assert_same(transitions.finished.sum(0), in_torch.episodes.take(), 1e-12, "finished")
    if case.engine == "mujoco":
        for name in ("qpos", "qvel", "ctrl"):
            assert np.asarray(getattr(end.state, name)).tobytes() == saved["state"][name].numpy().tobytes(), name
        rows = saved["engine"]["integration_state"].numpy()
        assert np.asarray(end.physics["integration_state"]).tobytes() == rows.tobytes()
    in_torch.close()
    in_jax.close()


# For one env and for several the compiler makes different code, which may round differently.
BATCHES = [
    ("cartpole_classic", "analytic", "float32"),
    ("cartpole_balance", "mujoco", "float64"),
    ("cartpole_balance", "mjx", "float32"),
]


@pytest.mark.parametrize(("task_name", "engine", "dtype"), BATCHES)
def test_an_env_does_not_depend_on_its_batch_nor_on_the_number_of_devices(
    task_name: str, engine: str, dtype: str
) -> None:
    case = next(case for case in CASES if (case.task, case.engine) == (task_name, engine))
    task = case.make_task()
    vary_masses(task)
    env = make_pair(case, task, dtype, 1, EnvConfig(max_episode_steps=12))[1]
    actions = jnp.asarray(random_actions(task, 20, 64), dtype=dtype)
    ids = jnp.arange(64, dtype=jnp.int32)
    split = per_env(program_of(env), jax.sharding.Mesh(np.array(jax.devices()), ("ranks",)))(ids, actions)
    described = [[(leaf.dtype, leaf.weak_type) for leaf in jax.tree.leaves(state)] for state in split[:2]]
    assert described[0] == described[1]
    if engine != "analytic":
        assert split[1].physics["model"].flatten().tolist() == [env_id % 5 for env_id in range(64)]
    alone = per_env(program_of(env))(ids[37:38], actions[:, 37:38])
    for one, other in zip(jax.tree.leaves(alone), jax.tree.leaves(split), strict=True):
        tolerance = {"float64": 1e-12, "float32": 1e-5}.get(str(one.dtype), 0)
        np.testing.assert_allclose(one[0], other[37], rtol=tolerance, atol=tolerance)
    env.close()


def vary_masses(task: Task) -> None:
    """Let a task have five variants of its model, if it has one: by turns at home on every device."""

    def vary_model(model: Any, noise: Any) -> None:
        model.body_mass[:] *= 1 + noise

    task.num_models, task.num_model_noise, task.vary_model = 5, 1, vary_model  # type: ignore[method-assign]


def per_env(program: Any, mesh: Any = None) -> Any:
    """Return a program whose results all lead with the env: of one device, or of all devices of a mesh."""

    def leading(env_ids: Any, actions: Any) -> Any:
        start, end, transitions = program(env_ids, actions)
        by_env = transitions._replace(finished=(), num_diverged=())
        return start, end, jax.tree.map(lambda array: jnp.moveaxis(array, 1, 0), by_env)

    if mesh is None:
        return jax.jit(leading)
    split = jax.P("ranks")
    specs = {"in_specs": (split, jax.P(None, "ranks")), "out_specs": split}
    return jax.jit(jax.shard_map(leading, mesh=mesh, check_vma=True, **specs))
