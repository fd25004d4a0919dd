"""Envs stepped with random actions go the same way in torch and in JAX, on one rank and on several."""

from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any

import numpy as np
import pytest

import lockstep

jax = pytest.importorskip("jax")
pytest.importorskip("mujoco")

from lockstep.session.framework import Team  # noqa: E402
from lockstep.session.jax_session import JAX  # noqa: E402
from lockstep.session.make_env import build_share  # noqa: E402
from lockstep.session.torch_random import TorchStepper  # noqa: E402
from tests.unit.jax_fixtures import ranks_of  # noqa: E402

pytestmark = pytest.mark.usefixtures("double_precision")

States = dict[str, np.ndarray]
TOTAL = 24
# Some episodes end within these steps, and others do not.
CASES: list[tuple[str, dict[str, Any]]] = [
    ("cartpole_classic", {"action_kind": "continuous", "max_episode_steps": 25}),
    ("cartpole_classic", {"action_kind": "discrete", "max_episode_steps": 25}),
    ("cartpole_swingup", {"max_episode_steps": 25}),
]
SHARES = [(24,), (12, 12), (16, 0, 8)]


@pytest.fixture
def resources() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def config_with(task: str, env: dict[str, Any], shares: tuple[int, ...], framework: str) -> Any:
    settings: dict[str, Any] = {"ml_framework": framework, "device": "cpu", "dtype": "float64", "env": env}
    return lockstep.make_config(task, num_envs=shares, agent={"num_steps_per_env": 4}, **settings)


def by_torch(task: str, env: dict[str, Any], shares: tuple[int, ...]) -> States:
    """Return all envs after 20 steps, rank by rank."""
    found = []
    for rank in range(len(shares)):
        config = config_with(task, env, shares, "torch")
        with closing(build_share(config, shares, rank)) as share:
            stepper = TorchStepper(share, rank, config.seed)
            assert stepper.num_envs == {rank: shares[rank]}
            for num_steps in (4, 16):
                stepper.step(num_steps)
            found.append(stepper.states())
    return {name: np.concatenate([states[name] for states in found]) for name in found[0]}


def by_jax(task: str, env: dict[str, Any], shares: tuple[int, ...], resources: ExitStack) -> States:
    comm: Any = None
    team = Team(comm, [], "", "cpu", ranks_of(len(shares)))
    stepper = JAX.make_stepper(config_with(task, env, shares, "jax"), team, resources)
    for _ in range(5):
        stepper.step(4)
    return stepper.states()


@pytest.mark.parametrize(("task", "env"), CASES, ids=["continuous", "discrete", "mujoco"])
def test_env_i_is_the_same_after_20_steps_whoever_steps_it(
    task: str, env: dict[str, Any], resources: ExitStack
) -> None:
    expected = by_torch(task, env, SHARES[0])
    assert expected["env_ids"].tolist() == list(range(TOTAL))
    assert len(np.unique(expected["qpos"], axis=0)) == TOTAL
    others = [by_torch(task, env, shares) for shares in SHARES[1:]]
    others += [by_jax(task, env, shares, resources) for shares in SHARES]
    for states in others:
        assert states.keys() == expected.keys()
        for name, rows in expected.items():
            assert states[name].dtype == rows.dtype, name
            np.testing.assert_allclose(states[name], rows, rtol=0, atol=1e-12, err_msg=name)
