"""The robot's numbers, as ``model.xml`` has them, and where its feet are: closed-form kinematics of its legs.

Legs are in the order FR, FL, RR, RL, and arrays of them have the shape ``(num_envs, 4)``.
"""

from typing import NamedTuple

from lockstep.core.constants import constant
from lockstep.core.types import Array, Namespace

NUM_LEGS, NUM_JOINTS = 4, 12
HIP_X = (0.1881, 0.1881, -0.1881, -0.1881)  # m, hip joint in the trunk's frame
HIP_Y = (-0.04675, 0.04675, -0.04675, 0.04675)
THIGH_Y = (-0.08, 0.08, -0.08, 0.08)  # m, thigh joint beside the hip joint
LINK_LENGTH = 0.213  # m, of thigh and calf each
FOOT_RADIUS = 0.023  # m
REST = (0.0, 0.9, -1.8) * NUM_LEGS  # rad, joint angles of standing
REST_HEIGHT = 0.28  # m, trunk above the floor
LOWER_LIMITS = (-0.863, -0.686, -2.818) * NUM_LEGS  # rad
UPPER_LIMITS = (0.863, 4.501, -0.888) * NUM_LEGS
STIFFNESS, DAMPING = 35.0, 0.6  # N m / rad and N m s / rad of the motors
MAX_TORQUE = (23.7, 23.7, 35.55) * NUM_LEGS  # N m


class Feet(NamedTuple):
    """The feet's centres, each array ``(num_envs, 4)``, in the trunk's frame and relative to it."""

    position: tuple[Array, Array, Array]  # m, along x, y, z
    velocity: tuple[Array, Array, Array]  # m/s, of the joints' motion alone


def feet(xp: Namespace, joint_positions: Array, joint_velocities: Array) -> Feet:
    """Return where the feet are and how they move, for joint angles and rates ``(num_envs, 12)``.

    A leg lies in a plane that the hip joint turns about the trunk's x axis; in the plane thigh and calf hang from each
    other.
    """
    roll, thigh, calf = (joint_positions[:, index::3] for index in range(3))
    roll_rate, thigh_rate, calf_rate = (joint_velocities[:, index::3] for index in range(3))
    hip_x, hip_y, thigh_y = (constant(xp, values, roll) for values in (HIP_X, HIP_Y, THIGH_Y))
    angles = xp.concat((roll, thigh, thigh + calf), axis=1)  # in one piece, since a call costs as much as its numbers
    sines, cosines = xp.sin(angles), xp.cos(angles)
    sine, cosine = sines[:, :NUM_LEGS], cosines[:, :NUM_LEGS]
    # In the plane of the leg, from the thigh joint: forward, and downward as a negative number.
    forward_of, down_of = -LINK_LENGTH * sines[:, NUM_LEGS:], -LINK_LENGTH * cosines[:, NUM_LEGS:]
    forward = forward_of[:, :NUM_LEGS] + forward_of[:, NUM_LEGS:]
    down = down_of[:, :NUM_LEGS] + down_of[:, NUM_LEGS:]
    shin_rate = thigh_rate + calf_rate
    forward_rate = down_of[:, :NUM_LEGS] * thigh_rate + down_of[:, NUM_LEGS:] * shin_rate
    down_rate = -forward_of[:, :NUM_LEGS] * thigh_rate - forward_of[:, NUM_LEGS:] * shin_rate
    aside, below = thigh_y * cosine - down * sine, thigh_y * sine + down * cosine
    return Feet(
        position=(hip_x + forward, hip_y + aside, below),
        velocity=(forward_rate, -below * roll_rate - down_rate * sine, aside * roll_rate + down_rate * cosine),
    )


class Trunk(NamedTuple):
    """What the trunk does, in its own frame."""

    up: Array  # (num_envs, 3) unit vector that points up
    velocity: Array  # (num_envs, 3) m/s
    angular_velocity: Array  # (num_envs, 3) rad/s
    height: Array  # (num_envs,) m


def trunk(xp: Namespace, qpos: Array, qvel: Array) -> Trunk:
    """Return what the trunk does, from positions ``(num_envs, 19)`` and velocities ``(num_envs, 18)``.

    MuJoCo gives a free body's velocity in the world's axes and its angular velocity in the body's own.
    """
    w, x, y, z = (qpos[:, index] for index in range(3, 7))
    along_x, along_y, along_z = (qvel[:, index] for index in range(3))
    up = xp.stack((2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)), axis=1)
    velocity = (
        (1 - 2 * (y * y + z * z)) * along_x + 2 * (x * y + w * z) * along_y + up[:, 0] * along_z,
        2 * (x * y - w * z) * along_x + (1 - 2 * (x * x + z * z)) * along_y + up[:, 1] * along_z,
        2 * (x * z + w * y) * along_x + 2 * (y * z - w * x) * along_y + up[:, 2] * along_z,
    )
    return Trunk(up, xp.stack(velocity, axis=1), qvel[:, 3:6], qpos[:, 2])


class FootMotion(NamedTuple):
    """The feet over flat ground at height 0."""

    height: Array  # (num_envs, 4) m, the sole above the floor
    speed: Array  # (num_envs, 4) m/s, along the floor


def over_ground(xp: Namespace, body: Trunk, legs: Feet) -> FootMotion:
    """Return height and speed of the feet over a flat floor."""
    x, y, z = legs.position
    roll_rate, pitch_rate, yaw_rate = (body.angular_velocity[:, index, None] for index in range(3))
    up_x, up_y, up_z = (body.up[:, index, None] for index in range(3))
    height = body.height[:, None] + up_x * x + up_y * y + up_z * z - FOOT_RADIUS
    # The trunk's velocity, what its rotation adds at the foot, and what the joints add.
    along_x = body.velocity[:, 0, None] + pitch_rate * z - yaw_rate * y + legs.velocity[0]
    along_y = body.velocity[:, 1, None] + yaw_rate * x - roll_rate * z + legs.velocity[1]
    along_z = body.velocity[:, 2, None] + roll_rate * y - pitch_rate * x + legs.velocity[2]
    upwards = up_x * along_x + up_y * along_y + up_z * along_z
    squared = along_x**2 + along_y**2 + along_z**2 - upwards**2
    return FootMotion(height, xp.sqrt(xp.clip(squared, 0.0, None)))
