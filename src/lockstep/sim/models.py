"""A task's compiled MuJoCo models: the file as it is, or a pool of variants of it; and who has which."""

import threading
import weakref
from pathlib import Path
from typing import cast

import mujoco
import numpy as np
from numpy.typing import NDArray

from lockstep.core.errors import UsageError
from lockstep.core.rng import Stream
from lockstep.core.types import Task

STREAM = "model"

Models = tuple[mujoco.MjModel, ...]

_lock = threading.Lock()
_pools: dict[int, dict[tuple[int, int], Models]] = {}
"""What tasks that are still there have had made: by ``id(task)``, then by seed and number of variants."""


def load_models(task: Task, seed: int) -> Models:
    """Return the task's ``num_models`` variants of its MJCF file, the same for a seed wherever they are made.

    Variant ``k`` is drawn from the stream (seed, "model", k); where there is one only, it is the file as it is. A task
    has its models made once, and all who ask share them: they are not to be written to.

    Raises:
        UsageError: the task has no MJCF file, MuJoCo can't read it, or a variant is none that MuJoCo takes.
    """
    with _lock:
        if id(task) not in _pools:
            weakref.finalize(task, _pools.pop, id(task))
            _pools[id(task)] = {}
        pools, key = _pools[id(task)], (seed, task.num_models)
        if key not in pools:
            pools[key] = _load(task, seed)
        return pools[key]


def model_indices(env_ids: NDArray[np.int32], num_models: int) -> NDArray[np.int32]:
    """Return which variant each of the envs ``(num_envs,)`` has, by its global id."""
    return cast(NDArray[np.int32], (env_ids % num_models).astype(np.int32))


def _load(task: Task, seed: int) -> Models:
    if task.model_path is None:
        raise UsageError(f"{type(task).__name__} has no MuJoCo model; use --engine analytic")
    try:
        model = mujoco.MjModel.from_xml_path(str(task.model_path))
    except ValueError as error:
        raise UsageError(f"MuJoCo can't read {task.model_path}: {error}") from error
    if task.num_models == 1:
        return (model,)
    if not task.num_model_noise:
        raise UsageError(
            f"{type(task).__name__} has {task.num_models} variants of its model and no noise to draw them by; give it "
            "num_model_noise, or num_models 1"
        )
    stream = Stream(seed, STREAM, np)
    ids = np.zeros(1, dtype=np.int32)
    noise = stream.uniform(stream.counters(0, task.num_models), ids, task.num_model_noise, np.float64)[:, 0]
    return tuple(_variant(model, task, row, number) for number, row in enumerate(noise))


def _variant(model: mujoco.MjModel, task: Task, noise: NDArray[np.float64], number: int) -> mujoco.MjModel:
    variant = model.__copy__()
    task.vary_model(variant, noise)
    try:
        # What MuJoCo computes of masses and the like when it compiles a model, and would else keep of the original.
        mujoco.mj_setConst(variant, mujoco.MjData(variant))
    except mujoco.FatalError as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"MuJoCo does not take variant {number} of {task.model_path}: {reason}") from error
    return variant


def silence_mujoco() -> None:
    """Keep MuJoCo off the terminal and out of the working folder, for the whole process.

    A log file that somebody has chosen (``mujoco.MjLogConfig``) stays in use; the default ``MUJOCO_LOG.TXT`` does not.
    """
    config = mujoco.MjLogConfig.get()
    config.logto_console = False
    config.logto_file = config.logto_file and config.logfile != "MUJOCO_LOG.TXT"
    config.set()


def log_mujoco_to(path: Path) -> None:
    """Append MuJoCo's warnings to a file from now on, for the whole process."""
    config = mujoco.MjLogConfig.get()
    config.logfile, config.logto_file = str(path), True
    config.set()
