"""The engine ``mjx`` with another solver: the kernels of MuJoCo Warp, which JAX calls from within its program."""

import importlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
from mujoco import mjx

from lockstep.core.errors import UsageError
from lockstep.core.types import Array, Physics
from lockstep.sim.mjx import MjxEngine, fields_of, on_host, put_into
from lockstep.sim.mjx_models import ModelPool


class MjxWarpEngine(MjxEngine):
    """Steps a batch as ``MjxEngine`` does, by the kernels of MuJoCo Warp that come with MJX, in float32.

    They are written for NVIDIA GPUs, where this has not been tried yet, and run on CPUs too. JAX calls them from within
    its program (https://mujoco.readthedocs.io/en/stable/mjx.html#mjx-warp). Contacts and constraints have buffers of a
    fixed size; an env in which something did not fit is flagged in ``diverged``, as are those in which physics fails.

    Args:
        models: the compiled model, or variants of it, which the envs have by turns.
        decimation: physics steps per env step.
        dtype: float32.
        num_contacts: per env, on average over the batch, which shares them; 0 for Warp's guess.
        num_constraints: the most that an env may have; 0 for Warp's guess.

    Raises:
        UsageError: ``decimation`` below 1, another precision, or a model that Warp can't step.
    """

    _solver = "MuJoCo Warp"

    def __init__(
        self,
        models: mujoco.MjModel | Sequence[mujoco.MjModel],
        decimation: int,
        dtype: Any,
        *,
        num_contacts: int = 0,
        num_constraints: int = 0,
    ) -> None:
        if np.dtype(dtype) != np.float32:
            raise UsageError(f"MuJoCo Warp computes in float32, not {np.dtype(dtype)}; use --dtype float32")
        self._num_contacts, self._num_constraints = num_contacts, num_constraints
        super().__init__(models, decimation, dtype)

    def _load(self, variants: list[mujoco.MjModel]) -> None:
        from mujoco.mjx.third_party.mujoco_warp._src.types import OverflowType

        _silence_warp()
        if variants[0].opt.enableflags & mujoco.mjtEnableBit.mjENBL_SLEEP:
            raise NotImplementedError("it lets bodies sleep")  # who sleeps is no part of our state
        self._host_model = variants[0]
        self._models = ModelPool(variants, _put_for_warp)
        _require_per_env(self._models.varied)
        # A solver that stops early is none; MuJoCo goes on there, too.
        self._overflow = int(OverflowType.ALL & ~(OverflowType.ITERATIONS | OverflowType.LS_ITERATIONS))
        self._data = self._make_data(self._num_contacts or None)
        self._num_contacts = int(self._data._impl.naconmax)

    def _make_data(self, num_contacts: int | None) -> mjx.Data:
        sizes = {"naconmax": num_contacts, "njmax": self._num_constraints or None}
        with jax.ensure_compile_time_eval():  # a program may be traced meanwhile
            return on_host(mjx.make_data(self._host_model, device=jax.local_devices()[0], impl="warp", **sizes))

    def _data_for(self, num_envs: int) -> mjx.Data:
        return self._make_data(self._num_contacts * num_envs)

    def _physics_steps(self, physics: Physics, ctrl: Array) -> tuple[Physics, Array]:
        data = jax.tree.map(jnp.asarray, self._data_for(ctrl.shape[0]))

        def step(physics: Physics, ctrl: Array) -> tuple[Physics, Array]:
            model = self._models.pick(physics.get("model"))

            def physics_step(data: mjx.Data, _: None) -> tuple[mjx.Data, None]:
                return mjx.step(model, data), None

            # All data go from step to step, since to fill the buffers anew would cost more than to compute.
            after, _ = jax.lax.scan(physics_step, put_into(data, physics, ctrl), None, length=self.decimation)
            return physics | fields_of(after), (after._impl.overflow & self._overflow) != 0

        stepped: tuple[Physics, Array] = jax.vmap(step)(physics, ctrl)
        return stepped


def _put_for_warp(model: mujoco.MjModel) -> mjx.Model:
    put = on_host(mjx.put_model(model, device=jax.local_devices()[0], impl="warp"))
    # We say it ourselves: Warp would print a line for every env and step. What is read of bodies that sleep alone, and
    # compiled in, should not tell variants apart.
    lengths = np.zeros_like(put._impl.dof_length)
    return put.tree_replace({"opt._impl.warn_overflow": 0, "_impl.dof_length": lengths})


def _require_per_env(paths: Sequence[Any]) -> None:
    """Refuse what Warp has once for all envs."""
    from mujoco.mjx._src.types import tree_path_to_attr_str
    from mujoco.mjx.warp.types import _BATCH_DIM

    names = {tree_path_to_attr_str(path) for path in paths}
    if shared := [name for name in sorted(names) if not _BATCH_DIM["Model"].get(name, True)]:
        raise NotImplementedError(f"its variants differ in {', '.join(shared)}, which must be the same in all")


def _silence_warp() -> None:
    """Keep what Warp says of itself and its kernels off the terminal, for the whole process."""
    warp: Any = importlib.import_module("warp")
    warp.config.log_level = max(warp.config.log_level, warp.LOG_WARNING)
