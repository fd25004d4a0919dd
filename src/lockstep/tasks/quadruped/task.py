"""What the quadruped's velocity tasks share: commands, pushes, observations and reward. See the tasks' READMEs."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.core.constants import constant
from lockstep.core.types import ActionSpace, Array, InitialState, Namespace, Observations, State, Task
from lockstep.tasks.quadruped import body
from lockstep.tasks.quadruped.config import TRUNK_MASS, QuadrupedVelocityConfig

TIMESTEP = 0.005  # s, as in model.xml
CONTACT_HEIGHT = 0.005  # m, below which a sole counts as on the floor
AIR_TIME_THRESHOLD, AIR_TIME_CAP = 0.1, 0.3  # s
MAX_ACTION = 20.0  # beyond any target that a motor could tell from another
LIMIT_MARGIN = 0.1  # rad before a joint's stop
SLOW = 0.1  # m/s and rad/s: a command below is one to stand

# Columns of the noise of a step, and of a reset.
NUM_SENSED = 6 + 2 * body.NUM_JOINTS
COMMAND_NOISE = slice(NUM_SENSED, NUM_SENSED + 5)
PUSH_NOISE = slice(NUM_SENSED + 5, NUM_SENSED + 8)
NUM_STEP_NOISE = NUM_SENSED + 8
NUM_RESET_NOISE = 1 + body.NUM_JOINTS + 6 + 5 + 1


class QuadrupedVelocity(Task):
    """A four-legged robot that is told how fast to go forwards and sideways and how fast to turn.

    ``qpos``, ``qvel`` and ``ctrl`` are described in ``model.xml``. Variables: ``command (num_envs, 3)`` in m/s, m/s and
    rad/s; ``until_command`` and ``until_push (num_envs,)`` in env steps; ``action`` and ``previous_action
    (num_envs, 12)``; in the trunk's frame the direction ``up`` and its ``velocity`` in m/s, ``(num_envs, 3)``; and of
    each foot, ``(num_envs, 4)``: ``sole_height`` in m and ``sole_speed`` in m/s over the ground, ``air_time``, for how
    long it has been in the air, and ``landed``, the same of feet that came down in this step, else 0, both in s. What
    follows from ``qpos`` and ``qvel`` is kept since several functions want it, and to work it out is the most that a
    step of the task costs.
    """

    action_space = ActionSpace("continuous", body.NUM_JOINTS, limit=MAX_ACTION)
    num_observations: Mapping[str, int] = {"actor": 45, "critic": 57}
    reward_terms: tuple[str, ...] = (
        "track_velocity",
        "track_yaw_rate",
        "upright",
        "air_time",
        "vertical_velocity",
        "roll_pitch_rate",
        "trunk_height",
        "torque",
        "action_rate",
        "foot_slip",
        "posture",
        "joint_limits",
        "fall",
    )
    metric_terms: tuple[str, ...] = ("velocity_error", "yaw_rate_error", "falls_per_s")
    num_reset_noise = NUM_RESET_NOISE
    num_step_noise = NUM_STEP_NOISE
    num_model_noise = 7
    model_path: Path | None = Path(__file__).with_name("model.xml")

    def __init__(self, config: QuadrupedVelocityConfig) -> None:
        self.config = config
        self.step_duration_s = TIMESTEP * config.decimation
        self.num_models = config.randomization.num_models
        weights = config.reward_weights
        landing = body.NUM_LEGS * (AIR_TIME_CAP - AIR_TIME_THRESHOLD) * weights.air_time
        steady = weights.track_velocity + weights.track_yaw_rate + weights.upright
        self.max_step_reward = steady * self.step_duration_s + landing

    # --- the world -----------------------------------------------------------------------------------------------

    def vary_model(self, model: Any, noise: Array) -> None:
        """Draw friction, payload and the motors' gains."""
        ranges = self.config.randomization
        feet = [model.geom(f"{leg}_foot").id for leg in ("FR", "FL", "RR", "RL")]
        model.geom_friction[feet, 0] = _within(ranges.friction, noise[0])
        trunk = model.body("trunk").id
        mass = TRUNK_MASS + _within(ranges.payload_kg, noise[1])
        model.body_inertia[trunk] *= mass / TRUNK_MASS
        model.body_mass[trunk] = mass
        model.body_ipos[trunk] += _within(ranges.payload_offset_m, noise[2:5])
        model.actuator_gainprm[:, 0] *= (stiffness := _within(ranges.stiffness, noise[5]))
        model.actuator_biasprm[:, 1] *= stiffness
        model.actuator_biasprm[:, 2] *= _within(ranges.damping, noise[6])

    def reset(self, xp: Namespace, noise: Array) -> InitialState:
        """Stand somewhere near the posture of rest, facing anywhere, moving a little, with a fresh command."""
        offset = 2 * noise - 1
        half_yaw = math.pi * offset[:, 0]
        joints = constant(xp, body.REST, noise) + 0.15 * offset[:, 1:13]
        zero = xp.zeros_like(half_yaw)
        height = xp.full_like(half_yaw, body.REST_HEIGHT + 0.02)
        root = xp.stack((zero, zero, height, xp.cos(half_yaw), zero, zero, xp.sin(half_yaw)), axis=1)
        qpos = xp.concat((root, joints), axis=1)
        qvel = xp.concat((0.3 * offset[:, 13:19], xp.zeros_like(joints)), axis=1)
        command, until_command = self._draw_command(xp, noise[:, 19:24])
        moving = _motion(xp, qpos, qvel)
        no_action, no_foot = xp.zeros_like(joints), xp.zeros_like(moving["sole_height"])
        variables = moving | {
            "command": command,
            "until_command": until_command,
            "until_push": self._draw_interval(xp, self.config.push_interval_s, noise[:, 24]),
            "action": no_action,
            "previous_action": no_action,
            "air_time": no_foot,
            "landed": no_foot,
        }
        return InitialState(qpos, qvel, variables)

    def control(self, xp: Namespace, state: State, action: Array) -> Array:
        """Return target angles of the joints: rest, and what the action adds."""
        rest = constant(xp, body.REST, state.qpos)
        return rest + self.config.action_scale_rad * xp.clip(action, -MAX_ACTION, MAX_ACTION)

    def push(self, xp: Namespace, state: State, noise: Array) -> Array | None:
        """Push the trunk sideways and along, now and then."""
        if not self.config.push_velocity_m_s:
            return None
        columns = (2 * noise[:, PUSH_NOISE][:, :2] - 1) * self.config.push_velocity_m_s
        kick = xp.where((state.variables["until_push"] <= 0)[:, None], columns, xp.zeros_like(columns))
        return xp.concat((kick, xp.zeros_like(state.qvel[:, 2:])), axis=1)

    def advance(self, xp: Namespace, state: State, action: Array, noise: Array) -> State:
        """Count down to the next command and push, and keep the feet's time in the air."""
        before = state.variables
        command, until_command = self._draw_command(xp, noise[:, COMMAND_NOISE])
        is_due = before["until_command"] <= 0
        until_push = self._draw_interval(xp, self.config.push_interval_s, noise[:, PUSH_NOISE][:, 2])
        moving = _motion(xp, state.qpos, state.qvel)
        in_air = moving["sole_height"] > CONTACT_HEIGHT
        air_time = before["air_time"] + self.step_duration_s
        nothing = xp.zeros_like(air_time)
        # A foot that was on the floor before has been in the air for no longer than this step.
        was_in_air = before["air_time"] > 0
        variables = moving | {
            "command": xp.where(is_due[:, None], command, before["command"]),
            "until_command": xp.where(is_due, until_command, before["until_command"] - 1),
            "until_push": xp.where(before["until_push"] <= 0, until_push, before["until_push"] - 1),
            "action": xp.clip(action, -MAX_ACTION, MAX_ACTION),
            "previous_action": before["action"],
            "air_time": xp.where(in_air, air_time, nothing),
            "landed": xp.where(was_in_air & ~in_air, before["air_time"], nothing),
        }
        return state._replace(variables=variables)

    def terminations(self, xp: Namespace, state: State) -> Array:
        """The robot has fallen: its trunk tilts too far or is too low."""
        up = 1 - 2 * (state.qpos[:, 4] ** 2 + state.qpos[:, 5] ** 2)
        tilted = up < math.cos(math.radians(self.config.max_tilt_deg))
        return tilted | (state.qpos[:, 2] < self.config.min_trunk_height_m)

    # --- what is seen and what counts ----------------------------------------------------------------------------

    def observations(self, xp: Namespace, state: State, noise: Array) -> Observations:
        """Return ``actor``: what the robot's own sensors tell, with noise; ``critic``: the same exactly, and more."""
        trunk = _trunk(state)
        joints = state.qpos[:, 7:] - constant(xp, body.REST, state.qpos)
        sensed = xp.concat((trunk.angular_velocity, -trunk.up, joints, state.qvel[:, 6:]), axis=1)
        told = xp.concat((state.variables["command"], state.variables["action"]), axis=1)
        actor = xp.concat((sensed + (2 * noise[:, :NUM_SENSED] - 1) * self._noise_scale(xp, noise), told), axis=1)
        feet = (state.variables["sole_height"], state.variables["air_time"])
        more = (trunk.velocity, trunk.height[:, None], *feet)
        return {"actor": actor, "critic": xp.concat((sensed, told, *more), axis=1)}

    def rewards(self, xp: Namespace, state: State, action: Array) -> dict[str, Array]:
        """Return the terms, each times its weight and the step's duration; at most four are positive."""
        config, variables = self.config, state.variables
        trunk = _trunk(state)
        command, joints, rates = variables["command"], state.qpos[:, 7:], state.qvel[:, 6:]
        off_rest = joints - constant(xp, body.REST, joints)
        velocity_error, yaw_rate_error = _errors(xp, command, trunk)
        is_moving = xp.astype(_is_moving(xp, command), joints.dtype)
        torque = body.STIFFNESS * (state.ctrl - joints) - body.DAMPING * rates
        torque_limit = constant(xp, body.MAX_TORQUE, joints)
        lower = constant(xp, body.LOWER_LIMITS, joints) + LIMIT_MARGIN - joints
        upper = joints - constant(xp, body.UPPER_LIMITS, joints) + LIMIT_MARGIN
        on_floor = xp.astype(variables["sole_height"] <= CONTACT_HEIGHT, joints.dtype)
        landed = variables["landed"]
        long_enough = xp.clip(landed, None, AIR_TIME_CAP) - AIR_TIME_THRESHOLD
        values = {
            "track_velocity": xp.exp(-((velocity_error / config.velocity_scale_m_s) ** 2)),
            "track_yaw_rate": xp.exp(-((yaw_rate_error / config.yaw_rate_scale_rad_s) ** 2)),
            "upright": xp.exp(-xp.sum(trunk.up[:, :2] ** 2, axis=1) / 0.04),
            "vertical_velocity": -(trunk.velocity[:, 2] ** 2),
            "roll_pitch_rate": -xp.sum(trunk.angular_velocity[:, :2] ** 2, axis=1),
            "trunk_height": -((trunk.height - body.REST_HEIGHT) ** 2),
            "torque": -xp.sum(xp.clip(torque, -torque_limit, torque_limit) ** 2, axis=1),
            "action_rate": -xp.sum((variables["action"] - variables["previous_action"]) ** 2, axis=1),
            "foot_slip": -xp.sum(on_floor * variables["sole_speed"] ** 2, axis=1),
            # Standing still is a posture; walking needs more room.
            "posture": -xp.sum(off_rest**2, axis=1) * (5.0 - 4.0 * is_moving),
            "joint_limits": -xp.sum(xp.clip(lower, 0.0, None) + xp.clip(upper, 0.0, None), axis=1),
        }
        scaled = {name: getattr(config.reward_weights, name) * self.step_duration_s * values[name] for name in values}
        is_landing = xp.astype(landed > 0, joints.dtype)
        scaled["air_time"] = config.reward_weights.air_time * xp.sum(long_enough * is_landing, axis=1) * is_moving
        scaled["fall"] = -config.reward_weights.fall * xp.astype(self.terminations(xp, state), joints.dtype)
        return {name: scaled[name] for name in self.reward_terms}

    def metrics(self, xp: Namespace, state: State, action: Array) -> dict[str, Array]:
        """Return how far the velocity (m/s) and the yaw rate (rad/s) are off, and falls per second."""
        velocity_error, yaw_rate_error = _errors(xp, state.variables["command"], _trunk(state))
        fallen = xp.astype(self.terminations(xp, state), state.qpos.dtype)
        return {
            "velocity_error": velocity_error,
            "yaw_rate_error": xp.abs(yaw_rate_error),
            "falls_per_s": fallen / self.step_duration_s,
        }

    # --- draws ---------------------------------------------------------------------------------------------------

    def _draw_command(self, xp: Namespace, noise: Array) -> tuple[Array, Array]:
        """Return a command ``(num_envs, 3)`` and for how many steps it holds, of ``(num_envs, 5)`` noise."""
        config = self.config
        ranges = (config.command_forward_m_s, config.command_sideways_m_s, config.command_yaw_rate_rad_s)
        drawn = [_within(each, noise[:, index]) for index, each in enumerate(ranges)]
        command = xp.stack(drawn, axis=1)
        stands = noise[:, 3] < config.standing_share
        command = xp.where(stands[:, None], xp.zeros_like(command), command)
        return command, self._draw_interval(xp, config.command_interval_s, noise[:, 4])

    def _draw_interval(self, xp: Namespace, range_s: tuple[float, float], noise: Array) -> Array:
        """Return a whole number of env steps ``(num_envs,)``."""
        return xp.round(_within(range_s, noise) / self.step_duration_s)

    def _noise_scale(self, xp: Namespace, like: Array) -> Array:
        noise = self.config.observation_noise
        scales = (noise.angular_velocity_rad_s,) * 3 + (noise.gravity,) * 3
        joints = (noise.joint_position_rad,) * body.NUM_JOINTS + (noise.joint_velocity_rad_s,) * body.NUM_JOINTS
        return constant(xp, scales + joints, like)


