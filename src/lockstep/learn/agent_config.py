"""Settings of the learners, ours and other people's: what ``agent`` is, by algorithm."""

import math
from collections.abc import Sequence
from typing import Annotated, Literal, TypeVar

from pydantic import Field, model_validator

from lockstep.core.config import Config
from lockstep.core.errors import UsageError

Width = Annotated[int, Field(ge=1, le=2**16)]
Count = Annotated[int, Field(ge=1, lt=2**31)]


class AgentConfig(Config):
    """What every learner of ours has; ``algorithm`` says which of the classes below ``agent`` is."""

    num_steps_per_env: Count = Field(24, description="env steps per env and iteration")
    learning_rate: float = Field(1e-3, gt=0, le=1e9, description="of Adam")
    gamma: float = Field(0.99, ge=0, le=1, description="discount factor")
    max_grad_norm: float = Field(1.0, gt=0, le=1e9, description="gradient norm above which gradients are scaled down")
    normalize_observations: bool = Field(True, description="by running mean and standard deviation")
    actor_hidden_dims: tuple[Width, ...] = Field((64, 64), description="widths of the actor's hidden layers")
    critic_hidden_dims: tuple[Width, ...] = Field((64, 64), description="widths of the critic's hidden layers")
    activation: Literal["elu", "relu", "tanh", "silu"] = "elu"

    def env_block(self, total_envs: int | None = None) -> int:
        """Return how many consecutive envs must live on one rank together; the shares of ranks are multiples of it.

        Args:
            total_envs: of the whole job; None for what holds with any number.
        """
        return 1

    def block_setting(self) -> str:
        """Return the setting that decides on ``env_block``, and its value, as messages name it."""
        return ""

    def check_envs(self, shares: Sequence[int]) -> None:
        """Raise UsageError if the learner can't deal with so many envs on each rank."""

    def iterations_before_learning(self, total_envs: int) -> int:
        """Return how many iterations come before the first that learns, with so many envs in the whole job."""
        return 0


class PpoConfig(AgentConfig):
    """Proximal policy optimisation (Schulman et al. 2017, arXiv:1707.06347); names as the field uses them."""

    num_learning_epochs: Count = Field(5, description="passes over the rollout per iteration")
    num_mini_batches: Count = Field(4, description="minibatches per epoch; num_envs must be divisible by it")
    learning_rate: float = Field(1e-3, gt=0, le=1e9, description="of Adam; where it starts if the schedule is adaptive")
    schedule: Literal["adaptive", "fixed"] = Field("adaptive", description="adaptive: steered by desired_kl")
    desired_kl: float = Field(0.01, gt=0, le=1e9, description="KL divergence that the adaptive schedule aims at")
    min_learning_rate: float = Field(1e-5, gt=0, le=1e9, description="lower bound of the adaptive schedule")
    max_learning_rate: float = Field(1e-2, gt=0, le=1e9, description="upper bound of the adaptive schedule")
    lam: float = Field(0.95, ge=0, le=1, description="lambda of generalised advantage estimation")
    clip_param: float = Field(0.2, gt=0, le=1e9, description="clip range of the probability ratio and of the value")
    use_clipped_value_loss: bool = Field(
        False, description="clip the value loss as the surrogate is clipped; holds a critic of large returns back"
    )
    value_loss_coef: float = Field(1.0, ge=0, le=1e9, description="weight of the value loss")
    entropy_coef: float = Field(0.0, ge=0, le=1e9, description="weight of the entropy bonus")
    normalize_advantages: bool = Field(True, description="by mean and standard deviation over the whole rollout")
    init_std: float = Field(1.0, ge=1e-6, le=1e6, description="standard deviation of a new Gaussian policy")
    recurrent: Literal["none", "gru", "lstm"] = Field("none", description="memory before the hidden layers")
    recurrent_hidden_dim: Width = Field(64, description="width of the memory")
    chunk_size: Count = Field(
        8192, description="samples per forward and backward pass; gradients add up over a minibatch's chunks"
    )

    @model_validator(mode="after")
    def _learning_rate_bounds_are_in_order(self) -> "PpoConfig":
        if self.min_learning_rate > self.max_learning_rate:
            raise ValueError(
                f"min_learning_rate {self.min_learning_rate} is above max_learning_rate {self.max_learning_rate}"
            )
        return self

    def env_block(self, total_envs: int | None = None) -> int:
        """Return ``num_mini_batches``: a block of envs sends one sample of each time step to each minibatch."""
        return self.num_mini_batches

    def block_setting(self) -> str:
        """Return the number of minibatches."""
        return f"agent.num_mini_batches {self.num_mini_batches}"


class RpoConfig(PpoConfig):
    """Robust policy optimisation (Rahman and Xue 2022, arXiv:2212.07536): PPO whose means are shifted by noise."""

    schedule: Literal["adaptive", "fixed"] = Field(
        "fixed", description="adaptive: steered by desired_kl, which the noise of the means alone exceeds"
    )


