"""A physics step by MJX's own code, where that would differ from MuJoCo's by more than rounding."""

import jax.numpy as jnp
import mujoco
from mujoco import mjx


def step(model: mjx.Model, data: mjx.Data) -> mjx.Data:
    """Return the data one physics step later.

    This is ``mjx.step`` but for motors at the limit of their force, with the integrator ``implicitfast``. Their force
    does not change with the velocity, and MuJoCo's derivatives say so; those of MJX 3.17 leave the limit out.
    """
    is_limited = model.actuator_forcelimited
    if model.opt.integrator != mujoco.mjtIntegrator.mjINT_IMPLICITFAST or not is_limited.any():
        stepped: mjx.Data = mjx.step(model, data)
        return stepped
    data = mjx.forward(model, data)
    force, bounds = data.actuator_force, model.actuator_forcerange
    is_free = ~(is_limited & ((force <= bounds[:, 0]) | (force >= bounds[:, 1])))
    # Forces are known by now; what gain and bias say of the velocity is read for the derivatives alone.
    gain, bias = (
        jnp.asarray(table).at[:, 2].multiply(is_free) for table in (model.actuator_gainprm, model.actuator_biasprm)
    )
    integrated: mjx.Data = mjx.implicit(model.replace(actuator_gainprm=gain, actuator_biasprm=bias), data)
    return integrated
