"""An env of Gymnasium whose answers are looked at, one by one, before they become arrays of all envs.

The process of an env imports this, and so no torch.
"""

from __future__ import annotations

import os
import signal
import warnings
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from lockstep.adapters.gymnasium.specs import encoder, make_one
from lockstep.core.errors import RunError, in_one_line
from lockstep.envs.config import GymnasiumConfig

_NUMBERS = "biuf"  # numpy's kinds of booleans, whole numbers and floats


class CheckedEnv(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Gives flat observations of one size, a float as reward, booleans at an end, and nothing else.

    A failure of the env to close is a warning, since whatever was to be had of it is had by then.

    Args:
        env: of somebody else.
        space: of its observations, as an env of the same kind has told before.
        task: its task's name, for messages.
        number: its global id, for messages.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], space: gymnasium.Space[Any], task: str, number: int) -> None:
        super().__init__(env)
        self.observation_space = spaces.utils.flatten_space(space)
        self._encode, self._size = encoder(space), int(spaces.utils.flatdim(space))
        self._task, self._name = task, f"env {number} of {task}"

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, Any]:
        """Begin an episode; return its observation ``(num_observations,)`` and an empty dictionary.

        Raises:
            RunError: the env gives something else than an observation of its space and a dictionary.
        """
        given: Any = self.env.reset(seed=seed, options=options)
        if not isinstance(given, tuple) or len(given) != 2:
            raise RunError(f"{self._name} gave {_in_words(given)} at a reset; return (observation, info)")
        return self._flat(given[0]), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Apply an action of the env's space; return what ``gymnasium.Env.step`` does, with an empty dictionary.

        Raises:
            RunError: the observation is not of the env's space, the reward is not one number, or an end not one value.
        """
        observation, reward, terminated, truncated, _ = self.env.step(action)
        return (
            self._flat(observation),
            self._one(reward, "reward", _NUMBERS),
            bool(self._one(terminated, "terminated")),
            bool(self._one(truncated, "truncated")),
            {},
        )

    def close(self) -> None:
        """Close the env, or warn."""
        try:
            self.env.close()
        except (Exception, SystemExit) as error:
            # Without its number: Python shows the same warning once.
            warnings.warn(f"an env of {self._task} failed to close: {in_one_line(error)}", stacklevel=2)

    def _flat(self, observation: Any) -> np.ndarray:
        try:
            flat = self._encode(observation)
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise RunError(
                f"{self._name} gave {_in_words(observation)} as observation, which its space does not have: "
                f"{in_one_line(error)}"
            ) from error
        if flat.size != self._size or flat.dtype.kind not in _NUMBERS:
            raise RunError(
                f"{self._name} gave {_in_words(observation)} as observation, and its space has {self._size} numbers"
            )
        return flat

    def _one(self, value: Any, what: str, kinds: str | None = None) -> Any:
        """Return the only entry of an array, or a value that is none."""
        if isinstance(value, float | int):
            return value
        array = np.asarray(value)
        if array.size != 1 or (kinds is not None and array.dtype.kind not in kinds):
            raise RunError(f"{self._name} gave {_in_words(value)} as {what}, which is not one number")
        return array.item()


def name_of(env_id: str) -> str:
    """Return what messages call a task of Gymnasium."""
    return f"gymnasium/{env_id}"


def make_checked(env_id: str, config: GymnasiumConfig, space: gymnasium.Space[Any], number: int) -> CheckedEnv:
    """Return the env with that global id; the space is that of its observations."""
    env = make_one(env_id, config.max_episode_steps, config.kwargs)
    return CheckedEnv(env, space, name_of(env_id), number)


def make_for(
    owner: int, env_id: str, config: GymnasiumConfig, space: gymnasium.Space[Any], number: int
) -> gymnasium.Env[Any, Any]:
    """Return an env for the process ``owner``, mostly made in one of its children.

    An interrupt of the terminal reaches them all; it is the training's to end what it has begun.
    """
    if os.getpid() != owner:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    return make_checked(env_id, config, space, number)


def _in_words(value: Any) -> str:
    """Return what kind of thing a value is: an array by its shape, anything else by its type, a short one as it is."""
    shape = getattr(value, "shape", None)
    if shape is not None:
        return f"{type(value).__name__} of shape {tuple(shape)}"
    shown = repr(value)
    return shown if len(shown) <= 60 and "\n" not in shown else f"a {type(value).__name__}"
