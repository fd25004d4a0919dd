"""The engine mjx against the engine mujoco, and what it does when physics fails; one compiled program per precision."""

from pathlib import Path
from typing import Any

import mujoco
import numpy as np
import pytest

from lockstep.core.errors import UsageError
from lockstep.sim.mujoco_c import MujocoEngine
from lockstep.tasks.cartpole_balance.config import CartpoleBalanceConfig
from lockstep.tasks.cartpole_balance.task import CartpoleBalance
from lockstep.tasks.cartpole_classic.config import CartpoleClassicConfig
from lockstep.tasks.cartpole_classic.task import CartpoleClassic

jax = pytest.importorskip("jax")
pytest.importorskip("mujoco.mjx")
jnp = jax.numpy

from lockstep.sim.mjx import MjxEngine, MjxWarpEngine, make_pure_engine  # noqa: E402
from tests.unit.jax_env_fixtures import IMPLEMENTATIONS, needs_warp  # noqa: E402

pytestmark = pytest.mark.usefixtures("double_precision")

NUM_ENVS, NUM_STEPS, DECIMATION = 8, 50, 2

# A swinging arm with a joint limit, an actuator with a state, and sensors.
ARM = """
<mujoco>
  <compiler angle="radian"/>
  <option timestep="0.01" integrator="implicitfast"/>
  <worldbody>
    <body>
      <joint name="hip" type="hinge" axis="0 1 0" range="-0.5 0.5" limited="true" damping="0.1"/>
      <geom type="capsule" fromto="0 0 0 0 0 -0.5" size="0.04" mass="0.5"/>
    </body>
  </worldbody>
  <actuator>
    <general name="muscle" joint="hip" dyntype="filter" dynprm="0.05" gainprm="20" ctrlrange="-1 1" ctrllimited="true"/>
  </actuator>
  <sensor><jointpos joint="hip"/><actuatorfrc actuator="muscle"/></sensor>
</mujoco>
"""
UNCONSTRAINED = ARM.replace('range="-0.5 0.5" limited="true"', "")


class Run:
    """Env steps of the arm, compiled: ``masks (num_steps, num_envs)`` says which envs are reset before each step."""

    def __init__(self, implementation: str, dtype: str) -> None:
        self.dtype = dtype
        self.model = mujoco.MjModel.from_xml_string(ARM)
        self.engine = {"jax": MjxEngine, "warp": MjxWarpEngine}[implementation](self.model, DECIMATION, dtype)
        # Two batches of one program: envs may be batched by whoever uses the engine, too.
        steps = jax.vmap(self._steps, in_axes=(0, 0, 1, 1), out_axes=(0, 0, 1, 1))
        self._program = jax.jit(steps)
        random = np.random.default_rng(1)
        self.qpos = random.uniform(-0.4, 0.4, (NUM_ENVS, 1)).astype(dtype).astype(float)
        self.qvel = random.normal(size=(NUM_ENVS, 1)).astype(dtype).astype(float)
        ctrl = random.uniform(-0.6, 0.6, (NUM_STEPS, NUM_ENVS, 1)) + np.linspace(-0.6, 0.6, NUM_ENVS)[:, None]
        self.ctrl = ctrl.astype(dtype).astype(float)
        self.masks = np.zeros((NUM_STEPS, NUM_ENVS), dtype=bool)
        self.masks[0] = True

    def _steps(self, qpos: Any, qvel: Any, ctrl: Any, masks: Any) -> Any:
        def step(physics: Any, now: Any) -> Any:
            physics, sensordata = self.engine.reset(physics, now[1], qpos, qvel)
            physics, info = self.engine.step(physics, now[0])
            return physics, (sensordata, info)

        start = self.engine.start(jnp.arange(len(qpos), dtype=jnp.int32))
        physics, (sensordata, infos) = jax.lax.scan(step, start, (ctrl, masks))
        return start, physics, sensordata, infos

    def __call__(self, **changes: np.ndarray) -> Any:
        """Return physics at the start and at the end, sensordata after each reset, and a StepInfo of all steps."""
        names = ("qpos", "qvel", "ctrl", "masks")
        qpos, qvel, ctrl, masks = (changes.get(name, getattr(self, name)) for name in names)
        floats = (jnp.asarray(array, dtype=self.dtype) for array in (qpos, qvel, ctrl))
        halves = [jnp.reshape(array, (*array.shape[:-2], 2, -1, 1)) for array in floats]
        start, end, sensordata, infos = self._program(*halves, masks.reshape(NUM_STEPS, 2, -1))
        start, end = jax.tree.map(lambda array: np.reshape(array, (NUM_ENVS, *array.shape[2:])), (start, end))
        by_step = (NUM_STEPS, NUM_ENVS)
        return (
            start,
            end,
            *jax.tree.map(lambda array: np.reshape(array, by_step + array.shape[3:]), (sensordata, infos)),
        )


