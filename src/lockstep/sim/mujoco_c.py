"""The engine ``mujoco``: batched C MuJoCo on a pool of CPU threads."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import mujoco
import numpy as np
from mujoco.batch import Batch, SimulationError
from numpy.typing import ArrayLike, NDArray

from lockstep.core.errors import UsageError
from lockstep.core.types import StepInfo, Task
from lockstep.sim.models import load_models, log_mujoco_to, model_indices, silence_mujoco

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]

_WARNING_NAMES = [mujoco.mjtWarning(index).name for index in range(int(mujoco.mjtWarning.mjNWARNING))]


def make_engine(
    task: Task, *, num_envs: int, first_env_id: int, decimation: int, num_threads: int, seed: int, **_: Any
) -> "MujocoEngine":
    """Return the engine that steps the task's MJCF file; of what other engines are told it needs nothing.

    All engines of a task share its models.

    Raises:
        UsageError: what ``load_models`` or the engine raises.
    """
    return MujocoEngine(load_models(task, seed), num_envs, decimation, num_threads, first_env_id=first_env_id)


class MujocoEngine:
    """Steps envs of one MuJoCo model, or of variants of it; takes and returns numpy arrays in float64.

    The state of an env is MuJoCo's integration state, which includes the solver's warm start (``qacc_warmstart``), so
    results are bit for bit those of one ``mj_step`` loop per env: they depend neither on the number of threads nor on
    how envs are split into batches, and a saved state continues exactly (``mujoco.batch``, MuJoCo >= 3.17).

    An env in which physics fails (a NaN or a huge value in its state or controls, any MuJoCo warning or error) is
    flagged in ``diverged`` and keeps the state it began the step with; other envs don't notice. ``warning_counts``
    says what MuJoCo had to say, by name, in envs and env steps; nothing is printed (see ``silence_mujoco``).

    Args:
        models: the compiled model, which is copied, or variants of it, which the envs have by turns.
        num_envs: number of envs, 0 included.
        decimation: physics steps per env step.
        num_threads: threads that step, the calling one among them.
        first_env_id: global id of the first env, which says whose turn it is.

    Raises:
        UsageError: a number that is too small, or a model that can't be stepped in batches (one with sleeping enabled).
    """

    takes_numpy: ClassVar[bool] = True
    """Arrays cross the border as numpy arrays on the host, in float64."""

    def __init__(
        self,
        models: mujoco.MjModel | Sequence[mujoco.MjModel],
        num_envs: int,
        decimation: int,
        num_threads: int,
        *,
        first_env_id: int = 0,
    ) -> None:
        for name, value in (("num_envs", num_envs), ("decimation", decimation), ("num_threads", num_threads)):
            if value < (name != "num_envs"):
                raise UsageError(f"{name} {value} of the mujoco engine is too small; use at least 1")
        silence_mujoco()
        self._models = [models] if isinstance(models, mujoco.MjModel) else list(models)
        model = self._models[0]
        try:
            # MuJoCo has no batch of nothing; a rank without envs steps one that nobody sees.
            self._batch = Batch(model, max(num_envs, 1), num_threads)
        except ValueError as error:
            raise UsageError(f"the mujoco engine can't step this model: {error}") from error
        self.num_envs, self.decimation, self.num_threads = num_envs, decimation, num_threads
        self.num_positions, self.num_velocities = int(model.nq), int(model.nv)
        self.num_controls, self.num_sensordata = int(model.nu), int(model.nsensordata)
        self._warning_counts: Counter[str] = Counter()
        env_ids = first_env_id + np.arange(num_envs, dtype=np.int32)
        self._set_models(model_indices(env_ids, len(self._models)))

        # Live views of the batch's rows, (num_envs, ...): to write to them is to set the state.
        self._rows: FloatArray = self._batch.state[:num_envs]
        names = ("qpos", "qvel", "ctrl", "sensordata")
        live = [self._batch.bind(name)[:num_envs] for name in names]
        self._live_qpos, self._live_qvel, self._live_ctrl, self._live_sensordata = live
        self._num_warnings = self._batch.warning[:num_envs, :, 1]  # (num_envs, kinds); [:, :, 0] is where it happened

        self._rows_before = np.empty_like(self._rows)
        self._qpos, self._qvel = self._live_qpos.copy(), self._live_qvel.copy()
        self._sensordata = np.zeros((num_envs, self.num_sensordata))

    @property
    def warning_counts(self) -> Mapping[str, int]:
        """What MuJoCo had to say, by name, in envs and env steps."""
        return self._warning_counts

    def _set_models(self, model_of_env: NDArray[np.int32]) -> None:
        self._model_of_env = model_of_env
        if len(self._models) > 1:
            # The one that nobody sees, where there are no envs, has a model too.
            self._batch.set_models([self._models[index] for index in model_of_env] or self._models[:1])

    def step(self, ctrl: ArrayLike, push: ArrayLike | None = None) -> StepInfo:
        """Advance every env by ``decimation`` physics steps under constant ``ctrl (num_envs, nu)``.

        ``push (num_envs, nv)`` is added to the velocities before the first of them.

        The arrays of the result are contiguous buffers of the engine, lent to the caller until the next ``step``
        (``reset`` leaves them alone): ``torch.from_numpy`` takes them without a copy.
        """
        np.copyto(self._rows_before, self._rows)
        self._live_ctrl[...] = ctrl
        if push is not None:
            self._live_qvel += push
        diverged: BoolArray = ~np.isfinite(self._live_ctrl).all(axis=1)
        self._live_ctrl[diverged] = 0.0  # MuJoCo would do the same, and warn in every step
        try:
            self._batch.step(nstep=self.decimation)
        except SimulationError as error:
            diverged[error.ids] = True
            self._warning_counts["error"] += len(error.ids)
        diverged |= self._num_warnings.any(axis=1) | ~(_is_sane(self._live_qpos) & _is_sane(self._live_qvel))
        if diverged.any():
            self._contain(diverged)
        np.copyto(self._qpos, self._live_qpos)
        np.copyto(self._qvel, self._live_qvel)
        np.copyto(self._sensordata, self._live_sensordata, where=~diverged[:, None])
        return StepInfo(self._qpos, self._qvel, self._sensordata, diverged)

    def _contain(self, diverged: BoolArray) -> None:
        """Count what MuJoCo said and undo the step of the failed envs, which MuJoCo has put at its default state."""
        for index, count in enumerate((self._num_warnings > 0).sum(axis=0)):
            if count:
                self._warning_counts[_WARNING_NAMES[index]] += int(count)
        self._num_warnings[...] = 0
        self._rows[diverged] = self._rows_before[diverged]

    def reset(self, mask: ArrayLike, qpos: ArrayLike | None, qvel: ArrayLike | None) -> FloatArray:
        """Put the envs of ``mask (num_envs,)`` at ``qpos (num_envs, nq)``, ``qvel (num_envs, nv)``; forget the rest.

        Time, activations, controls and warm start are the model's defaults again. Returns the sensordata of all envs
        ``(num_envs, num_sensordata)``, computed by ``mj_forward`` for those of ``mask``; lent until the next ``step``.
        """
        env_ids = np.flatnonzero(mask)
        if env_ids.size == 0:
            return self._sensordata
        self._batch.reset(env_ids, stage=int(mujoco.mjtStage.mjSTAGE_NONE))
        self._live_qpos[env_ids] = np.asarray(qpos)[env_ids]
        self._live_qvel[env_ids] = np.asarray(qvel)[env_ids]
        if self.num_sensordata:
            self._forward(env_ids)
        return self._sensordata

    def _forward(self, env_ids: NDArray[np.intp]) -> None:
        """Compute the sensordata of some envs.

        MuJoCo warns of a bad state and puts the env at its default. It is put back where it was, so that the next step
        meets it there, flags and counts it, whichever engine object makes that step.
        """
        asked = self._rows[env_ids]
        try:
            self._batch.forward(env_ids)
            has_failed = np.zeros(env_ids.shape, dtype=bool)
        except SimulationError as error:
            has_failed = np.isin(env_ids, error.ids)
        has_failed |= self._num_warnings[env_ids].any(axis=1)
        self._rows[env_ids[has_failed]] = asked[has_failed]
        self._num_warnings[env_ids] = 0
        self._sensordata = self._sensordata.copy()  # what the last step has lent stays as it is
        self._sensordata[env_ids] = self._live_sensordata[env_ids]

    def state_dict(self) -> dict[str, NDArray[Any]]:
        """Return copies of the integration state ``(num_envs, nstate)`` and of the sensordata of every env.

        Where there are variants of the model, ``model (num_envs,)`` says which of them each env has.
        """
        state = {"integration_state": self._rows.copy(), "sensordata": self._sensordata.copy()}
        return state | {"model": self._model_of_env.copy()} if len(self._models) > 1 else state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state_dict`` was taken.

        Raises:
            UsageError: the arrays are of another model, number of envs or number of variants.
        """
        for name, own in (("integration_state", self._rows), ("sensordata", self._sensordata)):
            shape = tuple(np.shape(state[name]))
            if shape != own.shape:
                raise UsageError(
                    f"saved {name} has shape {shape}, this engine's has {own.shape}; load the state of the same model "
                    "and number of envs"
                )
        num_models = len(self._models)
        model_of_env = np.asarray(state.get("model", self._model_of_env * 0), dtype=np.int32)
        if ("model" in state) != (num_models > 1) or model_of_env.max(initial=0) >= num_models:
            raise UsageError(
                f"saved envs have other variants of the model than the {num_models} of this engine; load the state of "
                "as many"
            )
        if not np.array_equal(model_of_env, self._model_of_env):
            self._set_models(model_of_env.copy())
        self._rows[...] = state["integration_state"]
        self._sensordata = np.empty_like(self._sensordata)  # what was lent stays as it is
        self._sensordata[...] = state["sensordata"]
        self._num_warnings[...] = 0

    def log_to(self, path: Path) -> None:
        """Append MuJoCo's warnings to a file from now on; this holds for the whole process."""
        log_mujoco_to(path)

    def close(self) -> None:
        """Release threads and memory; the engine can't be used any more. What it has lent stays readable."""
        for name in ("_batch", "_rows", "_live_qpos", "_live_qvel", "_live_ctrl", "_live_sensordata", "_num_warnings"):
            vars(self).pop(name, None)  # each view keeps the batch alive


def _is_sane(array: FloatArray) -> BoolArray:
    """Return ``(num_envs,)``: all values are finite and below the size that MuJoCo calls bad."""
    sane: BoolArray = (np.abs(array) <= mujoco.mjMAXVAL).all(axis=1)
    return sane
