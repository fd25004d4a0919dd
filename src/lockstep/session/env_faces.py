"""A task's envs as other people's code wants them: Gymnasium's two interfaces, and RSL-RL's."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from lockstep.core.errors import UsageError
from lockstep.core.registry import load
from lockstep.recipes.catalog import TASKS, make_task
from lockstep.recipes.libraries import LIBRARIES
from lockstep.recipes.suites import SUITES
from lockstep.session.make_config import make_config
from lockstep.session.make_env import make_env

if TYPE_CHECKING:
    from lockstep.adapters.gymnasium.single import LockstepEnv
    from lockstep.adapters.gymnasium.vector import LockstepVectorEnv
    from lockstep.adapters.rsl_rl.env import RslRlEnv
    from lockstep.envs.batch_env import BatchEnv

GYMNASIUM = SUITES.get("gymnasium").distribution

MODEL_SEED = 1
"""Where the episodes are left to Gymnasium's own randomness, the variants of the model are still the same each time."""


def make_gymnasium_env(
    task: str,
    *,
    seed: int | None = 1,
    device: str = "cpu",
    observations: Literal["actor", "all"] = "actor",
    render_mode: Literal["rgb_array"] | None = None,
    **env: Any,
) -> LockstepEnv:
    """Return one env of a task as a ``gymnasium.Env``.

    Args:
        task: a name that ``lockstep tasks`` lists.
        seed: of all random streams, until ``reset`` is given another; None for another one each time.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:<index>``.
        observations: ``actor``, or ``all`` for a dictionary of all groups, with what only a critic may see.
        render_mode: ``rgb_array`` for pictures.
        env: settings of the task's env, such as ``max_episode_steps=200``.

    Raises:
        UsageError: an unknown task or setting, a device that is not there, no renderer, or Gymnasium is not installed.
    """
    GYMNASIUM.require("a Gymnasium env")
    _require_own(task)
    picture = _picture(task, render_mode, env)
    made = _make(task, 1, seed, device, env)
    face: LockstepEnv = load("lockstep.adapters.gymnasium.single:LockstepEnv")(
        made, seed=seed, observations=observations, picture=picture
    )
    return face


def make_gymnasium_vector_env(
    task: str,
    num_envs: int | None = None,
    *,
    seed: int | None = 1,
    device: str = "auto",
    autoreset_mode: str = "SameStep",
    observations: Literal["actor", "all"] = "actor",
    render_mode: Literal["rgb_array"] | None = None,
    **env: Any,
) -> LockstepVectorEnv:
    """Return ``num_envs`` envs of a task as one ``gymnasium.vector.VectorEnv``.

    Under torchrun every rank gets as many of its own, with other episodes than those of any other rank.

    Args:
        task: a name that ``lockstep tasks`` lists.
        num_envs: how many on this rank; None for the recipe's number.
        seed: of all random streams, until ``reset`` is given another; None for another one each time.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:<index>``; arrays are numpy's on any of them.
        autoreset_mode: ``SameStep``, ``NextStep`` or ``Disabled``; ``NextStep`` wastes a step per episode.
        observations: ``actor``, or ``all`` for a dictionary of all groups, with what only a critic may see.
        render_mode: ``rgb_array`` for pictures, one of every env.
        env: settings of the task's env, such as ``max_episode_steps=200``.

    Raises:
        UsageError: an unknown task or setting, a device that is not there, no renderer, or Gymnasium is not installed.
    """
    GYMNASIUM.require("a Gymnasium vector env")
    _require_own(task)
    picture = _picture(task, render_mode, env)
    made = _make(task, num_envs, seed, device, env)
    face: LockstepVectorEnv = load("lockstep.adapters.gymnasium.vector:LockstepVectorEnv")(
        made, seed=seed, autoreset_mode=autoreset_mode, observations=observations, picture=picture
    )
    return face


def make_rsl_rl_env(
    task: str, num_envs: int | None = None, *, seed: int = 1, device: str = "auto", **env: Any
) -> RslRlEnv:
    """Return ``num_envs`` envs of a task as the ``VecEnv`` that RSL-RL's runners take.

    Under torchrun every rank gets as many of its own, with other episodes than those of any other rank.

    Args:
        task: a name that ``lockstep tasks`` lists.
        num_envs: how many on this rank; None for the recipe's number.
        seed: of all random streams.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:<index>``.
        env: settings of the task's env, such as ``max_episode_steps=200``.

    Raises:
        UsageError: an unknown task or setting, a task of discrete actions, a device that is not there, or RSL-RL is
            not installed.
    """
    LIBRARIES.get("rsl_rl").require("an RSL-RL env")
    face: RslRlEnv = load("lockstep.adapters.rsl_rl.env:RslRlEnv")(_make(task, num_envs, seed, device, env), task)
    return face


def _make(task: str, num_envs: int | None, seed: int | None, device: str, env: dict[str, Any]) -> BatchEnv:
    # An episode that begins in its middle would be news to other people's code.
    settings = {"randomize_initial_episode_length": False} | env
    return make_env(task, num_envs, seed=MODEL_SEED if seed is None else seed, device=device, **settings)


def _require_own(task: str) -> None:
    """Raise UsageError, before anything is made, if a task is an env of others: its face would be one of a face."""
    suite = TASKS.get(task).suite
    if suite is not None:
        raise UsageError(
            f"task {task} is an env of {suite.distribution.name}, which has its own way to Gymnasium; use that"
        )


def _picture(task: str, render_mode: str | None, env: dict[str, Any]) -> Callable[[Any], Any] | None:
    if render_mode is None:
        return None
    if render_mode != "rgb_array":
        raise UsageError(f"render_mode {render_mode!r} is not available; use rgb_array, or None")
    from lockstep.session.pictures import Pictures, choose_renderer

    model_path = make_task(make_config(task, env=env)).model_path
    if model_path is None:
        raise UsageError(
            f"task {task} has no MuJoCo model, so there is nothing of it to be seen; leave render_mode out"
        )
    choose_renderer(model_path)
    return Pictures(model_path)
