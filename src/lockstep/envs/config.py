"""Settings every env has; a task adds its own in a subclass beside its code."""

from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

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

    takes_physics_threads: ClassVar[bool] = True
    """Whether ``num_physics_threads`` may be given."""

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


class GuestConfig(EnvConfig):
    """An env of somebody else's, made by its own library: how long an episode is, and what the library is told."""

    takes_physics_threads: ClassVar[bool] = False
    why_no_threads: ClassVar[str] = "the library knows nothing of it"

    randomize_initial_episode_length: bool = Field(
        False, description="let the first episodes end at different times, so that resets do not come in waves"
    )
    kwargs: dict[str, Any] = Field({}, description="keyword arguments of the library's own maker of the env")

    @model_validator(mode="after")
    def _has_physics_of_its_own(self) -> "GuestConfig":
        if self.decimation != 1:
            raise ValueError(f"decimation {self.decimation} is not to be had: the env has physics of its own")
        if self.mjx != MjxConfig():
            raise ValueError("mjx is not to be had: the env has physics of its own; leave its settings out")
        if self.num_physics_threads and not self.takes_physics_threads:
            raise ValueError(
                f"num_physics_threads {self.num_physics_threads} is not to be had: {self.why_no_threads}; leave it out"
            )
        return self


class ThreadedGuestConfig(GuestConfig):
    """The same, of a library that steps its envs in threads of its own."""

    takes_physics_threads: ClassVar[bool] = True

    num_physics_threads: int = Field(
        0, ge=0, le=1024, description="threads that step envs; 0: the cores this process may use"
    )


class GymnasiumConfig(GuestConfig):
    """An env that Gymnasium makes."""

    why_no_threads: ClassVar[str] = "envs are stepped one after the other, or with vectorization async by processes"

    vectorization: Literal["sync", "async"] = Field(
        "sync", description="how envs are stepped: sync, one after the other; async, each in a process of its own"
    )


class JaxGuestConfig(GuestConfig):
    """An env that a library of JAX makes."""

    max_episode_steps: int = Field(
        0,
        ge=0,
        lt=2**31,
        description="time limit in env steps; running into it is a truncation; 0: what its library gives it",
    )


class PlaygroundConfig(JaxGuestConfig):
    """An env that MuJoCo Playground makes; ``kwargs`` overrides entries of its own config, as ``{"sim_dt": 0.005}``."""

    action_repeat: int = Field(
        0, ge=0, le=1000, description="the library's steps per env step, all with one action; 0: what it says itself"
    )


class BraxConfig(JaxGuestConfig):
    """An env that Brax makes."""

    action_repeat: int = Field(1, ge=1, le=1000, description="Brax's steps per env step, all with one action")
    backend: Literal["auto", "generalized", "spring", "positional", "mjx"] = Field(
        "auto", description="which of Brax's engines steps it; auto: what the env takes by itself"
    )