def _within(bounds: tuple[float, float], noise: Array) -> Array:
    return bounds[0] + (bounds[1] - bounds[0]) * noise


def _motion(xp: Namespace, qpos: Array, qvel: Array) -> dict[str, Array]:
    """Return the variables that follow from positions and velocities."""
    trunk = body.trunk(xp, qpos, qvel)
    feet = body.over_ground(xp, trunk, body.feet(xp, qpos[:, 7:], qvel[:, 6:]))
    return {"up": trunk.up, "velocity": trunk.velocity, "sole_height": feet.height, "sole_speed": feet.speed}


def _trunk(state: State) -> body.Trunk:
    kept = state.variables
    return body.Trunk(kept["up"], kept["velocity"], state.qvel[:, 3:6], state.qpos[:, 2])


def _errors(xp: Namespace, command: Array, trunk: body.Trunk) -> tuple[Array, Array]:
    """Return how far off velocity (m/s, not negative) and yaw rate (rad/s, signed) are, each ``(num_envs,)``."""
    off = command[:, :2] - trunk.velocity[:, :2]
    return xp.sqrt(xp.sum(off**2, axis=1)), command[:, 2] - trunk.angular_velocity[:, 2]


def _is_moving(xp: Namespace, command: Array) -> Array:
    return xp.sqrt(xp.sum(command**2, axis=1)) > SLOW
