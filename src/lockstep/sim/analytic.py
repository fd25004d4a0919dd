"""The engine ``analytic``: a task's own equations of motion, in any framework of the array API."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, cast

from lockstep.core.errors import UsageError
from lockstep.core.types import AnalyticTask, Array, Namespace, StepInfo, Task


def make_engine(
    task: Task, *, num_envs: int, decimation: int, xp: Namespace, dtype: Any = None, device: Any = None, **_: Any
) -> "AnalyticEngine":
    """Return the engine that steps the task's own equations of motion; it has no threads of its own.

    Raises:
        UsageError: the task has no equations of motion.
    """
    if not hasattr(task, "dynamics"):
        raise UsageError(f"{type(task).__name__} has no equations of motion of its own; use --engine mujoco")
    return AnalyticEngine(cast(AnalyticTask, task), num_envs, decimation, xp, dtype=dtype, device=device)


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
        for name, value in (("num_envs", num_envs), ("decimation", decimation)):
            if value < (name != "num_envs"):
                raise UsageError(f"{name} {value} of the analytic engine is too small; use at least 1")
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

    def step(self, ctrl: Array) -> StepInfo:
        """Advance every env by ``decimation`` physics steps under constant ``ctrl (num_envs, num_controls)``."""
        qpos, qvel = self._qpos, self._qvel
        for _ in range(self.decimation):
            qpos, qvel = self.task.dynamics(self.xp, qpos, qvel, ctrl)
        diverged = ~(self._is_finite(qpos) & self._is_finite(qvel) & self._is_finite(ctrl))
        self._qpos = self.xp.where(diverged[:, None], self._qpos, qpos)
        self._qvel = self.xp.where(diverged[:, None], self._qvel, qvel)
        return StepInfo(self._qpos, self._qvel, self._sensordata, diverged)

    def _is_finite(self, array: Array) -> Array:
        return self.xp.all(self.xp.isfinite(array), axis=1)

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
