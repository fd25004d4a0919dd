"""The classic cart-pole against values worked out by hand."""

import math

import array_api_compat.numpy as xp
import numpy as np
import pytest

from lockstep.core.types import ActionSpace, State
from lockstep.tasks.cartpole_classic.config import CartpoleClassicConfig
from lockstep.tasks.cartpole_classic.task import CartpoleClassic


def make(**fields: object) -> CartpoleClassic:
    return CartpoleClassic(CartpoleClassicConfig.model_validate(fields))


def at(position: float, angle: float) -> State:
    zeros = np.zeros((1, 2))
    return State(np.array([[position, angle]]), zeros, np.zeros((1, 1)), np.zeros((1, 0)), {})


# One step of 0.02 s from (x, angle, x', angle') under a force. With mass 1 + 0.1 kg, half length 0.5 m, g 9.8 m/s^2:
#
# upright at rest, 10 N:   push 10/1.1 = 100/11; angle'' = -(100/11) / (0.5 (4/3 - 1/11)) = -600/41 = -14.634146
#                          x'' = 100/11 + 0.05 (600/41) / 1.1 = 400/41 = 9.756098
# hanging at rest, -10 N:  sine 0, cosine -1: push -100/11; angle'' = -600/41; x'' = -400/41
# level, turning at 2, 10 N: cosine 0: push = x'' = (10 + 0.05 * 4) / 1.1 = 9.272727; angle'' = 9.8 / (2/3) = 14.7
# leaning 60 degrees, turning at -1, -10 N: sine 0.866025, cosine 1/2: push (-10 + 0.0433013) / 1.1 = -9.051544
#                          angle'' = (8.487049 + 4.525772) / 0.655303 = 19.857721
#                          x'' = -9.051544 - 0.05 * 19.857721 / 2 / 1.1 = -9.502856
# Positions move with the old velocities (explicit Euler).
ONE_STEP = [
    ((0.0, 0.0, 0.0, 0.0), 10.0, (0.0, 0.0, 0.195121951, -0.292682927)),
    ((0.0, math.pi, 0.0, 0.0), -10.0, (0.0, math.pi, -0.195121951, -0.292682927)),
    ((0.5, math.pi / 2, -1.0, 2.0), 10.0, (0.48, math.pi / 2 + 0.04, -0.814545455, 2.294)),
    ((0.0, math.pi / 3, 0.5, -1.0), -10.0, (0.01, math.pi / 3 - 0.02, 0.5 - 0.190057116, -1 + 0.397154309)),
]


@pytest.mark.parametrize(("before", "force", "after"), ONE_STEP)
def test_one_step_has_the_values_of_a_hand_calculation(
    before: tuple[float, ...], force: float, after: tuple[float, ...]
) -> None:
    state = np.array([before])
    qpos, qvel = make().dynamics(xp, state[:, :2], state[:, 2:], np.array([[force]]))
    np.testing.assert_allclose(np.concatenate((qpos, qvel), axis=1)[0], after, atol=1e-8)


def test_continuous_actions_are_a_share_of_the_force_and_clipped() -> None:
    task = make()
    assert task.action_space == ActionSpace("continuous", 1)
    actions = np.array([[0.25], [-7.0], [1.5]])
    np.testing.assert_array_equal(task.control(xp, at(0, 0), actions), [[2.5], [-10.0], [10.0]])


def test_discrete_actions_push_left_and_right() -> None:
    task = make(action_kind="discrete", max_force_newtons=3.0)
    assert task.action_space == ActionSpace("discrete", 2)
    assert task.control(xp, at(0, 0), np.array([0])).tolist() == [[-3.0]]
    assert task.control(xp, at(0, 0), np.array([1])).tolist() == [[3.0]]


@pytest.mark.parametrize(
    ("position", "angle_deg", "ended"),
    [(0, 0, False), (2.39, 0, False), (-2.41, 0, True), (0, 11.9, False), (0, -12.1, True), (3.0, 20, True)],
)
def test_an_episode_fails_beyond_12_degrees_or_2_4_m(position: float, angle_deg: float, ended: bool) -> None:
    assert make().terminations(xp, at(position, math.radians(angle_deg))).tolist() == [ended]


def test_resets_fill_the_range_about_upright() -> None:
    extremes = np.array([[0.0, 0.0, 0.0, 0.0], [0.5, 0.5, 0.5, 0.5], [0.75, 1.0, 0.25, 0.5]])
    qpos, qvel, variables = make().reset(xp, extremes)
    np.testing.assert_allclose(qpos, [[-0.05, -0.05], [0.0, 0.0], [0.025, 0.05]], atol=1e-15)
    np.testing.assert_allclose(qvel, [[-0.05, -0.05], [0.0, 0.0], [-0.025, 0.0]], atol=1e-15)
    assert variables == {}


def test_500_steps_of_20_ms_are_worth_500() -> None:
    task = make()
    assert task.step_duration_s == 0.02
    assert task.config.max_episode_steps * task.max_step_reward == 500
    assert sum(float(term[0]) for term in task.rewards(xp, at(0, 0), np.zeros((1, 1))).values()) == 1.0
