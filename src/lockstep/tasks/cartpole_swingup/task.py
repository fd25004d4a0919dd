"""Swing a hanging pole up and keep it there, in MuJoCo."""

import math

from lockstep.core.types import Array, Namespace, State
from lockstep.tasks.cartpole.task import Cartpole
from lockstep.tasks.cartpole_swingup.config import CartpoleSwingupConfig


class CartpoleSwingup(Cartpole):
    """The pole starts hanging; nothing ends an episode but the time limit, the rail has stops."""

    config: CartpoleSwingupConfig
    start_angle = math.pi

    def terminations(self, xp: Namespace, state: State) -> Array:
        """Never."""
        return xp.zeros_like(state.qpos[:, 0], dtype=xp.bool)
