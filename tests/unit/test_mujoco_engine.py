"""The mujoco engine against a plain loop of mj_step, and what it does when physics fails."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import mujoco
import numpy as np
import pytest
import torch

from lockstep.core.errors import UsageError
from lockstep.core.types import StepInfo
from lockstep.sim.mujoco_c import MujocoEngine, make_engine
from lockstep.tasks.cartpole_balance.config import CartpoleBalanceConfig
from lockstep.tasks.cartpole_balance.task import CartpoleBalance
from lockstep.tasks.cartpole_classic.config import CartpoleClassicConfig
from lockstep.tasks.cartpole_classic.task import CartpoleClassic

NUM_ENVS, DECIMATION = 64, 4

# A body on two jointed legs that falls onto the floor: contacts, joint limits, an actuator with a state, sensors.
# The motor of the hip has no control range.
WALKER = """
<mujoco>
  <option timestep="0.005" integrator="implicitfast"/>
  <worldbody>
    <geom type="plane" size="5 5 1"/>
    <body name="torso" pos="0 0 0.7">
      <freejoint/>
      <geom type="box" size="0.2 0.1 0.05" mass="2"/>
      <body pos="0.15 0 0">
        <joint name="hip" type="hinge" axis="0 1 0" range="-1 1" limited="true" damping="0.1"/>
        <geom type="capsule" fromto="0 0 0 0 0 -0.3" size="0.04" mass="0.5"/>
        <body pos="0 0 -0.3">
          <joint name="knee" type="hinge" axis="0 1 0" range="-1.5 0.1" limited="true" damping="0.1"/>
          <geom type="capsule" fromto="0 0 0 0 0 -0.3" size="0.04" mass="0.3"/>
        </body>
      </body>
      <body pos="-0.15 0 0">
        <joint name="back" type="hinge" axis="0 1 0" range="-1 1" limited="true" damping="0.1"/>
        <geom type="capsule" fromto="0 0 0 0 0 -0.6" size="0.04" mass="0.6"/>
      </body>
    </body>
  </worldbody>
  <actuator>
    <motor joint="hip" gear="20"/>
    <general joint="knee" dyntype="filter" dynprm="0.05" gainprm="20" ctrlrange="-1 1" ctrllimited="true"/>
    <motor joint="back" gear="20" ctrlrange="-1 1" ctrllimited="true"/>
  </actuator>
  <sensor>
    <jointpos joint="hip"/>
    <framepos objtype="body" objname="torso"/>
  </sensor>
