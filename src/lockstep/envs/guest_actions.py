"""How a policy's actions reach other people's envs."""

from collections.abc import Sequence

import numpy as np


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
