"""What EnvPool tells of an env by its id."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

import envpool
import numpy as np
from gymnasium import spaces

from lockstep.core.errors import UsageError, in_one_line, nearest
from lockstep.envs.config import GuestConfig
from lockstep.envs.guest_actions import kind_of, policy_space
from lockstep.envs.guest_task import GuestTask, as_json

_OURS = {
    "num_envs": "--num_envs N",
    "batch_size": "--num_envs N",
    "seed": "--seed S",
    "env_seed": "--seed S",
    "num_threads": "--env.num_physics_threads N",
    "max_episode_steps": "--env.max_episode_steps N",
}


class Facts(NamedTuple):
    """What is known of an env before one is made."""

    observation_space: Any
    action_space: Any
    max_episode_steps: int


def check(env_id: str) -> None:
    """Raise UsageError if EnvPool knows no env of that id."""
    known = envpool.list_all_envs()
    if env_id not in known:
        raise UsageError(f"EnvPool knows no env {env_id!r}{nearest(env_id, sorted(known, reverse=True))}")


def make_task(env_id: str, config: GuestConfig) -> GuestTask:
    """Return the sizes of an env.

    Raises:
        UsageError: its settings are wrong, or its observations or actions are of a kind that no policy here deals with.
    """
    facts = facts_of(env_id, config.kwargs)
    num_observations = _num_observations(facts.observation_space, env_id)
    return GuestTask(
        policy_space(facts.action_space, f"envpool/{env_id}"), dict.fromkeys(("actor", "critic"), num_observations)
    )


def time_limit(env_id: str, config: GuestConfig) -> int | None:
    """Return the time limit in env steps that EnvPool gives an env with the config's ``kwargs``; None: it has none.

    Raises:
        UsageError: the ``kwargs`` are wrong.
    """
    limit = facts_of(env_id, config.kwargs).max_episode_steps
    # EnvPool writes the largest int32 where there is no limit.
    return limit if 0 < limit < 10**6 else None


def facts_of(env_id: str, kwargs: Mapping[str, Any]) -> Facts:
    """Return what EnvPool tells of an env with these keyword arguments.

    Raises:
        UsageError: they are not the env's, or lockstep's own to give.
    """
    for name in kwargs:
        if name in _OURS:
            raise UsageError(f"env.kwargs.{name} is not EnvPool's to be told here; give {_OURS[name]}")
    return _facts_of(env_id, as_json(kwargs))


@cache
def _facts_of(env_id: str, kwargs: str) -> Facts:
    given = json.loads(kwargs)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that float64 bounds are cast to the observations' float32
            spec = envpool.make_spec(env_id, **given)
            facts = Facts(spec.gymnasium_observation_space, spec.gymnasium_action_space, spec.config.max_episode_steps)
            num_players = spec.config.max_num_players
    except Exception as error:
        hint = f"; env.kwargs are {kwargs}" if given else ""
        raise UsageError(f"EnvPool can't make env {env_id!r}: {in_one_line(error)}{hint}") from error
    if num_players > 1:
        raise UsageError(f"task envpool/{env_id} has {num_players} players; a policy here plays alone")
    return facts


def encoder(space: Any) -> Callable[[Any], np.ndarray]:
    """Return what makes ``(num_envs, num_observations)`` of a batch of observations; a choice is one number for each.

    The parts of a dict follow one another in the order of the space.
    """
    if isinstance(space, spaces.Dict):
        parts = [(name, encoder(inner)) for name, inner in space.spaces.items()]
        return lambda batch: np.concatenate([encode(batch[name]) for name, encode in parts], axis=1)
    if isinstance(space, spaces.Discrete):
        count, start = int(space.n), int(space.start)
        return lambda batch: np.eye(count)[np.asarray(batch).reshape(-1) - start]
    return lambda batch: np.reshape(batch, (len(batch), -1))


def _num_observations(space: Any, env_id: str) -> int:
    if isinstance(space, spaces.Dict):
        return sum(_num_observations(inner, env_id) for inner in space.spaces.values())
    if isinstance(space, spaces.Discrete):
        return int(space.n)
    if isinstance(space, spaces.Box):
        return int(np.prod(space.shape, dtype=np.int64))
    raise UsageError(
        f"task envpool/{env_id} has observations of kind {kind_of(space)}; a policy here takes a fixed number of "
        "real numbers (Box, Discrete, and Dict of these)"
    )