</mujoco>
"""


@pytest.fixture(scope="module")
def model() -> mujoco.MjModel:
    return mujoco.MjModel.from_xml_string(WALKER)


def start(model: mujoco.MjModel) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(1)
    qpos = np.tile(model.qpos0, (NUM_ENVS, 1))
    qpos[:, 2] += random.uniform(0.0, 0.1, NUM_ENVS)
    return qpos, random.uniform(-0.5, 0.5, (NUM_ENVS, model.nv))


def controls(num_steps: int) -> np.ndarray:
    return np.random.default_rng(2).uniform(-1, 1, (num_steps, NUM_ENVS, 3))


def make(model: mujoco.MjModel, num_threads: int = 1, envs: slice = slice(None)) -> MujocoEngine:
    qpos, qvel = (array[envs] for array in start(model))
    engine = MujocoEngine(model, len(qpos), DECIMATION, num_threads)
    engine.reset(np.ones(len(qpos), dtype=bool), qpos, qvel)
    return engine


def path(engine: MujocoEngine, ctrl: np.ndarray) -> np.ndarray:
    """Positions, velocities and sensordata after each env step, ``(num_steps, num_envs, size)``."""
    return np.array([flat(engine.step(step_ctrl)) for step_ctrl in ctrl])


def flat(info: StepInfo) -> np.ndarray:
    return np.concatenate((info.qpos, info.qvel, info.sensordata), axis=1)


def plain_loop(model: mujoco.MjModel, ctrl: np.ndarray, *, warm: bool) -> np.ndarray:
    """What ``path`` returns, by one MjData per env; with ``warm`` False the solver starts cold at each env step."""
    qpos, qvel = start(model)
    rows = np.zeros((len(ctrl), NUM_ENVS, model.nq + model.nv + model.nsensordata))
    for env in range(NUM_ENVS):
        data = mujoco.MjData(model)
        data.qpos[:], data.qvel[:] = qpos[env], qvel[env]
        mujoco.mj_forward(model, data)
        for step in range(len(ctrl)):
            data.ctrl[:] = ctrl[step, env]
            if not warm:
                data.qacc_warmstart[:] = 0
            for _ in range(DECIMATION):
                mujoco.mj_step(model, data)
            rows[step, env] = np.concatenate((data.qpos, data.qvel, data.sensordata))
    return rows


def test_steps_are_those_of_a_plain_loop_warm_start_included(model: mujoco.MjModel) -> None:
    ctrl = controls(60)
    measured = path(make(model), ctrl)
    np.testing.assert_array_equal(measured, plain_loop(model, ctrl, warm=True))
    # It takes the warm start: a loop that drops it drifts away (so this test sees the difference).
    assert not np.array_equal(measured, plain_loop(model, ctrl, warm=False))


@pytest.mark.parametrize("num_threads", [2, 3])
def test_results_do_not_depend_on_the_number_of_threads(model: mujoco.MjModel, num_threads: int) -> None:
    ctrl = controls(60)
    np.testing.assert_array_equal(path(make(model, num_threads), ctrl), path(make(model, 1), ctrl))


def test_results_do_not_depend_on_how_envs_are_split(model: mujoco.MjModel) -> None:
    ctrl = controls(60)
    halves = [path(make(model, 2, envs), ctrl[:, envs]) for envs in (slice(0, 32), slice(32, 64))]
    np.testing.assert_array_equal(np.concatenate(halves, axis=1), path(make(model), ctrl))


def plant(engine: MujocoEngine, ctrl: np.ndarray, qpos: np.ndarray, qvel: np.ndarray) -> dict[int, str]:
    """Spoil states (by a reset) and controls of some envs; return which, and what MuJoCo calls it."""
    qpos[3, 1], qvel[8, 2], qvel[13, :] = np.nan, 1e300, 5e9
    engine.reset(np.isin(np.arange(NUM_ENVS), (3, 8, 13)), qpos, qvel)
    ctrl[20, 0], ctrl[21, 1], ctrl[22, 0], ctrl[23, 0] = np.nan, np.inf, 1e300, -1e11
    return {3: "QPOS", 8: "QVEL", 13: "QACC", 20: "", 21: "", 22: "CTRL", 23: "CTRL"}


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("decimation", [1, DECIMATION])
def test_a_failed_env_is_flagged_and_contained(model: mujoco.MjModel, num_threads: int, decimation: int) -> None:
    qpos, qvel = start(model)
    everywhere = np.ones(NUM_ENVS, dtype=bool)
    engine, healthy = (MujocoEngine(model, NUM_ENVS, decimation, num_threads) for _ in range(2))
    for each in (engine, healthy):
        each.reset(everywhere, qpos, qvel)
    ctrl = controls(30)
    spoilt_ctrl = ctrl[0].copy()
    planted = plant(engine, spoilt_ctrl, qpos.copy(), qvel.copy())
    rest = np.setdiff1d(np.arange(NUM_ENVS), list(planted))

    info = engine.step(spoilt_ctrl)
    assert np.flatnonzero(info.diverged).tolist() == sorted(planted)
    for kind in ("QPOS", "QVEL", "QACC"):
        assert engine.warning_counts[f"mjWARN_BAD{kind}"] == 1
    assert engine.warning_counts["mjWARN_BADCTRL"] == 2
    np.testing.assert_array_equal(info.qpos[20:24], qpos[20:24])  # as before the step
    np.testing.assert_array_equal(flat(info)[rest], flat(healthy.step(ctrl[0]))[rest])

    # Reset to where they started, the failed ones go on as new; the others have noticed nothing.
    fresh = MujocoEngine(model, NUM_ENVS, decimation, num_threads)
    fresh.reset(everywhere, qpos, qvel)
    engine.reset(info.diverged.copy(), qpos, qvel)
    for step_ctrl in ctrl[1:]:
        info, healthy_info, fresh_info = (each.step(step_ctrl) for each in (engine, healthy, fresh))
        assert not info.diverged.any()
        np.testing.assert_array_equal(flat(info)[rest], flat(healthy_info)[rest])
        np.testing.assert_array_equal(flat(info)[list(planted)], flat(fresh_info)[list(planted)])


def test_a_failed_env_that_nobody_resets_stays_flagged_until_its_cause_is_gone(model: mujoco.MjModel) -> None:
    engine = make(model)
    ctrl = controls(1)[0]
    spoilt = ctrl.copy()
    spoilt[7] = np.nan
    for _ in range(2):
        info = engine.step(spoilt)
        assert np.flatnonzero(info.diverged).tolist() == [7]
        np.testing.assert_array_equal(info.qpos[7], start(model)[0][7])
    assert not engine.step(ctrl).diverged.any()


# Two boxes that need more memory than they are given once they touch the floor.
CRAMPED = """
<mujoco>
  <size memory="4K"/>
  <worldbody>
    <geom type="plane" size="5 5 1"/>
    <body pos="0 0 1"><freejoint/><geom type="box" size="0.1 0.1 0.1"/></body>
    <body pos="1 0 1"><freejoint/><geom type="box" size="0.1 0.1 0.1"/></body>
  </worldbody>
