"""The engine ``mjx``: MuJoCo's physics in JAX itself, compiled together with all else, on any device of JAX.

MJX (https://mujoco.readthedocs.io/en/stable/mjx.html) solves the same equations as the engine ``mujoco`` in another
order, and in float32 unless asked for float64, so results agree to a tolerance. 50 env steps under the same actions,
in m, rad, m/s and rad/s:

- of carts from the task's own starts: positions to 2e-5 and velocities to 5e-5 in float32, both to 2e-12 in float64;
- from anywhere, joints far beyond their limits too, which are thrown back with huge forces: to 3e-2 and 1e-1 (of 24 and
  37) in float32, 2e-11 and 1e-10 in float64. One step from there: to 5e-4 and 1e-12, absolute and relative;
- of a quadruped as long as its feet alone touch the floor: both to 2e-12 in float64. Where capsules that are nearly
  upright touch it, MJX turns the pyramid of friction, and goes another way.

Variants of an arm that hits its joint limit and whose motor saturates are where they would be in ``mujoco`` to 1e-4 rad
and 5e-3 rad/s (of 8) in float32, and to 1e-10 in float64. All these are some ten times what was measured, or more. They
hold for ``MjxWarpEngine`` on a CPU, too.
"""

import contextlib
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
from jax.extend.core import jaxpr_as_fun
from numpy.typing import NDArray

with contextlib.redirect_stdout(io.StringIO()):  # it says there what of Warp is not installed
    from mujoco import mjx

from lockstep.core.errors import UsageError
from lockstep.core.types import Array, Physics, StepInfo, Task
from lockstep.sim import mjx_step
from lockstep.sim.mjx_models import ModelPool
from lockstep.sim.models import load_models
from lockstep.sim.sealed import SealedProgram

STATE_FIELDS = ("time", "qpos", "qvel", "act", "history", "qacc_warmstart", "sensordata")
"""What of ``mjx.Data`` a step takes up and changes; the rest is computed anew or stays at the model's default."""


def make_pure_engine(
    task: Task,
    *,
    decimation: int,
    dtype: Any,
    seed: int,
    implementation: str = "jax",
    num_contacts: int = 0,
    num_constraints: int = 0,
    **_: Any,
) -> "MjxEngine":
    """Return the engine that steps the task's MJCF file in JAX.

    Args:
        task: to simulate.
        decimation: physics steps per env step.
        dtype: of all floats, float32 or float64.
        seed: of the run, by which models are varied.
        implementation: ``jax``, or ``warp``: then it is a ``MjxWarpEngine``, which the two numbers are for.
        num_contacts: room for contacts.
        num_constraints: room for constraints.

    Raises:
        UsageError: the task has no MJCF file, MuJoCo can't read it, or MJX can't step it.
    """
    models = load_models(task, seed)
    if implementation == "jax":
        return MjxEngine(models, decimation, dtype)
    from lockstep.sim.mjx_warp import MjxWarpEngine  # which is made of what is here

    return MjxWarpEngine(models, decimation, dtype, num_contacts=num_contacts, num_constraints=num_constraints)


