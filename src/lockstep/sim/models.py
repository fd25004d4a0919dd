"""A task's compiled MuJoCo models: the file as it is, or a pool of variants of it; and who has which."""

from typing import cast

import mujoco
import numpy as np
from numpy.typing import NDArray

from lockstep.core.errors import UsageError
from lockstep.core.rng import Stream
from lockstep.core.types import Task

STREAM = "model"


def load_models(task: Task, seed: int) -> list[mujoco.MjModel]:
    """Return the task's ``num_models`` variants of its MJCF file, the same for a seed wherever they are made.

    Variant ``k`` is drawn from the stream (seed, "model", k).

    Raises:
        UsageError: the task has no MJCF file, or MuJoCo can't read it.
    """
    if task.model_path is None:
        raise UsageError(f"{type(task).__name__} has no MuJoCo model; use --engine analytic")
    try:
        model = mujoco.MjModel.from_xml_path(str(task.model_path))
    except ValueError as error:
        raise UsageError(f"MuJoCo can't read {task.model_path}: {error}") from error
    if not task.num_model_noise:
        return [model]
    stream = Stream(seed, STREAM, np)
    ids = np.zeros(1, dtype=np.int32)
    noise = stream.uniform(stream.counters(0, task.num_models), ids, task.num_model_noise, np.float64)[:, 0]
    return [_variant(model, task, row) for row in noise]


def model_indices(env_ids: NDArray[np.int32], num_models: int) -> NDArray[np.int32]:
    """Return which variant each of the envs ``(num_envs,)`` has, by its global id."""
    return cast(NDArray[np.int32], (env_ids % num_models).astype(np.int32))


def _variant(model: mujoco.MjModel, task: Task, noise: NDArray[np.float64]) -> mujoco.MjModel:
    variant = model.__copy__()
    task.vary_model(variant, noise)
    # What MuJoCo computes of masses and the like when it compiles a model, and would else keep of the original.
    mujoco.mj_setConst(variant, mujoco.MjData(variant))
    return variant