</mujoco>
"""


def test_an_env_in_which_mujoco_raises_an_error_is_contained_too() -> None:
    model = mujoco.MjModel.from_xml_string(CRAMPED)
    engine = MujocoEngine(model, 3, 2, 2)
    qpos = np.tile(model.qpos0, (3, 1))
    qpos[1, [2, 9]] = 0.09
    engine.reset(np.ones(3, dtype=bool), qpos, np.zeros((3, model.nv)))
    info = engine.step(np.zeros((3, 0)))
    assert info.diverged.tolist() == [False, True, False]
    assert engine.warning_counts == {"error": 1}
    assert info.qpos[1, 2] == 0.09
    assert info.qpos[0, 2] == info.qpos[2, 2] < 1.0  # the others fall
    engine.reset(info.diverged, np.tile(model.qpos0, (3, 1)), np.zeros((3, model.nv)))
    assert not engine.step(np.zeros((3, 0))).diverged.any()


FAILING_SCRIPT = f"""
import mujoco, numpy, pathlib, sys
from lockstep.sim.mujoco_c import MujocoEngine, make_engine
from lockstep.tasks.cartpole_balance.config import CartpoleBalanceConfig
from lockstep.tasks.cartpole_balance.task import CartpoleBalance
from lockstep.tasks.cartpole_classic.config import CartpoleClassicConfig
from lockstep.tasks.cartpole_classic.task import CartpoleClassic
if len(sys.argv) > 1:
    config = mujoco.MjLogConfig.get()
    config.logfile = sys.argv[1]
    config.set()
