"""Settings of ``cartpole_swingup``."""

from lockstep.tasks.cartpole.config import CartpoleConfig, CartpoleRewardWeights


class CartpoleSwingupConfig(CartpoleConfig):
    """Cart-pole that starts hanging and must be swung up."""

    # A pole that only whirls round is upright half of the time, so being upright alone must earn little.
    reward_weights: CartpoleRewardWeights = CartpoleRewardWeights(
        upright=0.2, centred=0.3, small_control=0.1, small_velocity=0.4
    )
