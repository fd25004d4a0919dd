"""The analytic engine on a body in free flight, whose steps are easy to work out, and on the classic cart-pole."""

from typing import Any

import array_api_compat.numpy
import array_api_compat.torch
import numpy as np
import pytest
import torch

from lockstep.core.errors import UsageError
from lockstep.sim.analytic import AnalyticEngine, make_engine
from lockstep.tasks.cartpole_balance.config import CartpoleBalanceConfig
from lockstep.tasks.cartpole_balance.task import CartpoleBalance
from lockstep.tasks.cartpole_classic.config import CartpoleClassicConfig
from lockstep.tasks.cartpole_classic.task import CartpoleClassic


class Glider:
    """One position; a step of one second moves it by its velocity, then adds the control to the velocity."""

    num_positions = num_velocities = num_controls = 1

    def dynamics(self, xp: Any, qpos: Any, qvel: Any, ctrl: Any) -> tuple[Any, Any]:
        return qpos + qvel, qvel + ctrl


def glider_engine(xp: Any, num_envs: int, decimation: int) -> AnalyticEngine:
    return AnalyticEngine(Glider(), num_envs, decimation, xp, dtype=xp.float64)  # type: ignore[arg-type]


@pytest.fixture(params=["numpy", "torch", "jax"])
def xp(request: pytest.FixtureRequest) -> Any:
    if request.param == "numpy":
        return array_api_compat.numpy
    if request.param == "torch":
        return array_api_compat.torch
    jax = pytest.importorskip("jax")
    request.addfinalizer(lambda: jax.config.update("jax_enable_x64", False))
    jax.config.update("jax_enable_x64", True)
    return jax.numpy


def test_a_step_is_decimation_physics_steps_under_one_control(xp: Any) -> None:
    engine = glider_engine(xp, 2, decimation=3)
    engine.reset(xp.asarray([True, True]), xp.asarray([[0.0], [10.0]]), xp.asarray([[1.0], [0.0]]))
    info = engine.step(xp.asarray([[0.0], [2.0]]))
    # 3 steps: positions 0 + 1 + 1 + 1 and 10 + 0 + 2 + 4; velocities 1 and 0 + 3 * 2.
    assert info.qpos.tolist() == [[3.0], [16.0]]
    assert info.qvel.tolist() == [[1.0], [6.0]]
    assert info.diverged.tolist() == [False, False]
    assert tuple(info.sensordata.shape) == (2, 0)


def test_reset_touches_only_the_masked_envs(xp: Any) -> None:
    engine = glider_engine(xp, 3, decimation=1)
    everywhere = xp.asarray([True] * 3)
    engine.reset(everywhere, xp.asarray([[1.0], [2.0], [3.0]]), xp.asarray([[0.0]] * 3))
    assert tuple(
        engine.reset(xp.asarray([False, True, False]), xp.asarray([[9.0]] * 3), xp.asarray([[1.0]] * 3)).shape
    ) == (3, 0)
    assert engine.step(xp.asarray([[0.0]] * 3)).qpos.tolist() == [[1.0], [10.0], [3.0]]


def test_a_failed_env_is_flagged_keeps_its_state_and_goes_on_after_a_reset(xp: Any) -> None:
    engine = glider_engine(xp, 4, decimation=2)
    start = xp.asarray([[1.0], [2.0], [3.0], [float("inf")]])
    engine.reset(xp.asarray([True] * 4), start, xp.asarray([[1.0]] * 4))
    info = engine.step(xp.asarray([[0.0], [float("nan")], [0.0], [0.0]]))
    assert info.diverged.tolist() == [False, True, False, True]
    assert info.qpos.tolist() == [[3.0], [2.0], [5.0], [float("inf")]]
    engine.reset(info.diverged, xp.asarray([[0.0]] * 4), xp.asarray([[5.0]] * 4))
    info = engine.step(xp.asarray([[0.0]] * 4))
    assert info.diverged.tolist() == [False] * 4
    assert info.qpos.tolist() == [[5.0], [10.0], [7.0], [10.0]]


def classic_engine(num_envs: int = 8) -> AnalyticEngine:
    task = CartpoleClassic(CartpoleClassicConfig())
    return AnalyticEngine(task, num_envs, 1, array_api_compat.torch, dtype=torch.float32, device=torch.device("cpu"))


def test_a_saved_state_continues_bitwise() -> None:
    generator = torch.Generator().manual_seed(3)
    pushes = torch.rand((20, 8, 1), generator=generator) * 20 - 10
    engine = classic_engine()
    for push in pushes[:10]:
        engine.step(push)
    other = classic_engine()
    other.load_state_dict(engine.state_dict())
    for push in pushes[10:]:
        one, two = engine.step(push), other.step(push)
        assert torch.equal(one.qpos, two.qpos)
        assert torch.equal(one.qvel, two.qvel)
    assert one.qpos.abs().max() > 0.01
    assert all(array.shape[0] == 8 for array in engine.state_dict().values())


def test_dtype_and_device_follow_the_caller() -> None:
    info = classic_engine().step(torch.ones((8, 1)))
    assert (info.qpos.dtype, info.qvel.dtype, info.sensordata.dtype) == (torch.float32,) * 3
    assert info.diverged.dtype == torch.bool


def test_wrong_sizes_are_refused() -> None:
    with pytest.raises(UsageError, match="num_envs -1"):
        classic_engine(-1)
    with pytest.raises(UsageError, match=r"qpos has shape \(3, 2\), this engine's has \(8, 2\)"):
        classic_engine(8).load_state_dict(classic_engine(3).state_dict())
    with pytest.raises(UsageError, match="decimation 0"):
        AnalyticEngine(CartpoleClassic(CartpoleClassicConfig()), 1, 0, np)


def test_an_engine_is_made_from_a_task_that_has_equations() -> None:
    sizes: dict[str, Any] = {"num_envs": 3, "decimation": 1, "num_threads": 1, "xp": array_api_compat.torch}
    engine = make_engine(CartpoleClassic(CartpoleClassicConfig()), **sizes)
    assert (engine.num_envs, engine.num_positions, engine.num_velocities, engine.num_controls) == (3, 2, 2, 1)
    with pytest.raises(UsageError, match="no equations of motion of its own; use --engine mujoco"):
        make_engine(CartpoleBalance(CartpoleBalanceConfig()), **sizes)
