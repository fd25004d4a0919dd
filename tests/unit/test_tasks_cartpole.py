"""The two cart-poles in MuJoCo: the model against physics, rewards, terminations, resets."""

import math

import array_api_compat.numpy as xp
import mujoco
import numpy as np
import pytest

from lockstep.core.types import State
from lockstep.sim.mujoco_c import MujocoEngine
from lockstep.tasks.cartpole.task import TIMESTEP, Cartpole
from lockstep.tasks.cartpole_balance.config import CartpoleBalanceConfig
from lockstep.tasks.cartpole_balance.task import CartpoleBalance
from lockstep.tasks.cartpole_swingup.config import CartpoleSwingupConfig
from lockstep.tasks.cartpole_swingup.task import CartpoleSwingup


def balance(**fields: object) -> CartpoleBalance:
    return CartpoleBalance(CartpoleBalanceConfig.model_validate(fields))


def swingup(**fields: object) -> CartpoleSwingup:
    return CartpoleSwingup(CartpoleSwingupConfig.model_validate(fields))


def load_model() -> mujoco.MjModel:
    return mujoco.MjModel.from_xml_path(str(Cartpole.model_path))


def make_state(qpos: list[float], qvel: list[float] | None = None, ctrl: float = 0.0) -> State:
    return State(np.array([qpos]), np.array([qvel or [0.0, 0.0]]), np.array([[ctrl]]), np.zeros((1, 0)), {})


def total_reward(task: Cartpole, state: State) -> float:
    terms = task.rewards(xp, state, np.zeros((1, 1)))
    assert tuple(terms) == task.reward_terms
    assert all(term[0] >= 0 for term in terms.values())
    return float(sum(term[0] for term in terms.values()))


@pytest.mark.parametrize("task", [balance(), swingup()])
def test_a_perfect_episode_is_worth_500(task: Cartpole) -> None:
    assert task.max_step_reward == 1.0
    assert total_reward(task, make_state([0.0, 0.0])) == pytest.approx(1.0, abs=1e-15)
    assert task.config.max_episode_steps == 500
    assert task.step_duration_s * 500 == pytest.approx(10.0)


@pytest.mark.parametrize("task", [balance(), swingup()])
def test_every_departure_from_the_goal_costs_and_hanging_is_worth_nothing(task: Cartpole) -> None:
    for worse in (
        make_state([0.0, 0.2]),
        make_state([0.2, 0.0]),
        make_state([0.0, 0.0], [0.0, 0.5]),
        make_state([0.0, 0.0], ctrl=0.5),
    ):
        assert total_reward(task, worse) < 0.995
    assert total_reward(task, make_state([0.0, math.pi])) == pytest.approx(0.0, abs=1e-12)
    # All terms but the first gone, the pole level: half of what being upright is worth.
    level = total_reward(task, make_state([9.0, math.pi / 2], [0.0, 50.0], 1.0))
    assert level == pytest.approx(task.config.reward_weights.upright / 2)


def test_the_largest_reward_follows_the_weights() -> None:
    task = balance(reward_weights={"upright": 2.0, "small_control": 0.0})
    assert task.max_step_reward == pytest.approx(2.4)
    assert total_reward(task, make_state([0.0, 0.0])) == pytest.approx(2.4)


def test_balance_starts_near_upright_and_swingup_hanging() -> None:
    corners = np.array([[0.0] * 4, [0.5] * 4, [0.75] * 4])
    start = balance().reset(xp, corners)
    np.testing.assert_allclose(start.qpos, [[-0.3, -0.1], [0.0, 0.0], [0.15, 0.05]], atol=1e-15)
    np.testing.assert_allclose(start.qvel, [[-0.1, -0.1], [0.0, 0.0], [0.05, 0.05]], atol=1e-15)
    hanging = swingup(reset_pole_angle_rad=0.2).reset(xp, corners)
    np.testing.assert_allclose(hanging.qpos[:, 1], [math.pi - 0.2, math.pi, math.pi + 0.1])


def test_only_balance_can_fail() -> None:
    states = [make_state([0, 0]), make_state([1.59, -0.59]), make_state([-1.61, 0]), make_state([0, 0.61])]
    assert [bool(balance().terminations(xp, state)[0]) for state in states] == [False, False, True, True]
    assert [bool(swingup().terminations(xp, state)[0]) for state in states] == [False] * 4


