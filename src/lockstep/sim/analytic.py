"""The engine ``analytic``: a task's own equations of motion, in any framework of the array API.

It comes in two shapes around the same arithmetic: one that keeps its state, and one of pure functions for JAX.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, cast

from lockstep.core.errors import UsageError
from lockstep.core.types import AnalyticTask, Array, Namespace, Physics, StepInfo, Task

UNROLLED_STEPS = 8
"""Physics steps per turn of the compiled loop: more make code that takes long to compile, fewer run slower."""


def make_engine(
    task: Task, *, num_envs: int, decimation: int, xp: Namespace, dtype: Any = None, device: Any = None, **_: Any
) -> "AnalyticEngine":
    """Return the engine that steps the task's own equations of motion; it has no threads of its own.

    Raises:
        UsageError: the task has no equations of motion.
    """
    return AnalyticEngine(_with_dynamics(task), num_envs, decimation, xp, dtype=dtype, device=device)


def make_pure_engine(task: Task, *, decimation: int, dtype: Any, **_: Any) -> "PureAnalyticEngine":
    """Return the engine that steps the task's own equations of motion in JAX.

    Raises:
        UsageError: the task has no equations of motion.
    """
    return PureAnalyticEngine(_with_dynamics(task), decimation, dtype)


def _with_dynamics(task: Task) -> AnalyticTask:
    if not hasattr(task, "dynamics"):
        raise UsageError(f"{type(task).__name__} has no equations of motion of its own; use --engine mujoco")
    return cast(AnalyticTask, task)


def _refuse_too_few(**numbers: int) -> None:
    for name, value in numbers.items():
        if value < (name != "num_envs"):
            raise UsageError(f"{name} {value} of the analytic engine is too small; use at least 1")


def _put_back_failed(xp: Namespace, before: tuple[Array, Array], after: tuple[Array, Array], ctrl: Array) -> StepInfo:
    """Return what an env step gave: an env that is no longer finite keeps its state of before and is flagged."""
    (qpos_before, qvel_before), (qpos, qvel) = before, after
    diverged = ~(_is_finite(xp, qpos) & _is_finite(xp, qvel) & _is_finite(xp, ctrl))
    qpos = xp.where(diverged[:, None], qpos_before, qpos)
    qvel = xp.where(diverged[:, None], qvel_before, qvel)
    return StepInfo(qpos, qvel, qpos[:, :0], diverged)


def _is_finite(xp: Namespace, array: Array) -> Array:
    return xp.all(xp.isfinite(array), axis=1)


class AnalyticEngine:
    """Steps ``task.dynamics`` of ``num_envs`` envs, with arrays of the caller's framework, dtype and device.

    An env whose state or control is no longer finite is flagged in ``diverged`` and keeps the state it began the step
    with. Arrays are never written in place: those handed out stay valid, and JAX may trace the methods.

    Args:
        task: brings the equations of motion.
        num_envs: number of envs.
        decimation: physics steps per env step.
        xp: array namespace (``array_api_compat.torch``, ``array_api_compat.numpy``, ``jax.numpy``).
        dtype, device: of all arrays, in the words of ``xp``; None is the framework's default.

    Raises:
        UsageError: a number below 1.
    """

    num_sensordata = 0
    takes_numpy: ClassVar[bool] = False

    def __init__(
        self,
        task: AnalyticTask,
        num_envs: int,
        decimation: int,
        xp: Namespace,
        *,
        dtype: Any = None,
        device: Any = None,
    ) -> None:
        _refuse_too_few(num_envs=num_envs, decimation=decimation)
        self.task, self.num_envs, self.decimation, self.xp = task, num_envs, decimation, xp
        self.num_positions, self.num_velocities = task.num_positions, task.num_velocities
        self.num_controls = task.num_controls
        self._qpos = xp.zeros((num_envs, self.num_positions), dtype=dtype, device=device)
        self._qvel = xp.zeros((num_envs, self.num_velocities), dtype=dtype, device=device)
        self._sensordata = xp.zeros((num_envs, 0), dtype=dtype, device=device)

    @property
    def warning_counts(self) -> Mapping[str, int]:
        """Nothing: equations of motion do not speak."""
        return {}

    def step(self, ctrl: Array, push: Array | None = None) -> StepInfo:
        """Advance every env by ``decimation`` physics steps under constant ``ctrl (num_envs, num_controls)``.

        ``push (num_envs, num_velocities)`` is added to the velocities before the first of them.
        """
        before = qpos, qvel = self._qpos, self._qvel
        if push is not None:
            qvel = qvel + push
        for _ in range(self.decimation):
            qpos, qvel = self.task.dynamics(self.xp, qpos, qvel, ctrl)
        info = _put_back_failed(self.xp, before, (qpos, qvel), ctrl)
        self._qpos, self._qvel = info.qpos, info.qvel
        return info._replace(sensordata=self._sensordata)

    def reset(self, mask: Array, qpos: Array, qvel: Array) -> Array:
        """Put the envs of ``mask (num_envs,)`` at ``qpos`` and ``qvel``; return sensordata ``(num_envs, 0)``."""
        self._qpos = self.xp.where(mask[:, None], qpos, self._qpos)
        self._qvel = self.xp.where(mask[:, None], qvel, self._qvel)
        return self._sensordata

    def state_dict(self) -> dict[str, Array]:
        """Return positions and velocities, each with a leading ``num_envs`` axis."""
        return {"qpos": self._qpos, "qvel": self._qvel}

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        """Continue where ``state_dict`` was taken.

        Raises:
            UsageError: the arrays are of another task or number of envs.
        """
        for name, own in self.state_dict().items():
            if tuple(state[name].shape) != tuple(own.shape):
                raise UsageError(
                    f"saved {name} has shape {tuple(state[name].shape)}, this engine's has {tuple(own.shape)}; load "
                    "the state of the same task and number of envs"
                )
        self._qpos = self.xp.asarray(state["qpos"], dtype=self._qpos.dtype, device=self._qpos.device)
        self._qvel = self.xp.asarray(state["qvel"], dtype=self._qvel.dtype, device=self._qvel.device)

    def log_to(self, path: Path) -> None:
        """There is nothing that would speak."""

    def close(self) -> None:
        """Nothing to release."""


class PureAnalyticEngine:
    """Steps ``task.dynamics`` in JAX, as ``AnalyticEngine`` does, with the state as an argument and a result.

    Physics: ``qpos (num_envs, num_positions)`` and ``qvel (num_envs, num_velocities)``, zeros at the start.

    Args:
        task: brings the equations of motion.
        decimation: physics steps per env step.
        dtype: of all arrays, float32 or float64.

    Raises:
        UsageError: a number below 1.
    """

    num_sensordata = 0

    def __init__(self, task: AnalyticTask, decimation: int, dtype: Any) -> None:
        _refuse_too_few(decimation=decimation)
        self.task, self.decimation, self.dtype = task, decimation, dtype
        self.num_positions, self.num_velocities = task.num_positions, task.num_velocities
        self.num_controls = task.num_controls

    @property
    def warning_counts(self) -> Mapping[str, int]:
        """Nothing: equations of motion do not speak."""
        return {}

    def start(self, env_ids: Array) -> Physics:
        """Return every env of ``env_ids (num_envs,)`` at zero."""
        import jax.numpy as jnp

        sizes = {"qpos": self.num_positions, "qvel": self.num_velocities}
        return {name: jnp.zeros((env_ids.shape[0], size), dtype=self.dtype) for name, size in sizes.items()}

    def step(self, physics: Physics, ctrl: Array, push: Array | None = None) -> tuple[Physics, StepInfo]:
        """Advance every env by ``decimation`` physics steps under constant ``ctrl (num_envs, num_controls)``.

        ``push (num_envs, num_velocities)`` is added to the velocities before the first of them.
        """
        import jax
        import jax.numpy as jnp

        def physics_step(state: tuple[Array, Array], _: None) -> tuple[tuple[Array, Array], None]:
            qpos, qvel = self.task.dynamics(jnp, *state, ctrl)
            return (qpos.astype(self.dtype), qvel.astype(self.dtype)), None

        before = qpos, qvel = (physics["qpos"], physics["qvel"])
        pushed = (qpos, qvel if push is None else qvel + push)
        unroll = min(self.decimation, UNROLLED_STEPS)
        after, _ = jax.lax.scan(physics_step, pushed, None, length=self.decimation, unroll=unroll)
        info = _put_back_failed(jnp, before, after, ctrl)
        return {"qpos": info.qpos, "qvel": info.qvel}, info

    def reset(self, physics: Physics, mask: Array, qpos: Array, qvel: Array) -> tuple[Physics, Array]:
        """Put the envs of ``mask (num_envs,)`` at ``qpos`` and ``qvel``; return sensordata ``(num_envs, 0)`` too."""
        import jax.numpy as jnp

        given = {"qpos": qpos, "qvel": qvel}
        new = {name: jnp.where(mask[:, None], given[name], old) for name, old in physics.items()}
        return new, new["qpos"][:, :0]

    def log_to(self, path: Path) -> None:
        """There is nothing that would speak."""

    def close(self) -> None:
        """Nothing to release."""
