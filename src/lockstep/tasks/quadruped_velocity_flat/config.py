"""Settings of ``quadruped_velocity_flat``."""

from lockstep.tasks.quadruped.config import QuadrupedVelocityConfig


class QuadrupedVelocityFlatConfig(QuadrupedVelocityConfig):
    """The quadruped on flat ground."""
