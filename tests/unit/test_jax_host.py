"""Engines of numpy arrays inside JAX: the same numbers, bits that survive, a pool for several devices."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mujoco
import numpy as np
import pytest

from lockstep.core.errors import UsageError
from lockstep.core.types import StepInfo
from lockstep.sim.mujoco_c import MujocoEngine
from tests.unit.test_mujoco_engine import DECIMATION, NUM_ENVS, WALKER, controls, flat, start

jax = pytest.importorskip("jax")
jnp = jax.numpy

from lockstep.distributed.jax import SHARDED, make_mesh  # noqa: E402
from lockstep.sim.jax_host import HostEngine  # noqa: E402

pytestmark = pytest.mark.usefixtures("double_precision")

POINT = """
<mujoco>
  <option timestep="0.01" gravity="0 0 0"/>
  <worldbody><body><joint name="slide" type="slide"/><geom size="0.1" mass="1"/></body></worldbody>
  <actuator><motor joint="slide"/></actuator>
</mujoco>
"""
NAN_WITH_A_MESSAGE = np.array([0x7FF0_0000_DEAD_BEEF], dtype=np.uint64).view(np.float64)[0]


@pytest.fixture(scope="module")
def model() -> mujoco.MjModel:
    return mujoco.MjModel.from_xml_string(WALKER)


def host_engine(model: mujoco.MjModel, dtype: str = "float64") -> HostEngine:
    return HostEngine(
        lambda num_envs, threads: MujocoEngine(model, num_envs, DECIMATION, threads), num_threads=2, dtype=dtype
    )


def in_dtype(info: StepInfo, dtype: str) -> np.ndarray:
    return flat(StepInfo(*(np.asarray(array).astype(dtype) for array in info)))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_steps_and_resets_are_those_of_the_engine_itself(model: mujoco.MjModel, dtype: str) -> None:
    engine, direct = host_engine(model, dtype), MujocoEngine(model, NUM_ENVS, DECIMATION, 1)
    qpos, qvel = (array.astype(dtype).astype(float) for array in start(model))
    ctrl = controls(30).astype(dtype).astype(float)
    masks = np.zeros((30, NUM_ENVS), dtype=bool)
    masks[0], masks[9, ::3], masks[20, 5] = True, True, True

    def step(physics: Any, now: Any) -> Any:
        step_ctrl, mask = now
        physics, sensordata = engine.reset(physics, mask, jnp.asarray(qpos, dtype), jnp.asarray(qvel, dtype))
        physics, info = engine.step(physics, step_ctrl)
        return physics, (info, sensordata)

    physics, (infos, sensordata) = jax.jit(
        lambda ctrl, masks: jax.lax.scan(step, engine.start(jnp.arange(NUM_ENVS, dtype=jnp.int32)), (ctrl, masks))
    )(jnp.asarray(ctrl, dtype), masks)
    for number in range(30):
        expected = np.array(direct.reset(masks[number], qpos, qvel))
        assert np.array_equal(sensordata[number], expected.astype(dtype)), number
        info = direct.step(ctrl[number])
        measured = StepInfo(*(array[number] for array in infos))
        assert measured.qpos.dtype == measured.sensordata.dtype == dtype
        assert np.array_equal(in_dtype(measured, dtype), in_dtype(info, dtype)), number
        assert not measured.diverged.any()
    # The state behind it is whole, in float64, warm start and activations included.
    rows = direct.state_dict()["integration_state"]
    assert np.array_equal(np.asarray(physics["integration_state"]), rows.view(np.uint32))
    engine.close()


def test_a_failed_env_is_flagged_and_its_warning_counted() -> None:
    model = mujoco.MjModel.from_xml_string(POINT)
    engine = HostEngine(lambda *sizes: MujocoEngine(model, sizes[0], 2, sizes[1]), num_threads=1, dtype="float64")
    physics = engine.start(jnp.arange(4, dtype=jnp.int32))
    assert engine.warning_counts == {}
    mask, qpos, qvel = np.arange(4) == 1, np.zeros((4, 1)), np.full((4, 1), 1e11)
    ctrl = np.array([[0.0], [0.0], [np.nan], [1.0]])

    def reset_and_step(physics: Any) -> Any:
        started, _ = engine.reset(physics, mask, jnp.asarray(qpos), jnp.asarray(qvel))
        return started, *engine.step(started, jnp.asarray(ctrl))

    started, after, info = jax.jit(reset_and_step)(physics)
    assert info.diverged.tolist() == [False, True, True, False]
    assert info.qvel[:, 0].tolist() == [0.0, 1e11, 0.0, 0.02]  # 1 N on 1 kg for two steps of 0.01 s
    same = (np.asarray(after["integration_state"]) == np.asarray(started["integration_state"])).all(axis=1)
    assert same.tolist() == [False, True, True, False]
    assert engine.warning_counts == {"mjWARN_BADQVEL": 1}
    engine.close()


def test_a_start_that_mujoco_warns_of_is_flagged_in_the_first_step() -> None:
    """Sensors are computed by the reset already, where MuJoCo warns; the step may fall to another engine object."""
    model = mujoco.MjModel.from_xml_string(
        POINT.replace("</mujoco>", "<sensor><jointpos joint='slide'/></sensor></mujoco>")
    )
    engine = HostEngine(lambda *sizes: MujocoEngine(model, sizes[0], 2, sizes[1]), num_threads=1, dtype="float64")
    qpos = jnp.asarray([[0.25], [np.nan], [1e11]])

    def reset_and_steps(physics: Any) -> Any:
        physics, sensordata = engine.reset(physics, jnp.ones(3, dtype=bool), qpos, jnp.zeros((3, 1)))
        infos = []
        for _ in range(2):
            physics, info = engine.step(physics, jnp.zeros((3, 1)))
            infos.append(info)
        return sensordata, infos

    sensordata, infos = jax.jit(reset_and_steps)(engine.start(jnp.arange(3, dtype=jnp.int32)))
    assert sensordata[0].tolist() == [0.25]
    for info in infos:
        assert info.diverged.tolist() == [False, True, True]
        np.testing.assert_array_equal(info.qpos, qpos)
    assert engine.warning_counts == {"mjWARN_BADQPOS": 4}
    engine.close()


class Odd:
    """An engine with an odd state: NaNs that carry a message, whole numbers, rows of several axes.

    It stays in each step for a moment, in which nobody else may use it.
    """

    takes_numpy = True
    num_positions = num_velocities = num_controls = 1
    num_sensordata = 0
    made: list[tuple[int, int]]

    def __init__(self, num_envs: int, num_threads: int) -> None:
        self.num_envs = num_envs
        self.made.append((num_envs, num_threads))
        self.state = {
            "message": np.full((num_envs, 2, 3), NAN_WITH_A_MESSAGE),
            "count": np.full((num_envs, 1), -7, dtype=np.int32),
        }
        self.in_use = threading.Lock()

    def step(self, ctrl: np.ndarray, push: np.ndarray | None = None) -> StepInfo:
        assert self.in_use.acquire(blocking=False)
        time.sleep(0.02)
        assert np.isnan(self.state["message"]).all()
        self.state["count"] = self.state["count"] + 1
        self.in_use.release()
        return StepInfo(ctrl + 1, ctrl, ctrl[:, :0], np.zeros(self.num_envs, dtype=bool))

    def reset(self, mask: np.ndarray, qpos: np.ndarray, qvel: np.ndarray) -> np.ndarray:
        self.state["count"][mask] = qpos[mask].astype(np.int32)
        return qpos[:, :0]

    def state_dict(self) -> dict[str, np.ndarray]:
        return self.state

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        self.state = {name: array.copy() for name, array in state.items()}

    def log_to(self, path: Path) -> None:
        path.write_text(path.read_text() + "x" if path.exists() else "x")

    def close(self) -> None:
        self.made.append((0, 0))


def odd_engine(num_threads: int = 1) -> tuple[HostEngine, list[tuple[int, int]]]:
    made: list[tuple[int, int]] = []
    kind = type("Odd", (Odd,), {"made": made})
    return HostEngine(kind, num_threads=num_threads, dtype="float32"), made


def test_every_bit_of_the_state_survives() -> None:
    engine, _ = odd_engine()
    physics = engine.start(jnp.arange(5, dtype=jnp.int32))

    def steps(physics: Any) -> Any:
        for _ in range(3):
            physics, _info = engine.step(physics, jnp.zeros((5, 1), dtype=jnp.float32))
        mask = np.arange(5) == 1
        ones = jnp.ones((5, 1), dtype=jnp.float32)
        return engine.reset(physics, mask, 40 * ones, ones)[0]

    physics = jax.jit(steps)(physics)
    words = np.asarray(physics["message"])
    assert words.dtype == np.uint32
    assert words.shape == (5, 12)
    assert set(words.view(np.uint64).flatten().tolist()) == {0x7FF0_0000_DEAD_BEEF}
    assert np.asarray(physics["count"]).view(np.int32).flatten().tolist() == [-4, 40, -4, -4, -4]


@pytest.mark.parametrize("num_threads", [1, 8])
def test_devices_step_at_the_same_time_and_share_the_threads(num_threads: int) -> None:
    engine, made = odd_engine(num_threads)
    assert len(jax.devices()) == 4
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("ranks",))

    def steps(ctrl: Any) -> Any:
        def step(physics: Any, _: None) -> Any:
            return engine.step(physics, ctrl)

        physics = jax.tree.map(
            lambda leaf: jax.lax.pcast(leaf, "ranks", to="varying"), engine.start(jnp.arange(2, dtype=jnp.int32))
        )
        return jax.lax.scan(lambda physics, _: marked(step(physics, None)), physics, None, length=10)

    def marked(result: Any) -> Any:
        physics, info = result
        physics = jax.tree.map(lambda leaf: jax.lax.pcast(leaf, "ranks", to="varying"), physics)
        return physics, jax.lax.pcast(info.qpos, "ranks", to="varying")

    program = jax.jit(
        jax.shard_map(steps, mesh=mesh, in_specs=jax.P("ranks"), out_specs=(jax.P("ranks"), jax.P(None, "ranks")))
    )
    physics, qpos = program(np.arange(8, dtype=np.float32)[:, None])
    assert qpos[-1].flatten().tolist() == list(range(1, 9))
    assert np.asarray(physics["count"]).view(np.int32).flatten().tolist() == [3] * 8
    engines = made[1:]
    assert set(engines) == {(2, max(1, num_threads // 4))}
    assert len(engines) <= 4


def test_without_jit_each_rank_calls_by_itself() -> None:
    engine, made = odd_engine()

    def steps(ctrl: Any) -> Any:
        physics, _ = engine.step(engine.start(jnp.arange(2, dtype=jnp.int32)), ctrl)
        physics, info = engine.step(physics, ctrl)
        return physics, info.qpos

    run = make_mesh(jax.devices()[:2]).compile(steps, SHARDED, SHARDED, enable_jit=False)
    physics, qpos = run(np.arange(4, dtype=np.float32)[:, None])
    assert qpos.flatten().tolist() == [1, 2, 3, 4]
    assert np.asarray(physics["count"]).view(np.int32).flatten().tolist() == [-5] * 4
    assert {num_envs for num_envs, _ in made} == {1, 2}


def test_all_engine_objects_log_and_close(tmp_path: Path) -> None:
    engine, made = odd_engine()
    engine.step(engine.start(jnp.arange(2, dtype=jnp.int32)), np.zeros((2, 1), dtype=np.float32))
    engine.log_to(tmp_path / "log")
    engine.step(engine.start(jnp.arange(3, dtype=jnp.int32)), np.zeros((3, 1), dtype=np.float32))
    assert (tmp_path / "log").read_text() == "xxx"
    engine.close()
    assert made == [(1, 1), (2, 1), (3, 1), *[(0, 0)] * 3]


def test_an_engine_that_takes_no_numpy_is_refused() -> None:
    kind = type("Odd", (Odd,), {"made": [], "takes_numpy": False})
    with pytest.raises(UsageError, match="Odd does not take numpy arrays"):
        HostEngine(kind, num_threads=1, dtype="float32")


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system can't tie a process to a core")
def test_four_devices_of_one_core_step_thousands_of_envs() -> None:
    """Where all threads of JAX are at work in callbacks, nobody is left for a copy that one of them would wait for."""
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": "4", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.one_core"],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
        cwd=Path(__file__).parents[2],
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # How many devices, the fewest episodes that an env of theirs ended, how long the longest still goes on.
    assert done.stdout.split() == ["4", "2", "9"]