engine = MujocoEngine(mujoco.MjModel.from_xml_string('''{WALKER}'''), 2, 1, 2)
ctrl = numpy.full((2, 3), 1e300)
assert engine.step(ctrl).diverged.all()
assert engine.warning_counts == {{"mjWARN_BADCTRL": 2}}, engine.warning_counts
"""


def run_failing(folder: Path, *arguments: str) -> str:
    command = [sys.executable, "-c", FAILING_SCRIPT, *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_mujoco_neither_prints_nor_writes_into_the_working_folder(tmp_path: Path) -> None:
    assert run_failing(tmp_path) == ""
    assert list(tmp_path.iterdir()) == []


def test_a_log_file_that_was_chosen_is_kept(tmp_path: Path) -> None:
    assert run_failing(tmp_path, "chosen.txt") == ""
    assert [file.name for file in tmp_path.iterdir()] == ["chosen.txt"]
    assert "CTRL" in (tmp_path / "chosen.txt").read_text()


def test_reset_gives_the_sensordata_of_the_new_state_and_leaves_the_rest(model: mujoco.MjModel) -> None:
    engine = make(model)
    before = engine.step(controls(1)[0])
    stepped = flat(before).copy()
    qpos, qvel = start(model)
    qpos[5, :3], qpos[5, 7] = (1.0, 2.0, 3.0), 0.4
    mask = np.arange(NUM_ENVS) == 5
    sensordata = engine.reset(mask, qpos, qvel)
    np.testing.assert_allclose(sensordata[5], [0.4, 1.0, 2.0, 3.0], atol=1e-12)  # hip angle, torso position
    np.testing.assert_array_equal(sensordata[~mask], stepped[~mask, -4:])
    np.testing.assert_array_equal(flat(before), stepped)  # what the step had lent is as it was


def test_resetting_nobody_changes_nothing(model: mujoco.MjModel) -> None:
    engine, other = make(model), make(model)
    ctrl = controls(6)
    for step_ctrl in ctrl:
        engine.reset(np.zeros(NUM_ENVS, dtype=bool), *start(model))
        np.testing.assert_array_equal(flat(engine.step(step_ctrl)), flat(other.step(step_ctrl)))


def test_a_saved_state_continues_bitwise_on_any_number_of_threads(model: mujoco.MjModel) -> None:
    ctrl = controls(60)
    engine = make(model)
    path(engine, ctrl[:30])
    saved = engine.state_dict()
    assert {array.shape[0] for array in saved.values()} == {NUM_ENVS}
    expected = path(engine, ctrl[30:])
    other = MujocoEngine(model, NUM_ENVS, DECIMATION, num_threads=2)
    other.load_state_dict({name: torch.from_numpy(array) for name, array in saved.items()})
    nobody = np.zeros(NUM_ENVS, dtype=bool)
    np.testing.assert_array_equal(other.reset(nobody, *start(model)), saved["sensordata"])
    np.testing.assert_array_equal(path(other, ctrl[30:]), expected)


def test_torch_takes_the_arrays_without_a_copy(model: mujoco.MjModel) -> None:
    engine = make(model)
    first = torch.from_numpy(engine.step(controls(1)[0]).qpos)
    kept = first.clone()
    assert first.is_contiguous()
    assert first.dtype == torch.float64
    engine.reset(np.ones(NUM_ENVS, dtype=bool), *start(model))
    assert torch.equal(first, kept)  # not overwritten by a reset ...
    engine.step(controls(2)[1])
    assert not torch.equal(first, kept)  # ... but by the next step


def test_wrong_use_is_refused_in_one_line(model: mujoco.MjModel) -> None:
    for sizes, message in (((-1, 1, 1), "num_envs -1"), ((1, 0, 1), "decimation 0"), ((1, 1, 0), "num_threads 0")):
        with pytest.raises(UsageError, match=message):
            MujocoEngine(model, *sizes)
    with pytest.raises(UsageError, match="same model and number of envs"):
        make(model).load_state_dict(make(model, envs=slice(0, 5)).state_dict())
    sleeping = mujoco.MjModel.from_xml_string('<mujoco><option><flag sleep="enable"/></option><worldbody/></mujoco>')
    with pytest.raises(UsageError, match="can't step this model"):
        MujocoEngine(sleeping, 1, 1, 1)


def test_an_engine_is_made_from_a_task_and_its_model(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"num_envs": 3, "first_env_id": 0, "decimation": 2, "num_threads": 1, "seed": 1}
    engine = make_engine(CartpoleBalance(CartpoleBalanceConfig()), **sizes)
    assert (engine.num_envs, engine.num_positions, engine.num_controls, engine.num_sensordata) == (3, 2, 1, 0)
    with pytest.raises(UsageError, match="no MuJoCo model; use --engine analytic"):
        make_engine(CartpoleClassic(CartpoleClassicConfig()), **sizes)
    broken = CartpoleBalance(CartpoleBalanceConfig())
    broken.model_path = tmp_path / "missing.xml"
    with pytest.raises(UsageError, match=r"can't read .*missing\.xml"):
        make_engine(broken, **sizes)


def test_close_may_be_called_twice_and_what_was_lent_stays_readable(model: mujoco.MjModel) -> None:
    engine = make(model, num_threads=2)
    info = engine.step(controls(1)[0])
    engine.close()
    engine.close()
    assert np.isfinite(info.qpos).all()