@pytest.fixture(scope="module", params=IMPLEMENTATIONS)
def arm(request: pytest.FixtureRequest) -> Run:
    with jax.enable_x64(True):
        return Run(*request.param)


def test_it_goes_the_way_of_mujoco_to_a_tolerance(arm: Run) -> None:
    masks = arm.masks.copy()
    masks[20, ::3] = True
    _, _, sensordata, infos = arm(masks=masks)
    engine = MujocoEngine(arm.model, NUM_ENVS, DECIMATION, 1)
    # Some ten times what was measured in float32, more in float64.
    coarse = {"qpos": 1e-4, "qvel": 5e-3, "sensordata": 1e-4}
    tolerance = coarse if arm.dtype == "float32" else dict.fromkeys(coarse, 1e-10)
    for number in range(NUM_STEPS):
        expected = engine.reset(masks[number], arm.qpos, arm.qvel)
        np.testing.assert_allclose(sensordata[number], expected, rtol=0, atol=tolerance["sensordata"])
        info = engine.step(arm.ctrl[number])
        for name in ("qpos", "qvel", "sensordata"):
            measured = getattr(infos, name)[number]
            bound = tolerance[name]
            np.testing.assert_allclose(measured, getattr(info, name), rtol=0, atol=bound, err_msg=name)
    assert np.abs(infos.qpos).max() > 0.5  # the limit was reached
    assert not infos.diverged.any()


def test_nothing_changes_its_dtype_whatever_jax_calls_a_float(arm: Run) -> None:
    start, end, sensordata, infos = arm()
    floats = [*jax.tree.leaves((start, end)), sensordata, *infos[:3]]
    assert {array.dtype.name for array in floats} == {arm.dtype}
    assert {name: array.shape for name, array in end.items() if array.size} == {
        "time": (8,), "qpos": (8, 1), "qvel": (8, 1), "act": (8, 1), "qacc_warmstart": (8, 1), "sensordata": (8, 2)
    }  # fmt: skip


def test_a_reset_forgets_all_that_was(arm: Run) -> None:
    masks, ctrl = arm.masks.copy(), arm.ctrl.copy()
    masks[25], ctrl[25:] = True, ctrl[:25]
    _, end, sensordata, infos = arm(masks=masks, ctrl=ctrl)
    for array in (sensordata, *infos):
        np.testing.assert_array_equal(array[25:], array[:25])
    np.testing.assert_allclose(end["time"], 25 * DECIMATION * 0.01, rtol=1e-5)
    np.testing.assert_array_equal(end["sensordata"], infos.sensordata[-1])


