"""Settings of ``cartpole_balance``."""

from pydantic import Field

from lockstep.tasks.cartpole.config import CartpoleConfig


class CartpoleBalanceConfig(CartpoleConfig):
    """Cart-pole that starts near upright and must stay there."""

    max_cart_position_m: float = Field(
        1.6, gt=0, description="the episode fails when the cart is farther out; the stops are at 1.8"
    )
    max_pole_angle_rad: float = Field(0.6, gt=0, description="the episode fails when the pole leans farther")