class MjxEngine:
    """Steps a batch of one MuJoCo model, or of variants of it, by MJX.

    Physics: the fields of ``mjx.Data`` named in ``STATE_FIELDS``, each ``(num_envs, ...)`` in ``dtype``; the solver's
    warm start is among them. Where there are variants, ``model (num_envs,)`` int32 says which of them each env has.

    An env in which physics fails (a value that is not finite or beyond ``mjMAXVAL``, in its controls, positions,
    velocities or accelerations) is flagged in ``diverged`` and keeps the physics it began the step with.

    Args:
        models: the compiled model, or variants of it, which the envs have by turns.
        decimation: physics steps per env step.
        dtype: of all floats, float32 or float64.

    Raises:
        UsageError: ``decimation`` below 1, or a model that MJX can't step.
    """

    _solver = "MJX"
    """Who refuses a model."""

    def __init__(self, models: mujoco.MjModel | Sequence[mujoco.MjModel], decimation: int, dtype: Any) -> None:
        variants = [models] if isinstance(models, mujoco.MjModel) else list(models)
        if decimation < 1:
            raise UsageError(f"decimation {decimation} of the mjx engine is too small; use at least 1")
        self.decimation, self.dtype = decimation, np.dtype(dtype)
        self.num_positions, self.num_velocities = int(variants[0].nq), int(variants[0].nv)
        self.num_controls, self.num_sensordata = int(variants[0].nu), int(variants[0].nsensordata)
        self._run_steps = SealedProgram(self._step_batch, self._precision)
        self._run_measure = SealedProgram(self._measure_batch, self._precision)
        try:
            with self._precision():
                self._load(variants)
        except (NotImplementedError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise UsageError(f"{self._solver} can't step this model: {reason}; use --engine mujoco") from error

    def _load(self, variants: list[mujoco.MjModel]) -> None:
        # Copies on the host: a program for any device takes them up as constants.
        device = jax.local_devices()[0]
        self._models = ModelPool(variants, lambda model: on_host(mjx.put_model(model, device=device, impl="jax")))
        self._data = on_host(mjx.make_data(variants[0], device=device, impl="jax"))
        self._step_one = self._trace_step()
        if self._data._impl.efc_J.size == 0 and (variants[0].sensor_needstage == mujoco.mjtStage.mjSTAGE_ACC).any():
            # mjx.forward ends before it comes to these sensors where there is nothing to solve.
            raise NotImplementedError("it has sensors of forces or accelerations and no constraints")

    @property
    def warning_counts(self) -> Mapping[str, int]:
        """Nothing: MJX gives no warnings."""
        return {}

    def start(self, env_ids: Array) -> Physics:
        """Return the physics of envs in the model's default state; ``env_ids (num_envs,)`` are int32 global ids."""
        rows = {name: jnp.asarray(row, dtype=self.dtype) for name, row in self._default_rows().items()}
        physics = {name: jnp.broadcast_to(row, (env_ids.shape[0], *row.shape)) for name, row in rows.items()}
        return physics | ({"model": env_ids % self._models.size} if self._models.size > 1 else {})

    def step(self, physics: Physics, ctrl: Array, push: Array | None = None) -> tuple[Physics, StepInfo]:
        """Advance every env by ``decimation`` physics steps under constant ``ctrl (num_envs, num_controls)``.

        ``push (num_envs, num_velocities)`` is added to the velocities before the first of them.
        """
        qvel = physics["qvel"]
        if push is not None:
            physics = physics | {"qvel": qvel + push}
        physics, diverged = self._run_steps(physics, ctrl)
        if push is not None:  # what a failed env goes back to knows nothing of it
            physics = physics | {"qvel": _where(diverged, qvel, physics["qvel"])}
        return physics, StepInfo(physics["qpos"], physics["qvel"], physics["sensordata"], diverged)

    def reset(self, physics: Physics, mask: Array, qpos: Array, qvel: Array) -> tuple[Physics, Array]:
        """Put the envs of ``mask (num_envs,)`` at ``qpos`` and ``qvel``; forget the rest, warm start included.

        Returns the sensordata of all envs too, ``(num_envs, num_sensordata)``; computed where ``mask`` is not empty.
        """
        given = {name: jnp.asarray(row, dtype=self.dtype) for name, row in self._default_rows().items()}
        given |= {"qpos": qpos, "qvel": qvel}
        physics = physics | {name: _where(mask, new, physics[name]) for name, new in given.items()}
        if not self.num_sensordata:
            return physics, physics["sensordata"]

        def measure() -> Array:
            ctrl = jnp.zeros((mask.shape[0], self.num_controls), dtype=self.dtype)
            return _where(mask, self._run_measure(physics, ctrl), physics["sensordata"])

        sensordata = jax.lax.cond(jnp.any(mask), measure, lambda: physics["sensordata"])
        return physics | {"sensordata": sensordata}, sensordata

    def log_to(self, path: Path) -> None:
        """There is nothing that would speak."""

    def close(self) -> None:
        """Nothing to release."""

    # --- the programs, sealed so that they keep their own precision --------------------------------------------------

    def _step_batch(self, physics: Physics, ctrl: Array) -> tuple[Physics, Array]:
        is_finite = jnp.isfinite(ctrl).all(axis=1)
        ctrl = _where(is_finite, ctrl, jnp.zeros_like(ctrl))  # a solver that never converges would hold up the others
        after, failed = self._physics_steps(physics, ctrl)
        # The warm start holds the accelerations of the last physics step.
        is_sane = [_is_sane(after[name]) for name in ("qpos", "qvel", "qacc_warmstart")]
        diverged = ~(is_finite & is_sane[0] & is_sane[1] & is_sane[2]) | failed
        return {name: _where(diverged, physics[name], new) for name, new in after.items()}, diverged

    def _physics_steps(self, physics: Physics, ctrl: Array) -> tuple[Physics, Array]:
        """Return the physics ``decimation`` steps later, and ``(num_envs,)``: where the solver says it has failed."""

        def physics_step(physics: Physics, _: None) -> tuple[Physics, None]:
            return jax.vmap(self._step_one)(physics, ctrl), None

        after, _ = jax.lax.scan(physics_step, physics, None, length=self.decimation)
        return after, jnp.zeros(ctrl.shape[0], dtype=bool)

    def _trace_step(self) -> Callable[[Physics, Array], Physics]:
        """Return a physics step of one env.

        To trace MJX takes seconds, so it happens once for all sizes of batches; its limits come to light here.
        """

        def step(physics: Physics, ctrl: Array) -> Physics:
            model, data = self._models.pick(physics.get("model")), jax.tree.map(jnp.asarray, self._data)
            return physics | fields_of(mjx_step.step(model, put_into(data, physics, ctrl)))

        physics, ctrl = self._shapes()
        traced = jaxpr_as_fun(jax.make_jaxpr(step)(physics, ctrl))
        tree = jax.tree.structure(physics)
        return lambda physics, ctrl: jax.tree.unflatten(tree, traced(*jax.tree.leaves(physics), ctrl))

    def _measure_batch(self, physics: Physics, ctrl: Array) -> Array:
        data = jax.tree.map(jnp.asarray, self._data_for(ctrl.shape[0]))

        def measure(physics: Physics, ctrl: Array) -> Array:
            return mjx.forward(self._models.pick(physics.get("model")), put_into(data, physics, ctrl)).sensordata

        return jax.vmap(measure)(physics, ctrl)

    def _data_for(self, num_envs: int) -> mjx.Data:
        """Return the default data of one env, for use in a batch of so many."""
        return self._data

    def _default_rows(self) -> dict[str, NDArray[Any]]:
        return fields_of(self._data)

    def _shapes(self) -> tuple[dict[str, jax.ShapeDtypeStruct], jax.ShapeDtypeStruct]:
        """Return the shapes of the physics and controls of one env."""
        rows = self._default_rows()
        physics = {name: jax.ShapeDtypeStruct(row.shape, self.dtype) for name, row in rows.items()}
        if self._models.size > 1:
            physics["model"] = jax.ShapeDtypeStruct((), np.int32)
        return physics, jax.ShapeDtypeStruct((self.num_controls,), self.dtype)

    def _precision(self) -> contextlib.AbstractContextManager[Any]:
        # MJX computes in whatever JAX calls a float; our programs are traced with float64 switched on.
        precision: contextlib.AbstractContextManager[Any] = jax.enable_x64(self.dtype == np.float64)
        return precision


def on_host(tree: Any) -> Any:
    """Return a tree of arrays with all of them in numpy."""
    return jax.tree.map(np.asarray, tree)


def put_into(data: mjx.Data, physics: Physics, ctrl: Array) -> mjx.Data:
    """Return the data of one env with its physics and controls ``(num_controls,)`` in their places."""
    filled: mjx.Data = data.replace(ctrl=ctrl, **{name: physics[name] for name in STATE_FIELDS})
    return filled


def fields_of(data: mjx.Data) -> dict[str, Any]:
    """Return the fields named in ``STATE_FIELDS``."""
    return {name: getattr(data, name) for name in STATE_FIELDS}


def _where(mask: Array, new: Array, old: Array) -> Array:
    return jnp.where(mask.reshape(-1, *(1,) * (old.ndim - 1)), new, old)


def _is_sane(array: Array) -> Array:
    """Return ``(num_envs,)``: all values are finite and below the size that MuJoCo calls bad."""
    return (jnp.abs(array) <= mujoco.mjMAXVAL).all(axis=1)
