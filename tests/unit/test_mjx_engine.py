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

from lockstep.sim.mjx import MjxEngine, make_pure_engine  # noqa: E402
from lockstep.sim.mjx_warp import MjxWarpEngine  # noqa: E402
from tests.unit.jax_env_fixtures import IMPLEMENTATIONS, needs_warp  # noqa: E402

pytestmark = pytest.mark.usefixtures("double_precision")

NUM_ENVS, NUM_STEPS, DECIMATION = 8, 50, 2

# A swinging arm with a joint limit, sensors, and an actuator that has a state and a brake and reaches its force limit.
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
    <general name="muscle" joint="hip" dyntype="filter" dynprm="0.05" gainprm="20" ctrlrange="-1 1" ctrllimited="true"
             biastype="affine" biasprm="0 0 -1" forcerange="-6 6" forcelimited="true"/>
  </actuator>
  <sensor><jointpos joint="hip"/><actuatorfrc actuator="muscle"/></sensor>
</mujoco>
"""
UNCONSTRAINED = ARM.replace('range="-0.5 0.5" limited="true"', "")


def variants() -> list[mujoco.MjModel]:
    """Return three arms: one as it is, one heavier, one weaker and with more friction in its joint."""
    arms = [mujoco.MjModel.from_xml_string(ARM) for _ in range(3)]
    arms[1].body_mass[1] *= 2
    arms[1].body_inertia[1] *= 2
    arms[2].actuator_gainprm[0, 0] /= 3
    arms[2].dof_damping[0] *= 4
    for arm in arms:
        mujoco.mj_setConst(arm, mujoco.MjData(arm))
    return arms


class Run:
    """Env steps of the arms, compiled: ``masks (num_steps, num_envs)`` says which envs are reset before each step."""

    def __init__(self, implementation: str, dtype: str) -> None:
        self.dtype = dtype
        self.models = variants()
        self.engine = {"jax": MjxEngine, "warp": MjxWarpEngine}[implementation](self.models, DECIMATION, dtype)
        # Two batches of one program: envs may be batched by whoever uses the engine, too.
        steps = jax.vmap(self._steps, in_axes=(0, 0, 0, 1, 1, 1), out_axes=(0, 0, 1, 1))
        self._program = jax.jit(steps)
        random = np.random.default_rng(1)
        self.qpos = random.uniform(-0.4, 0.4, (NUM_ENVS, 1)).astype(dtype).astype(float)
        self.qvel = random.normal(size=(NUM_ENVS, 1)).astype(dtype).astype(float)
        ctrl = random.uniform(-0.6, 0.6, (NUM_STEPS, NUM_ENVS, 1)) + np.linspace(-0.6, 0.6, NUM_ENVS)[:, None]
        self.ctrl = ctrl.astype(dtype).astype(float)
        self.masks = np.zeros((NUM_STEPS, NUM_ENVS), dtype=bool)
        self.masks[0] = True
        self.push = np.zeros_like(self.ctrl)

    def _steps(self, env_ids: Any, qpos: Any, qvel: Any, ctrl: Any, push: Any, masks: Any) -> Any:
        def step(physics: Any, now: Any) -> Any:
            step_ctrl, step_push, mask = now
            physics, sensordata = self.engine.reset(physics, mask, qpos, qvel)
            physics, info = self.engine.step(physics, step_ctrl, step_push)
            return physics, (sensordata, info)

        start = self.engine.start(env_ids)
        physics, (sensordata, infos) = jax.lax.scan(step, start, (ctrl, push, masks))
        return start, physics, sensordata, infos

    def __call__(self, **changes: np.ndarray) -> Any:
        """Return physics at the start and at the end, sensordata after each reset, and a StepInfo of all steps."""
        names = ("qpos", "qvel", "ctrl", "push", "masks")
        *arrays, masks = (changes.get(name, getattr(self, name)) for name in names)
        floats = (jnp.asarray(array, dtype=self.dtype) for array in arrays)
        halves = [jnp.reshape(array, (*array.shape[:-2], 2, -1, 1)) for array in floats]
        env_ids = jnp.arange(NUM_ENVS, dtype=jnp.int32).reshape(2, -1)
        start, end, sensordata, infos = self._program(env_ids, *halves, masks.reshape(NUM_STEPS, 2, -1))
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


def test_it_goes_the_way_of_mujoco_to_a_tolerance_whatever_the_variant_and_the_push(arm: Run) -> None:
    masks, push = arm.masks.copy(), arm.push.copy()
    masks[20, ::3], push[30, 1:5] = True, [[3], [-3], [2], [-1]]
    _, end, sensordata, infos = arm(masks=masks, push=push)
    engine = MujocoEngine(arm.models, NUM_ENVS, DECIMATION, 1)
    np.testing.assert_array_equal(end["model"], engine.state_dict()["model"])
    # Some ten times what was measured in float32, more in float64.
    coarse = {"qpos": 1e-4, "qvel": 5e-3, "sensordata": 5e-3}
    tolerance = coarse if arm.dtype == "float32" else dict.fromkeys(coarse, 1e-10)
    for number in range(NUM_STEPS):
        expected = engine.reset(masks[number], arm.qpos, arm.qvel)
        np.testing.assert_allclose(sensordata[number], expected, rtol=0, atol=tolerance["sensordata"])
        info = engine.step(arm.ctrl[number], push[number])
        for name in ("qpos", "qvel", "sensordata"):
            measured = getattr(infos, name)[number]
            bound = tolerance[name]
            np.testing.assert_allclose(measured, getattr(info, name), rtol=0, atol=bound, err_msg=name)
    # The limits of joint and motor were reached, and left.
    assert np.abs(infos.qpos).max() > 0.5
    assert 0.1 < (np.abs(infos.sensordata[..., 1]) == 6).mean() < 0.9
    assert not infos.diverged.any()


def test_nothing_changes_its_dtype_whatever_jax_calls_a_float(arm: Run) -> None:
    start, end, sensordata, infos = arm()
    assert [physics.pop("model").dtype for physics in (start, end)] == [np.int32, np.int32]
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
    ctrl, qvel, push = arm.ctrl.copy(), arm.qvel.copy(), arm.push.copy()
    ctrl[3, 1], push[3, 1], qvel[2] = np.nan, 1, 1e11
    _, _, _, healthy = arm()
    _, end, _, infos = arm(ctrl=ctrl, qvel=qvel, push=push)
    expected = np.zeros((NUM_STEPS, NUM_ENVS), dtype=bool)
    expected[3, 1], expected[:, 2] = True, True  # beyond what MuJoCo calls sane from the start
    np.testing.assert_array_equal(infos.diverged, expected)
    np.testing.assert_array_equal(infos.qpos[3, 1], infos.qpos[2, 1])
    np.testing.assert_array_equal(infos.qvel[3, 1], infos.qvel[2, 1])  # the push is taken back
    np.testing.assert_array_equal(infos.sensordata[3, 1], infos.sensordata[2, 1])
    assert infos.qpos[4, 1] != infos.qpos[3, 1]
    np.testing.assert_array_equal(infos.qpos[:, 2], np.tile(arm.qpos[2], (NUM_STEPS, 1)).astype(arm.dtype))
    assert all(np.isfinite(array).all() for array in jax.tree.leaves(end))
    others = [0, *range(3, NUM_ENVS)]
    for one, other in zip(infos, healthy, strict=True):
        np.testing.assert_array_equal(one[:, others], other[:, others])


@pytest.mark.parametrize("env_ids", [[0, 4, -1], [-1], [5, 3]])
def test_the_variant_of_an_env_follows_from_its_id_and_padding_has_one_too(arm: Run, env_ids: list[int]) -> None:
    physics = arm.engine.start(jnp.asarray(env_ids, dtype=jnp.int32))
    assert physics["model"].tolist() == [{0: 0, 4: 1, -1: 2, 5: 2, 3: 0}[env_id] for env_id in env_ids]


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


# A ball that may stick to another that is moved from outside, over a terrain.
TERRAIN = """
<mujoco>
  <asset><hfield name="hills" nrow="2" ncol="2" size="1 1 1 1"/></asset>
  <worldbody>
    <geom type="hfield" hfield="hills" contype="0" conaffinity="0"/>
    <body name="hand" mocap="true"/>
    <body name="ball" pos="0 0 2"><joint type="slide" axis="0 0 1"/><geom size="0.1" mass="1"/></body>
  </worldbody>
  <equality><connect body1="ball" body2="hand" anchor="0 0 0"/></equality>
