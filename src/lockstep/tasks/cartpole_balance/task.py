"""Keep a pole upright on a cart, in MuJoCo."""

from lockstep.core.types import Array, Namespace, State
from lockstep.tasks.cartpole.task import Cartpole
from lockstep.tasks.cartpole_balance.config import CartpoleBalanceConfig


class CartpoleBalance(Cartpole):
    """The pole starts near upright; the episode fails when it falls or the cart gets close to the rail's stops."""

    config: CartpoleBalanceConfig
    start_angle = 0.0

    def terminations(self, xp: Namespace, state: State) -> Array:
        """The pole leans too far or the cart is too far out."""
        off_rail = xp.abs(state.qpos[:, 0]) > self.config.max_cart_position_m
        fallen = xp.abs(state.qpos[:, 1]) > self.config.max_pole_angle_rad
        return off_rail | fallen
