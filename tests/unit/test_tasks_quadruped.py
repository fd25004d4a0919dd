"""The quadruped: kinematics and numbers against MuJoCo's model, commands, pushes, variants, reward, falls."""

import math
import re
from typing import Any

import array_api_compat.numpy as xp
import mujoco
import numpy as np
import pytest

from lockstep.core.errors import UsageError
from lockstep.core.types import State
from lockstep.session.make_config import make_config
from lockstep.sim.models import load_models
from lockstep.sim.mujoco_c import MujocoEngine, make_engine
from lockstep.tasks.quadruped import body
from lockstep.tasks.quadruped.config import TRUNK_MASS
from lockstep.tasks.quadruped.task import COMMAND_NOISE, NUM_SENSED, PUSH_NOISE, TIMESTEP
from lockstep.tasks.quadruped_velocity_flat.config import QuadrupedVelocityFlatConfig
from lockstep.tasks.quadruped_velocity_flat.task import QuadrupedVelocityFlat

LEGS = ("FR", "FL", "RR", "RL")


def make_task(**fields: Any) -> QuadrupedVelocityFlat:
    return QuadrupedVelocityFlat(QuadrupedVelocityFlatConfig.model_validate(fields))


def load_model() -> mujoco.MjModel:
    return mujoco.MjModel.from_xml_path(str(QuadrupedVelocityFlat.model_path))


def standing(task: QuadrupedVelocityFlat, num_envs: int = 1, **variables: Any) -> State:
    """Robots at rest on the floor, told to stand."""
    start = task.reset(xp, np.full((num_envs, task.num_reset_noise), 0.5))
    qpos = start.qpos.copy()
    qpos[:, 2] = body.REST_HEIGHT
    qvel = np.zeros_like(start.qvel)
    known = start.variables | {"command": np.zeros((num_envs, 3))} | variables
    return State(qpos, qvel, qpos[:, 7:], np.zeros((num_envs, 0)), known)


def seen(state: State) -> State:
    """The state with what the task keeps of its positions and velocities brought up to date."""
    trunk = body.trunk(xp, state.qpos, state.qvel)
    feet = body.over_ground(xp, trunk, body.feet(xp, state.qpos[:, 7:], state.qvel[:, 6:]))
    follows = {"up": trunk.up, "velocity": trunk.velocity, "sole_height": feet.height, "sole_speed": feet.speed}
    return state._replace(variables=state.variables | follows)


def rewards(task: QuadrupedVelocityFlat, state: State) -> dict[str, float]:
    state = seen(state)
    return {name: float(term[0]) for name, term in task.rewards(xp, state, np.zeros((1, 12))).items()}


# --- the robot -----------------------------------------------------------------------------------------------------


def test_feet_and_trunk_are_where_mujoco_has_them() -> None:
    model, random = load_model(), np.random.default_rng(3)
    data, measured = mujoco.MjData(model), np.zeros(6)
    for _ in range(5):
        data.qpos[:], data.qvel[:] = random.normal(size=19), random.normal(size=18)
        data.qpos[3:7] /= np.linalg.norm(data.qpos[3:7])
        mujoco.mj_forward(model, data)
        trunk = body.trunk(xp, data.qpos[None], data.qvel[None])
        mujoco.mj_objectVelocity(model, data, mujoco.mjtObj.mjOBJ_XBODY, model.body("trunk").id, measured, 1)
        np.testing.assert_allclose(trunk.angular_velocity[0], measured[:3], atol=1e-13)
        np.testing.assert_allclose(trunk.velocity[0], measured[3:], atol=1e-13)
        np.testing.assert_allclose(trunk.up[0], data.body("trunk").xmat.reshape(3, 3)[2], atol=1e-13)
        feet = body.over_ground(xp, trunk, body.feet(xp, data.qpos[None, 7:], data.qvel[None, 6:]))
        for index, leg in enumerate(LEGS):
            foot = model.geom(f"{leg}_foot")
            mujoco.mj_objectVelocity(model, data, mujoco.mjtObj.mjOBJ_GEOM, foot.id, measured, 0)
            assert feet.height[0, index] == pytest.approx(data.geom(foot.id).xpos[2] - foot.size[0], abs=1e-13)
            assert feet.speed[0, index] == pytest.approx(np.hypot(*measured[3:5]), abs=1e-12)


