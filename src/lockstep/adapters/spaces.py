"""Spaces of Gymnasium, which many libraries of learners describe envs by."""

from typing import Any

import numpy as np
from gymnasium import spaces

from lockstep.core.types import ActionSpace


def observations_of(size: int) -> spaces.Box:
    """Return the space of observations ``(size,)`` float32; no task bounds what it shows."""
    return spaces.Box(-np.inf, np.inf, (size,), np.float32)


def actions_of(space: ActionSpace) -> spaces.Space[Any]:
    """Return the space of one env's action: ``(size,)`` float32 up to where the task clips it, or one of its choices.

    Where nothing clips it, the bounds are infinite.
    """
    if space.kind == "discrete":
        return spaces.Discrete(space.size)
    return spaces.Box(-space.limit, space.limit, (space.size,), np.float32)