class ReplayConfig(AgentConfig):
    """What every learner with a replay of past steps has; numbers are of all ranks together."""

    num_steps_per_env: Count = Field(8, description="env steps per env and iteration")
    num_updates: Count = Field(8, description="gradient steps per iteration, however many ranks there are")
    batch_size: Count = Field(
        256, description="samples per gradient step, over all ranks; a multiple or a divisor of the number of all envs"
    )
    replay_size: Count = Field(1_000_000, description="env steps that the replay holds at most, over all ranks")
    learning_starts: int = Field(
        5_000, ge=0, lt=2**62, description="env steps of all envs with random actions before the first gradient step"
    )
    learning_rate: float = Field(3e-4, gt=0, le=1e9, description="of Adam, for actor and critics")
    polyak: float = Field(0.005, gt=0, le=1, description="share by which target critics approach the critics each step")
    max_grad_norm: float = Field(10.0, gt=0, le=1e9, description="gradient norm above which gradients are scaled down")
    actor_hidden_dims: tuple[Width, ...] = Field((256, 256), description="widths of the actor's hidden layers")
    critic_hidden_dims: tuple[Width, ...] = Field((256, 256), description="widths of each critic's hidden layers")
    activation: Literal["elu", "relu", "tanh", "silu"] = "relu"

    def env_block(self, total_envs: int | None = None) -> int:
        """Return how many envs give one sample of a batch together; 1 where each gives one or more."""
        return total_envs // self.batch_size if total_envs and total_envs % self.batch_size == 0 else 1

    def block_setting(self) -> str:
        """Return the size of a batch."""
        return f"agent.batch_size {self.batch_size}"

    def iterations_before_learning(self, total_envs: int) -> int:
        """Return how many iterations take random actions alone, until ``learning_starts``."""
        return -(-self.learning_starts // (total_envs * self.num_steps_per_env))

    def capacity_per_env(self, total_envs: int) -> int:
        """Return how many steps of each env the replay holds: a multiple of ``num_steps_per_env``."""
        return self.replay_size // total_envs // self.num_steps_per_env * self.num_steps_per_env

    def check_envs(self, shares: Sequence[int]) -> None:
        """Check that a batch can be dealt to the envs evenly, and that the replay holds an iteration at least.

        Raises:
            UsageError: it can't; with the nearest numbers that work.
        """
        total, batch = sum(shares), self.batch_size
        if batch % total and total % batch:
            raise UsageError(
                f"agent.batch_size {batch} is neither a multiple nor a divisor of the {total} envs of all ranks; use "
                f"--agent.batch_size {_nearest_batches(batch, total)}"
            )
        block = self.env_block(total)
        for share in shares:
            if share % block:
                raise UsageError(
                    f"num_envs {share} of a rank is not divisible by {block}, as {block} of {total} envs give one "
                    f"sample of agent.batch_size {batch}; use --num_envs {nearest_multiples(share, block)}"
                )
        if not self.capacity_per_env(total):
            raise UsageError(
                f"agent.replay_size {self.replay_size} does not hold one iteration of {total} envs x "
                f"agent.num_steps_per_env {self.num_steps_per_env}; use {total * self.num_steps_per_env} or more"
            )


class SacConfig(ReplayConfig):
    """Soft actor-critic (Haarnoja et al. 2018, arXiv:1812.05905); numbers are of all ranks together."""

    temperature_learning_rate: float = Field(3e-4, gt=0, le=1e9, description="of Adam, for the logarithm of it")
    init_temperature: float = Field(1.0, ge=1e-6, le=1e6, description="weight of the entropy at the start")
    tune_temperature: bool = Field(True, description="steer the temperature so that the entropy meets target_entropy")
    target_entropy: float | None = Field(
        None, ge=-1e9, le=1e9, description="in nats; none: minus the number of the action's entries"
    )


class DistillationConfig(AgentConfig):
    """Teacher-student distillation of rsl_rl: a student imitates the actions of a trained policy that sees more."""

    num_learning_epochs: Count = Field(1, description="passes over the rollout per iteration")
    teacher: str = Field("", description="checkpoint or run of rl_library rsl_rl whose policy is the teacher")
    gradient_length: Count = Field(8, description="env steps between gradient steps, through which a memory learns")
    loss_type: Literal["mse", "huber"] = Field("mse", description="of the difference between the two's actions")
    recurrent: Literal["none", "gru", "lstm"] = Field("none", description="the student's memory")
    recurrent_hidden_dim: Width = Field(64, description="width of the memory")


AGENTS: dict[str, type[AgentConfig]] = {
    "ppo": PpoConfig,
    "sac": SacConfig,
    "distillation": DistillationConfig,
    "rpo": RpoConfig,
    **dict.fromkeys(("td3", "ddpg", "dqn", "ddqn"), ReplayConfig),
    **dict.fromkeys(("a2c", "trpo", "cem"), AgentConfig),
}
"""The kind of ``agent`` that belongs to each algorithm."""
AgentT = TypeVar("AgentT", bound=AgentConfig)


def nearest_multiples(number: int, block: int) -> str:
    """Return the multiples of a block below and above a number, in words."""
    lower = number // block * block
    return f"{lower} or {lower + block}" if lower else f"{block}"


def _nearest_batches(batch_size: int, total_envs: int) -> str:
    """Return the sizes below and above that are a multiple or a divisor of the number of envs."""
    if batch_size > total_envs:
        return nearest_multiples(batch_size, total_envs)
    small = [size for size in range(1, math.isqrt(total_envs) + 1) if total_envs % size == 0]
    divisors = [*small, *(total_envs // size for size in small)]
    lower = max(size for size in divisors if size < batch_size)
    return f"{lower} or {min(size for size in divisors if size > batch_size)}"
