"""Settings every env has; a task adds its own in a subclass beside its code."""

from typing import Literal

from pydantic import Field

from lockstep.core.config import Config


class MjxConfig(Config):
    """The engine mjx (JAX)."""

    implementation: Literal["auto", "jax", "warp"] = Field(
        "auto",
        description="what computes: MJX's own code in JAX, or MuJoCo Warp's kernels; auto: warp on NVIDIA GPUs if it "
        "is installed and can step the model, else jax",
    )
    num_contacts: int = Field(
        0,
        ge=0,
        lt=2**31,
        description="warp: room for contacts per env, shared by the envs of a device; 0: Warp's guess",
    )
    num_constraints: int = Field(0, ge=0, lt=2**31, description="warp: room for constraints in an env; 0: Warp's guess")


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
    mjx: MjxConfig = MjxConfig()
