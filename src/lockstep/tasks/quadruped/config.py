"""Settings of the tasks in which a quadruped follows a velocity command."""

from typing import Annotated

from pydantic import Field, model_validator

from lockstep.core.config import Config
from lockstep.envs.config import EnvConfig

TRUNK_MASS = 5.204  # kg, as in model.xml

Weight = Annotated[float, Field(ge=0, le=1e6)]
Level = Annotated[float, Field(ge=0, le=1e3)]
Scale = Annotated[float, Field(gt=0, le=1e3)]
Metres = Annotated[float, Field(ge=-1, le=1)]
Factor = Annotated[float, Field(ge=0, le=100)]
Kilograms = Annotated[float, Field(ge=-100, le=100)]
Speed = Annotated[float, Field(ge=-100, le=100)]  # m/s or rad/s
Seconds = Annotated[float, Field(gt=0, le=1e6)]
Friction = Annotated[float, Field(gt=0, le=100)]


class QuadrupedRewardWeights(Config):
    """Weights of the reward terms, per second; each step's reward is worth its duration. See the task's README."""

    track_velocity: Weight = Field(3.0, description="the velocity over ground is as commanded")
    track_yaw_rate: Weight = Field(1.0, description="the yaw rate is as commanded")
    upright: Weight = Field(1.0, description="the trunk is level")
    air_time: Weight = Field(0.4, description="feet stay in the air for a while before they land")
    vertical_velocity: Weight = Field(1.0, description="against the trunk's velocity up and down")
    roll_pitch_rate: Weight = Field(0.05, description="against the trunk's rolling and pitching")
    trunk_height: Weight = Field(20.0, description="against a trunk that is too high or too low")
    torque: Weight = Field(2e-4, description="against torque of the motors")
    action_rate: Weight = Field(0.03, description="against actions that jump")
    foot_slip: Weight = Field(0.2, description="against feet that slide over the floor")
    posture: Weight = Field(0.2, description="against joints far from where they rest")
    joint_limits: Weight = Field(5.0, description="against joints close to their stops")
    fall: Weight = Field(2.0, description="against falling; once, not per second")


class RandomizationConfig(Config):
    """A pool of variants of the robot, dealt to the envs by turns; each value is drawn evenly from its range."""

    num_models: int = Field(64, ge=1, le=4096, description="variants; 1: every env has the robot as its file says")
    friction: tuple[Friction, Friction] = Field((0.4, 1.2), description="of the feet on the floor")
    payload_kg: tuple[Kilograms, Kilograms] = Field(
        (-1.0, 2.0), description="added to the trunk's mass, with the inertia to go with it"
    )
    payload_offset_m: tuple[Metres, Metres] = Field(
        (-0.03, 0.03), description="shift of the trunk's centre of mass along each axis"
    )
    stiffness: tuple[Factor, Factor] = Field((0.8, 1.2), description="factor of the motors' position gain")
    damping: tuple[Factor, Factor] = Field((0.8, 1.2), description="factor of the motors' velocity gain")


class ObservationNoiseConfig(Config):
    """Uniform noise +- this on the actor's observations, drawn anew in each step."""

    angular_velocity_rad_s: Level = Field(0.2, description="of the gyroscope")
    gravity: Level = Field(0.05, description="of each entry of the unit vector that points down")
    joint_position_rad: Level = Field(0.01, description="of the joint encoders")
    joint_velocity_rad_s: Level = Field(1.5, description="of the joint encoders' rates")


class QuadrupedVelocityConfig(EnvConfig):
    """What the quadruped's tasks share."""

    max_episode_steps: int = Field(1000, ge=1, lt=2**31, description="time limit in env steps of 0.02 s")
    decimation: int = Field(4, ge=1, lt=2**31, description="physics steps of 0.005 s per env step")
    action_scale_rad: float = Field(
        0.25, gt=0, le=10, description="how far an action of 1 moves a joint's target from rest"
    )
    command_forward_m_s: tuple[Speed, Speed] = Field((-1.0, 1.0), description="commanded velocity forwards")
    command_sideways_m_s: tuple[Speed, Speed] = Field((-0.5, 0.5), description="commanded velocity to the left")
    command_yaw_rate_rad_s: tuple[Speed, Speed] = Field(
        (-1.0, 1.0), description="commanded yaw rate, positive to the left"
    )
    command_interval_s: tuple[Seconds, Seconds] = Field((4.0, 10.0), description="time until the next command")
    standing_share: float = Field(0.1, ge=0, le=1, description="share of commands to stand still")
    push_interval_s: tuple[Seconds, Seconds] = Field((5.0, 10.0), description="time until the next push")
    push_velocity_m_s: float = Field(
        0.5, ge=0, le=100, description="a push changes each horizontal velocity by up to +- this"
    )
    observation_noise: ObservationNoiseConfig = ObservationNoiseConfig()
    randomization: RandomizationConfig = RandomizationConfig()
    reward_weights: QuadrupedRewardWeights = QuadrupedRewardWeights()
    velocity_scale_m_s: Scale = Field(0.4, description="error at which track_velocity is at 1/e")
    yaw_rate_scale_rad_s: Scale = Field(0.5, description="error at which track_yaw_rate is at 1/e")
    min_trunk_height_m: float = Field(0.14, ge=0, le=10, description="the episode fails when the trunk is lower")
    max_tilt_deg: float = Field(60.0, gt=0, le=180, description="the episode fails when the trunk tilts farther")

    @model_validator(mode="after")
    def _ranges_are_in_order(self) -> "QuadrupedVelocityConfig":
        ranges = {name: getattr(self, name) for name in type(self).model_fields}
        ranges |= {f"randomization.{name}": value for name, value in self.randomization.model_dump().items()}
        for name, value in ranges.items():
            if isinstance(value, tuple) and value[0] > value[1]:
                raise ValueError(f"{name} {list(value)} begins above its end; put the smaller number first")
        if self.randomization.payload_kg[0] <= -TRUNK_MASS:
            raise ValueError(
                f"randomization.payload_kg {list(self.randomization.payload_kg)} must leave some of the trunk's "
                f"{TRUNK_MASS} kg"
            )
        return self