def test_the_tasks_numbers_are_the_models() -> None:
    model = load_model()
    assert (model.nq, model.nv, model.nu) == (19, 18, 12)
    assert model.opt.timestep == TIMESTEP
    names = [f"{leg}_{part}" for leg in LEGS for part in ("hip", "thigh", "calf")]
    assert [model.actuator(index).name for index in range(12)] == names
    assert [model.joint(int(joint)).name for joint in model.actuator_trnid[:, 0]] == names
    assert [model.joint(name).qposadr[0] for name in names] == list(range(7, 19))
    np.testing.assert_array_equal([model.joint(name).range for name in names], np.transpose(LIMITS))
    np.testing.assert_array_equal(model.actuator_forcerange[:, 1], body.MAX_TORQUE)
    np.testing.assert_array_equal(model.actuator_gainprm[:, 0], body.STIFFNESS)
    np.testing.assert_array_equal(model.actuator_biasprm[:, 1:3], [[-body.STIFFNESS, -body.DAMPING]] * 12)
    assert model.body("trunk").mass == TRUNK_MASS
    assert model.geom("FR_foot").size[0] == body.FOOT_RADIUS
    assert sum(model.body_mass) == pytest.approx(12.74, abs=0.01)  # kg; Unitree says 12 with the battery
    np.testing.assert_array_equal(model.key("home").qpos[7:], body.REST)


LIMITS = (body.LOWER_LIMITS, body.UPPER_LIMITS)


def test_without_an_action_it_stands() -> None:
    task = make_task(randomization={"num_models": 1})
    engine = make_engine(task, num_envs=1, first_env_id=0, decimation=4, num_threads=1, seed=1)
    state = standing(task)
    engine.reset(np.array([True]), state.qpos, state.qvel)
    for _ in range(250):
        info = engine.step(task.control(xp, state, np.zeros((1, 12))))
    rest = state._replace(qpos=info.qpos, qvel=info.qvel)
    assert not task.terminations(xp, rest)[0]
    assert np.abs(info.qvel).max() < 0.01
    assert 0.23 < info.qpos[0, 2] < body.REST_HEIGHT
    assert task.observations(xp, seen(rest), np.full((1, task.num_step_noise), 0.5))["actor"][0, 5] < -0.99  # level


# --- variants ------------------------------------------------------------------------------------------------------


def test_variants_are_within_their_ranges_and_follow_the_noise() -> None:
    task, original = make_task(), load_model()
    low, high = load_model(), load_model()
    task.vary_model(low, np.zeros(7))
    task.vary_model(high, np.ones(7))
    foot, trunk = original.geom("RL_foot").id, original.body("trunk").id
    assert (low.geom_friction[foot, 0], high.geom_friction[foot, 0]) == pytest.approx((0.4, 1.2))
    assert (low.body_mass[trunk], high.body_mass[trunk]) == pytest.approx((4.204, 7.204))
    np.testing.assert_allclose(high.body_ipos[trunk] - original.body_ipos[trunk], 0.03)
    np.testing.assert_allclose(low.actuator_gainprm[:, 0] / original.actuator_gainprm[:, 0], 0.8)
    np.testing.assert_allclose(high.actuator_biasprm[:, 1:3] / original.actuator_biasprm[:, 1:3], 1.2)
    models = load_models(task, 1)
    assert len(models) == 64
    masses = np.array([model.body_subtreemass[trunk] for model in models])  # which MuJoCo derives
    assert np.ptp(masses) > 2.5
    assert len(set(masses)) == 64
    np.testing.assert_array_equal(masses, [model.body_subtreemass[trunk] for model in load_models(task, 1)])
    assert not np.array_equal(masses, [model.body_subtreemass[trunk] for model in load_models(task, 2)])


def test_one_model_is_the_file_as_it_is() -> None:
    (model,) = load_models(make_task(randomization={"num_models": 1}), 1)
    np.testing.assert_array_equal(model.body_mass, load_model().body_mass)


def test_an_env_has_its_model_wherever_it_lives() -> None:
    task = make_task(randomization={"num_models": 5})
    start = standing(task, 12)

    def fall(first: int, num_envs: int) -> np.ndarray:
        engine: MujocoEngine = make_engine(
            task, num_envs=num_envs, first_env_id=first, decimation=4, num_threads=1, seed=1
        )
        part = slice(first, first + num_envs)
        engine.reset(np.ones(num_envs, dtype=bool), start.qpos[part], start.qvel[part])
        for _ in range(5):
            info = engine.step(start.qpos[part, 7:] + 0.2)
        return np.array(info.qpos)

    whole = fall(0, 12)
    assert len({row.tobytes() for row in whole}) == 5
    np.testing.assert_array_equal(whole, np.concatenate((fall(0, 7), fall(7, 5))))
    np.testing.assert_array_equal(whole[:7], whole[5:][:7])


