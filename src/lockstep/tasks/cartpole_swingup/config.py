"""Settings of ``cartpole_swingup``."""

from lockstep.tasks.cartpole.config import CartpoleConfig


class CartpoleSwingupConfig(CartpoleConfig):
    """Cart-pole that starts hanging and must be swung up."""
