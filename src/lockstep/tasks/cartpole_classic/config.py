"""Settings of ``cartpole_classic``."""

from typing import Literal

from pydantic import Field

from lockstep.envs.config import EnvConfig


class CartpoleClassicConfig(EnvConfig):
    """Cart-pole of Barto, Sutton and Anderson (1983)."""

    action_kind: Literal["continuous", "discrete"] = Field(
        "continuous", description="continuous: a share of the force in [-1, 1]; discrete: 0 pushes left, 1 right"
    )
    max_force_newtons: float = Field(10.0, gt=0, description="largest push on the cart")
    reset_range: float = Field(
        0.05, ge=0, description="positions (m, rad) and velocities (m/s, rad/s) start uniform in +- this"
    )
    max_cart_position_m: float = Field(2.4, gt=0, description="the episode fails when the cart is farther out")
    max_pole_angle_deg: float = Field(12.0, gt=0, description="the episode fails when the pole leans farther")