</mujoco>
"""


def ball_with(field: str, value: float) -> list[mujoco.MjModel]:
    """Return the ball and a variant of it that has another first entry in a field."""
    models = [mujoco.MjModel.from_xml_string(TERRAIN) for _ in range(2)]
    getattr(models[1], field).reshape(-1)[0 if field != "body_pos" else 3] = value
    return models


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("eq_active0", 0, "eq_active0"),
        ("body_pos", 1.0, "body_pos of mocap bodies"),
        ("dof_frictionloss", 1.0, "dof_hasfrictionloss"),
        ("geom_condim", 1, "geom_condim"),
    ],
)
def test_what_must_be_the_same_in_all_variants_is_named(field: str, value: float, named: str) -> None:
    with pytest.raises(
        UsageError,
        match=f"^MJX can't step this model: its variants differ in {named}, which must be the same in all; use "
        "--engine mujoco$",
    ):
        MjxEngine(ball_with(field, value), 1, "float32")


@needs_warp
def test_warp_names_what_it_has_once_for_all_envs() -> None:
    with pytest.raises(UsageError, match=r"^MuJoCo Warp can't step this model: its variants differ in hfield_data, "):
        MjxWarpEngine(ball_with("hfield_data", 1.0), 1, "float32")


@needs_warp
def test_warp_takes_variants_that_would_sleep_differently() -> None:
    engine = MjxWarpEngine(ball_with("dof_length", 2.0), 1, "float32")
    assert engine.start(jnp.arange(3, dtype=jnp.int32))["model"].tolist() == [0, 1, 0]


@needs_warp
def test_warp_refuses_bodies_that_sleep() -> None:
    model = mujoco.MjModel.from_xml_string(
        ARM.replace("<worldbody>", "<option><flag sleep='enable'/></option><worldbody>")
    )
    with pytest.raises(
        UsageError, match="MuJoCo Warp can't step this model: it lets bodies sleep; use --engine mujoco"
    ):
        MjxWarpEngine(model, 1, "float32")
