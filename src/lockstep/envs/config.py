"""Settings every env has; a task adds its own in a subclass beside its code."""

from pydantic import Field

from lockstep.core.config import Config


class EnvConfig(Config):
    """Episode length and what all tasks share."""

    max_episode_steps: int = Field(
        500, ge=1, lt=2**31, description="time limit in env steps; running into it is a truncation"
    )
    decimation: int = Field(1, ge=1, lt=2**31, description="physics steps per env step")
    randomize_initial_episode_length: bool = Field(
        True, description="let the first episodes end at different times, so that resets do not come in waves"
    )
    num_physics_threads: int = Field(
        0, ge=0, le=1024, description="threads of the mujoco engine; 0: the cores this process may use"
    )
