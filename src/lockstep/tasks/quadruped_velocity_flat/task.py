"""Walk over flat ground as commanded."""

from lockstep.tasks.quadruped.task import QuadrupedVelocity


class QuadrupedVelocityFlat(QuadrupedVelocity):
    """The floor is a plane at height 0."""
