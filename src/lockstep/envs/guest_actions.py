"""How a policy's actions reach other people's envs, whose spaces are Gymnasium's."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from lockstep.core.errors import UsageError
from lockstep.core.types import ActionSpace


def policy_space(space: spaces.Space[Any], task: str) -> ActionSpace:
    """Return the actions of a policy for an env's space of actions; without a limit where an entry is not bounded.

    Args:
        space: the env's.
        task: its name, for messages.

    Raises:
        UsageError: neither an array of real numbers nor one choice.
    """
    if isinstance(space, spaces.Discrete):
        return ActionSpace("discrete", int(space.n))
    size = int(np.prod(space.shape, dtype=np.int64)) if isinstance(space, spaces.Box) else 0
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating) and size:
        is_bounded = bool(np.isfinite(space.low).all() and np.isfinite(space.high).all())
        return ActionSpace("continuous", size, 1.0 if is_bounded else np.inf)
    raise UsageError(
        f"task {task} has actions of kind {kind_of(space)}; a policy here gives real numbers (Box) or one choice "
        "(Discrete)"
    )


def decoder(space: spaces.Space[Any]) -> Callable[[np.ndarray], np.ndarray]:
    """Return what makes the envs' actions, one after the other, of those of a policy for all envs.

    Args:
        space: one that ``policy_space`` takes.
    """
    if isinstance(space, spaces.Discrete):
        start = int(space.start)
        return lambda actions: actions + start
    assert isinstance(space, spaces.Box)
    return BoundedActions(space.low, space.high, space.shape, space.dtype)


def kind_of(space: spaces.Space[Any]) -> str:
    """Return what kind of space it is, in words: ``Dict``, ``Box of int64``, ``Box of shape (0,)``."""
    if not isinstance(space, spaces.Box):
        return type(space).__name__
    return f"Box of {space.dtype}" if np.prod(space.shape) else f"Box of shape {space.shape}"


class BoundedActions:
    """Turns continuous actions of a policy into those of an env whose action is an array between two bounds.

    Where an entry has two finite bounds, [-1, 1] of the policy is laid over them linearly and what lies outside is
    clipped; an env with bounds -1 and 1 so gets the action itself, clipped. An entry without both is passed on as it
    is, clipped to the bound that there is.

    Args:
        low, high: of each entry, of one shape.
        shape: of one action of the env.
        dtype: of it.
    """

    def __init__(self, low: np.ndarray, high: np.ndarray, shape: Sequence[int], dtype: object) -> None:
        self.size = int(np.prod(shape, dtype=np.int64))
        self._shape, self._dtype = tuple(shape), np.dtype(dtype)  # type: ignore[call-overload]
        low, high = (np.broadcast_to(bound, self._shape).reshape(-1).astype(np.float64) for bound in (low, high))
        self._low, self._high = low, high
        self._bounded = np.isfinite(low) & np.isfinite(high)
        with np.errstate(invalid="ignore", over="ignore"):  # of entries without two bounds
            self._middle = np.where(self._bounded, low / 2 + high / 2, 0.0)
            self._half = np.where(self._bounded, high / 2 - low / 2, 1.0)

    def __call__(self, actions: np.ndarray) -> np.ndarray:
        """Return ``(num_envs, *shape)`` for the policy's ``(num_envs, size)``."""
        wanted = actions.astype(np.float64)
        inside = np.where(self._bounded, np.clip(wanted, -1.0, 1.0), wanted)
        placed = np.clip(self._middle + self._half * inside, self._low, self._high)
        actions_of_env: np.ndarray = placed.astype(self._dtype).reshape(-1, *self._shape)
        return actions_of_env