def test_observations_and_their_noise() -> None:
    state = make_state([0.4, math.pi / 6], [-1.0, 2.0], ctrl=0.7)
    exact = np.array([0.4, 0.5, math.sqrt(3) / 2, -1.0, 2.0])
    quiet = balance()
    assert quiet.num_step_noise == 0
    groups = quiet.observations(xp, state, np.zeros((1, 0)))
    np.testing.assert_allclose(groups["actor"][0], exact)
    np.testing.assert_allclose(groups["critic"][0], np.append(exact, 0.7))

    noisy = balance(observation_noise=0.1)
    groups = noisy.observations(xp, state, np.array([[0.0, 0.25, 0.5, 0.75, 1.0]]))
    np.testing.assert_allclose(groups["actor"][0] - exact, [-0.1, -0.05, 0.0, 0.05, 0.1], atol=1e-15)
    np.testing.assert_allclose(groups["critic"][0], np.append(exact, 0.7))


def test_the_model_is_what_its_page_says() -> None:
    model = load_model()
    assert model.opt.timestep == TIMESTEP
    assert (model.nq, model.nv, model.nu) == (2, 2, 1)
    assert dict(zip(("cart", "pole"), model.body_mass[1:], strict=True)) == {"cart": 1.0, "pole": 0.1}
    np.testing.assert_allclose(model.body("pole").ipos, [0, 0, 0.5], atol=1e-12)  # hinge at the bottom of a 1 m pole
    np.testing.assert_allclose(model.joint("slider").range, [-1.8, 1.8])
    assert (model.actuator_gear[0, 0], *model.actuator_ctrlrange[0]) == (10.0, -1.0, 1.0)


def frictionless_path(angle: float, num_steps: int) -> tuple[mujoco.MjModel, np.ndarray, np.ndarray]:
    """Positions and velocities ``(num_steps, 2)`` of an unforced cart-pole without damping, released at rest."""
    model = load_model()
    model.dof_damping[:] = 0
    engine = MujocoEngine(model, 1, decimation=1, num_threads=1)
    engine.reset(np.array([True]), np.array([[0.0, angle]]), np.zeros((1, 2)))
    steps = []
    for _ in range(num_steps):
        info = engine.step(np.zeros((1, 1)))
        steps.append((info.qpos[0].copy(), info.qvel[0].copy()))
    return model, np.array([qpos for qpos, _ in steps]), np.array([qvel for _, qvel in steps])


def test_a_small_swing_has_the_analytic_period() -> None:
    model, qpos, _ = frictionless_path(math.pi + 0.02, 1000)
    # Linear normal mode of a pendulum on a free cart: w^2 = m g l / (I + m l^2 - (m l)^2 / (M + m)), with M the
    # cart's mass, m the pole's, l from hinge to the pole's centre, I the pole's moment of inertia there.
    moment = model.body("pole").inertia[0] + 0.1 * 0.5**2 - (0.1 * 0.5) ** 2 / 1.1
    period = 2 * math.pi * math.sqrt(moment / (0.1 * 9.81 * 0.5))
    upward = np.flatnonzero((qpos[:-1, 1] < math.pi) & (qpos[1:, 1] >= math.pi))
    measured = (upward[-1] - upward[0]) * 0.01 / (len(upward) - 1)
    assert len(upward) >= 5
    assert measured == pytest.approx(period, rel=0.01)


def test_energy_is_kept_without_friction() -> None:
    model, qpos, qvel = frictionless_path(0.5, 1000)
    data = mujoco.MjData(model)
    energy = []
    for data.qpos[:], data.qvel[:] in zip(qpos, qvel, strict=True):
        mujoco.mj_forward(model, data)
        mujoco.mj_energyPos(model, data)
        mujoco.mj_energyVel(model, data)
        energy.append(data.energy.sum())
    assert np.ptp(qpos[:, 1]) > math.pi  # it did fall and swing through
    assert np.ptp(energy) < 0.05 * (0.1 * 9.81 * 1.0)  # of the energy between upright and hanging


def test_the_stops_hold_the_cart_and_balance_ends_before_them() -> None:
    engine = MujocoEngine(load_model(), 1, decimation=2, num_threads=1)
    engine.reset(np.array([True]), np.array([[0.0, math.pi]]), np.zeros((1, 2)))
    positions = np.array([engine.step(np.ones((1, 1))).qpos[0, 0] for _ in range(200)])
    assert positions.max() > balance().config.max_cart_position_m
    assert positions.max() < 1.9
