"""Settings that ``cartpole_balance`` and ``cartpole_swingup`` share."""

from pydantic import Field

from lockstep.core.config import Config
from lockstep.envs.config import EnvConfig


class CartpoleRewardWeights(Config):
    """The largest value of each reward term; they add up to the largest reward of a step."""

    upright: float = Field(0.5, ge=0, description="the pole stands")
    centred: float = Field(0.2, ge=0, description="the pole stands and the cart is at the middle of the rail")
    small_control: float = Field(0.1, ge=0, description="the pole stands and the motor rests")
    small_velocity: float = Field(0.2, ge=0, description="the pole stands and does not turn")


class CartpoleConfig(EnvConfig):
    """What the two cart-poles in MuJoCo share."""

    decimation: int = Field(2, ge=1, description="physics steps of 0.01 s per env step")
    reward_weights: CartpoleRewardWeights = CartpoleRewardWeights()
    centred_scale_m: float = Field(0.5, gt=0, description="cart position at which the term centred is at 1/e")
    small_velocity_scale_rad_s: float = Field(
        2.0, gt=0, description="pole angular velocity at which the term small_velocity is at 1/e"
    )
    observation_noise: float = Field(
        0.0, ge=0, description="uniform noise +- this on each of the actor's observations (m, 1, 1, m/s, rad/s)"
    )
    reset_cart_position_m: float = Field(0.3, ge=0, description="the cart starts uniform in +- this")
    reset_pole_angle_rad: float = Field(0.1, ge=0, description="the pole starts uniform in +- this about its rest")
    reset_cart_velocity_m_s: float = Field(0.1, ge=0, description="the cart starts with a velocity in +- this")
    reset_pole_velocity_rad_s: float = Field(0.1, ge=0, description="the pole starts with a velocity in +- this")
