"""What Gymnasium tells of an env by its id, and how one is made."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs import registration

from lockstep.core.errors import UsageError, in_one_line, nearest
from lockstep.core.registry import look_in_current_folder
from lockstep.envs.config import GuestConfig
from lockstep.envs.guest_actions import kind_of, policy_space
from lockstep.envs.guest_task import GuestTask, as_json

_OURS = {
    "id": "name another task",
    "max_episode_steps": "give --env.max_episode_steps N",
    "disable_env_checker": "leave it out",
}
"""Keyword arguments of ``gymnasium.make`` itself, and what to do instead."""
_REGISTERED = "; one that a module registers as it is imported is named gymnasium/<module>:<id>"
_PLAIN = (spaces.Box, spaces.Discrete, spaces.MultiBinary, spaces.MultiDiscrete)


class Facts(NamedTuple):
    """What is known of an env once one was made."""

    observation_space: gymnasium.Space[Any]
    action_space: gymnasium.Space[Any]
    step_duration_s: float


def check(env_id: str) -> None:
    """Raise UsageError if Gymnasium knows no env of that id."""
    spec_of(env_id)


def time_limit(env_id: str, config: GuestConfig) -> int | None:
    """Return the time limit in env steps that an env is registered with; None: it has none."""
    return spec_of(env_id).max_episode_steps


def spec_of(env_id: str) -> registration.EnvSpec:
    """Return how Gymnasium makes an env; ``module:Id-v0`` imports the module, which may be in the current folder.

    Raises:
        UsageError: it knows no such env; with the nearest that it knows.
    """
    module, _, name = env_id.rpartition(":")
    try:
        if module:
            look_in_current_folder()
            importlib.import_module(module)
        return gymnasium.spec(name)
    except gymnasium.error.UnregisteredEnv:
        guess = _guess_in(module, name) if module else _guess(name) or _REGISTERED
        raise UsageError(f"Gymnasium knows no env {name!r}{guess}") from None
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise UsageError(f"Gymnasium can't find env {env_id!r}: {in_one_line(error)}") from error
        raise UsageError(
            f"task gymnasium/{env_id} is in no module {module!r}; run lockstep in the folder of {error.name}, or "
            "install its package"
        ) from None
    except Exception as error:
        raise UsageError(f"Gymnasium can't find env {env_id!r}: {in_one_line(error)}") from error


def make_one(env_id: str, max_episode_steps: int, kwargs: Mapping[str, Any]) -> gymnasium.Env[Any, Any]:
    """Return an env with that time limit; MuJoCo, if it takes part, keeps off the terminal and the working folder."""
    if "mujoco" in sys.modules or "mujoco" in str(spec_of(env_id).entry_point):
        from lockstep.sim.models import silence_mujoco

        silence_mujoco()
    return gymnasium.make(env_id, max_episode_steps=max_episode_steps, disable_env_checker=True, **kwargs)


def make_task(env_id: str, config: GuestConfig) -> GuestTask:
    """Return the sizes of an env.

    Raises:
        UsageError: it can't be made, or its observations or actions are of a kind that no policy here deals with.
    """
    facts = facts_of(env_id, config.kwargs)
    return GuestTask(
        policy_space(facts.action_space, f"gymnasium/{env_id}"),
        dict.fromkeys(("actor", "critic"), num_observations(facts.observation_space, env_id)),
        step_duration_s=facts.step_duration_s,
    )


def facts_of(env_id: str, kwargs: Mapping[str, Any]) -> Facts:
    """Return what an env made with these keyword arguments tells of itself.

    Raises:
        UsageError: it can't be made, or they are lockstep's own to give.
    """
    for name in kwargs:
        if name in _OURS:
            raise UsageError(f"env.kwargs.{name} is not Gymnasium's to be told here; {_OURS[name]}")
    return _facts_of(env_id, as_json(kwargs))


@cache
def _facts_of(env_id: str, kwargs: str) -> Facts:
    given = json.loads(kwargs)
    env = None
    try:
        env = make_one(env_id, spec_of(env_id).max_episode_steps or -1, given)
        return Facts(env.observation_space, env.action_space, _step_duration_s(env))
    except UsageError:
        raise
    except (Exception, SystemExit) as error:
        hint = f"; env.kwargs are {kwargs}" if given else ""
        if not given and env is None and isinstance(error, TypeError):
            hint = "; what the env needs is given with --env.kwargs.NAME VALUE"
        raise UsageError(f"Gymnasium can't make env {env_id!r}: {in_one_line(error)}{hint}") from error
    finally:
        if env is not None:
            with suppress(Exception, SystemExit):  # all that was wanted of it is known
                env.close()


def num_observations(space: gymnasium.Space[Any], env_id: str) -> int:
    """Return how many numbers an observation of the space is made of.

    Raises:
        UsageError: no fixed number.
    """
    _check_observations(space, env_id)
    return int(spaces.utils.flatdim(space))


def encoder(space: gymnasium.Space[Any]) -> Callable[[Any], np.ndarray]:
    """Return what makes one flat array of an observation: arrays as they are, choices as one number for each."""
    if isinstance(space, spaces.Box):
        return lambda observation: np.asarray(observation).reshape(-1)
    return lambda observation: np.asarray(spaces.utils.flatten(space, observation))


def _check_observations(space: gymnasium.Space[Any], env_id: str) -> None:
    if isinstance(space, spaces.Dict):
        for inner in space.spaces.values():
            _check_observations(inner, env_id)
    elif isinstance(space, spaces.Tuple):
        for inner in space.spaces:
            _check_observations(inner, env_id)
    elif not isinstance(space, _PLAIN):
        raise UsageError(
            f"task gymnasium/{env_id} has observations of kind {kind_of(space)}; a policy here takes a fixed number "
            "of real numbers (Box, Discrete, MultiBinary, MultiDiscrete, and Dict or Tuple of these)"
        )


def _step_duration_s(env: gymnasium.Env[Any, Any]) -> float:
    """Return the simulated seconds of a step: the env's ``dt``, or what it would be shown at; 0 if it tells neither."""
    for name in ("dt", "tau"):
        value = getattr(env.unwrapped, name, None)
        if isinstance(value, int | float) and 0 < value < np.inf:
            return float(value)
    frames_per_s = env.metadata.get("render_fps")
    return 1.0 / float(frames_per_s) if isinstance(frames_per_s, int | float) and frames_per_s > 0 else 0.0


def _guess_in(module: str, name: str) -> str:
    """Return which env of a module was meant: the nearest of those that are made by code of its package."""
    package = module.partition(".")[0]
    own = [env_id for env_id, spec in registration.registry.items() if _package_of(spec) == package]
    return nearest(name, own) or f"; {module} registers {', '.join(own) or 'none'}"


def _package_of(spec: registration.EnvSpec) -> str:
    made_by = spec.entry_point
    return (made_by if isinstance(made_by, str) else getattr(made_by, "__module__", "")).partition(":")[0].split(".")[0]


def _guess(env_id: str) -> str:
    """Return the id that was meant: the newest version of the same env, or the nearest name."""
    try:
        namespace, name, _ = registration.parse_env_id(env_id)
    except gymnasium.error.Error:
        return nearest(env_id, registration.registry)
    version = registration.find_highest_version(namespace, name)
    if version is not None:
        return f"; did you mean '{registration.get_env_id(namespace, name, version)}'?"
    return nearest(env_id, sorted(registration.registry, reverse=True))