def test_a_failed_env_is_flagged_keeps_its_state_and_infects_nobody(arm: Run) -> None:
    ctrl, qvel = arm.ctrl.copy(), arm.qvel.copy()
    ctrl[3, 1], qvel[2] = np.nan, 1e11
    _, _, _, healthy = arm()
    _, end, _, infos = arm(ctrl=ctrl, qvel=qvel)
    expected = np.zeros((NUM_STEPS, NUM_ENVS), dtype=bool)
    expected[3, 1], expected[:, 2] = True, True  # beyond what MuJoCo calls sane from the start
    np.testing.assert_array_equal(infos.diverged, expected)
    np.testing.assert_array_equal(infos.qpos[3, 1], infos.qpos[2, 1])
    np.testing.assert_array_equal(infos.sensordata[3, 1], infos.sensordata[2, 1])
    assert infos.qpos[4, 1] != infos.qpos[3, 1]
    np.testing.assert_array_equal(infos.qpos[:, 2], np.tile(arm.qpos[2], (NUM_STEPS, 1)).astype(arm.dtype))
    assert all(np.isfinite(array).all() for array in jax.tree.leaves(end))
    others = [0, *range(3, NUM_ENVS)]
    for one, other in zip(infos, healthy, strict=True):
        np.testing.assert_array_equal(one[:, others], other[:, others])


def test_what_mjx_does_not_do_is_refused_in_one_line(tmp_path: Path) -> None:
    implicit = mujoco.MjModel.from_xml_string(ARM.replace("implicitfast", "implicit"))
    unconstrained = mujoco.MjModel.from_xml_string(UNCONSTRAINED)
    for model, decimation, message in (
        (implicit, 1, r"MJX can't step this model: mjtIntegrator.mjINT_IMPLICIT; use --engine mujoco"),
        (unconstrained, 1, r"sensors of forces or accelerations and no constraints; use --engine mujoco"),
        (unconstrained, 0, "decimation 0 of the mjx engine is too small"),
    ):
        with pytest.raises(UsageError, match=message):
            MjxEngine(model, decimation, "float32")
    with pytest.raises(UsageError, match="no MuJoCo model; use --engine analytic"):
        make_pure_engine(CartpoleClassic(CartpoleClassicConfig()), decimation=1, dtype="float32", seed=1)
    with pytest.raises(UsageError, match="MuJoCo Warp computes in float32, not float64; use --dtype float32"):
        MjxWarpEngine(unconstrained, 1, "float64")
    broken = CartpoleBalance(CartpoleBalanceConfig())
    broken.model_path = tmp_path / "missing.xml"
    with pytest.raises(UsageError, match=r"can't read .*missing\.xml"):
        make_pure_engine(broken, decimation=1, dtype="float32", seed=1)


@needs_warp
def test_warp_flags_an_env_whose_constraints_find_no_room() -> None:
    body = """
      <body pos="{0} 0 0"><joint type="slide" range="-0.1 0.1" limited="true"/><geom size="0.1" mass="1"/></body>"""
    model = mujoco.MjModel.from_xml_string(
        f"<mujoco><option><flag contact='disable'/></option><worldbody>{''.join(map(body.format, (0, 1)))}"
        "</worldbody></mujoco>"
    )
    qpos = np.array([[0.0, 0.0], [0.2, 0.0], [0.2, 0.2]], dtype=np.float32)  # 0, 1 and 2 joints at their limits
    for num_constraints, expected in ((1, [False, False, True]), (0, [False] * 3)):
        engine = MjxWarpEngine(model, 1, "float32", num_contacts=5, num_constraints=num_constraints)
        physics, _ = engine.reset(
            engine.start(jnp.arange(3)), np.ones(3, dtype=bool), jnp.asarray(qpos), jnp.zeros_like(qpos)
        )
        _, info = engine.step(physics, jnp.zeros((3, 0), dtype=jnp.float32))
        assert info.diverged.tolist() == expected
        np.testing.assert_array_equal(info.qpos[2] == qpos[2], expected[2])


@needs_warp
def test_warp_refuses_bodies_that_sleep() -> None:
    model = mujoco.MjModel.from_xml_string(
        ARM.replace("<worldbody>", "<option><flag sleep='enable'/></option><worldbody>")
    )
    with pytest.raises(
        UsageError, match="MuJoCo Warp can't step this model: it lets bodies sleep; use --engine mujoco"
    ):
        MjxWarpEngine(model, 1, "float32")