# --- commands and pushes -------------------------------------------------------------------------------------------


def test_a_command_holds_until_it_is_due() -> None:
    task = make_task(command_interval_s=(1.0, 3.0), standing_share=0.25)
    noise = np.full((3, task.num_step_noise), 0.5)
    noise[:, COMMAND_NOISE] = [[0.0, 0.5, 1.0, 0.25, 0.5]] * 3
    noise[2, COMMAND_NOISE.start + 3] = 0.24  # one of the quarter that stands
    before = np.array([[0.3, 0.2, 0.1]] * 3)
    state = standing(task, 3, command=before, until_command=np.array([1.0, 0.0, 0.0]))
    after = task.advance(xp, state, np.zeros((3, 12)), noise).variables
    np.testing.assert_allclose(after["command"], [[0.3, 0.2, 0.1], [-1.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
    np.testing.assert_array_equal(after["until_command"], [0.0, 100.0, 100.0])  # 2 s of 0.02 s


def test_a_push_comes_once_and_goes_sideways() -> None:
    task = make_task(push_velocity_m_s=0.4, push_interval_s=(1.0, 2.0))
    noise = np.full((2, task.num_step_noise), 0.5)
    noise[:, PUSH_NOISE] = [1.0, 0.25, 0.5]
    state = standing(task, 2, until_push=np.array([0.0, 1.0]))
    pushed = task.push(xp, state, noise)
    assert pushed is not None
    np.testing.assert_allclose(pushed, [[0.4, -0.2] + [0.0] * 16, [0.0] * 18])
    after = task.advance(xp, state, np.zeros((2, 12)), noise)
    np.testing.assert_array_equal(after.variables["until_push"], [75.0, 0.0])
    assert make_task(push_velocity_m_s=0.0).push(xp, state, noise) is None


# --- what is seen and what counts ----------------------------------------------------------------------------------


def test_the_critic_sees_exactly_and_more_than_the_actor() -> None:
    task = make_task()
    state = standing(task)
    state.qvel[:] = np.linspace(-1, 1, 18)
    lowest, highest = (
        task.observations(xp, seen(state), np.full((1, task.num_step_noise), value)) for value in (0.0, 1.0)
    )
    np.testing.assert_array_equal(lowest["critic"], highest["critic"])
    middle = (lowest["actor"] + highest["actor"]) / 2
    np.testing.assert_allclose(middle, lowest["critic"][:, :45], atol=1e-12)
    spread = (highest["actor"] - lowest["actor"])[0] / 2
    expected = [0.2] * 3 + [0.05] * 3 + [0.01] * 12 + [1.5] * 12
    np.testing.assert_allclose(spread, expected + [0.0] * 15, atol=1e-12)
    assert len(expected) == NUM_SENSED


def test_standing_as_told_earns_all_there_is_to_earn_by_standing() -> None:
    task = make_task()
    found = rewards(task, standing(task))
    weights = task.config.reward_weights
    for name in ("track_velocity", "track_yaw_rate", "upright"):
        assert found[name] == pytest.approx(getattr(weights, name) * 0.02)
    assert sum(found.values()) == pytest.approx(sum(found[name] for name in found if found[name] > 0))
    assert set(found) == set(task.reward_terms)


def test_the_largest_reward_is_that_of_four_long_steps_ending_at_once_in_perfect_order() -> None:
    task = make_task()
    state = standing(task, command=np.array([[0.5, 0.0, 0.0]]), landed=np.full((1, 4), 0.35))
    state.qvel[0, 0] = 0.5
    positive = sum(value for value in rewards(task, state).values() if value > 0)
    assert positive == pytest.approx(task.max_step_reward)


@pytest.mark.parametrize(
    ("name", "share"),
    [
        ("track_velocity", math.exp(-1)),  # off by the scale
        ("vertical_velocity", -0.25),
        ("trunk_height", -0.0004),
        ("action_rate", -12 * 0.09),
        ("foot_slip", -4 * 0.16),
        ("roll_pitch_rate", -0.25),
    ],
)
def test_terms_by_hand(name: str, share: float) -> None:
    task = make_task()
    state = standing(task)
    if name == "track_velocity":
        state = standing(task, command=np.array([[0.0, task.config.velocity_scale_m_s, 0.0]]))
    elif name == "vertical_velocity":
        state.qvel[0, 2] = 0.5
    elif name == "trunk_height":
        state.qpos[0, 2] += 0.02
    elif name == "action_rate":
        state = standing(task, action=np.full((1, 12), 0.3), previous_action=np.zeros((1, 12)))
    elif name == "foot_slip":
        state.qvel[0, 0] = 0.4  # all slide along
    else:
        state.qvel[0, 4] = 0.5
    weight = getattr(task.config.reward_weights, name)
    assert rewards(task, state)[name] == pytest.approx(share * weight * 0.02)


def test_steps_are_paid_when_they_end_and_only_on_the_way() -> None:
    task = make_task(reward_weights={"air_time": 1.0})
    raised = standing(task, air_time=np.array([[0.2, 0.0, 0.0, 0.0]]), command=np.array([[0.5, 0.0, 0.0]]))
    raised.qpos[0, 8] += 0.4  # the first leg's knee goes up
    raised.qpos[0, 9] -= 0.8
    noise = np.full((1, task.num_step_noise), 0.5)
    up = task.advance(xp, raised, np.zeros((1, 12)), noise)
    np.testing.assert_allclose(up.variables["air_time"], [[0.22, 0, 0, 0]])
    assert rewards(task, up)["air_time"] == 0.0
    down = task.advance(xp, standing(task)._replace(variables=up.variables), np.zeros((1, 12)), noise)
    np.testing.assert_allclose(down.variables["landed"], [[0.22, 0, 0, 0]])
    assert rewards(task, down)["air_time"] == pytest.approx(0.12)  # what is above a tenth of a second
    told_to_stand = down._replace(variables=down.variables | {"command": np.zeros((1, 3))})
    assert rewards(task, told_to_stand)["air_time"] == 0.0
    again = task.advance(xp, down, np.zeros((1, 12)), noise)
    assert rewards(task, again)["air_time"] == 0.0


def test_falls_end_the_episode_and_are_counted() -> None:
    task = make_task()
    state = standing(task, 3)
    state.qpos[1, 2] = 0.1
    state.qpos[2, 3:7] = [math.cos(0.6), math.sin(0.6), 0.0, 0.0]  # 69 degrees
    assert task.terminations(xp, state).tolist() == [False, True, True]
    metrics = task.metrics(xp, state, np.zeros((3, 12)))
    np.testing.assert_allclose(metrics["falls_per_s"], [0.0, 50.0, 50.0])
    np.testing.assert_allclose(task.rewards(xp, state, np.zeros((3, 12)))["fall"], [0.0, -2.0, -2.0])


def test_errors_are_measured_in_the_robots_own_axes() -> None:
    task = make_task()
    state = standing(task, command=np.array([[0.4, 0.0, 0.5]]))
    state.qpos[0, 3:7] = [math.sqrt(0.5), 0.0, 0.0, math.sqrt(0.5)]  # faces along the world's y
    state.qvel[0, :2] = [0.0, 0.1]
    state.qvel[0, 5] = 0.8
    metrics = task.metrics(xp, seen(state), np.zeros((1, 12)))
    assert metrics["velocity_error"][0] == pytest.approx(0.3)
    assert metrics["yaw_rate_error"][0] == pytest.approx(0.3)


# --- settings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"command_forward_m_s": [1.0, -1.0]}, "begins above its end"),
        ({"push_interval_s": [0.0, 1.0]}, "push_interval_s[0] must be greater than 0, not 0.0"),
        ({"randomization": {"friction": [-0.1, 1.0]}}, "friction[0] must be greater than 0"),
        ({"randomization": {"stiffness": [1.0, 1e30]}}, "stiffness[1] must be less than or equal to 100"),
        ({"observation_noise": {"gravity": 1e39}}, "gravity must be less than or equal to 1000"),
        ({"reward_weights": {"fall": 1e300}}, "fall must be less than or equal to 1000000"),
        ({"command_forward_m_s": [-1e308, 1.0]}, "command_forward_m_s[0] must be greater than or equal to -100"),
        ({"randomization": {"payload_kg": [-6.0, 0.0]}}, "must leave some of the trunk's"),
        ({"randomization": {"num_models": 0}}, "randomization.num_models"),
        ({"reward_weights": {"air_tme": 1}}, "did you mean"),
    ],
)
def test_settings_that_make_no_sense_are_refused_in_words(env: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=re.escape(words)):
        make_config("quadruped_velocity_flat", env=env)
