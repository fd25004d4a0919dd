"""Settings of a training: the learner's (``agent``), the evaluation's, and the whole (``TrainConfig``)."""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, SerializeAsAny, field_validator, model_validator

from lockstep.core.config import Config, merge, show
from lockstep.core.errors import UsageError
from lockstep.envs.config import EnvConfig

Width = Annotated[int, Field(ge=1, le=2**16)]
Count = Annotated[int, Field(ge=1, lt=2**31)]
Share = Annotated[int, Field(ge=0, lt=2**31)]  # a rank may have no envs at all


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


class SacConfig(AgentConfig):
    """Soft actor-critic (Haarnoja et al. 2018, arXiv:1812.05905); numbers are of all ranks together."""

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
    temperature_learning_rate: float = Field(3e-4, gt=0, le=1e9, description="of Adam, for the logarithm of it")
    init_temperature: float = Field(1.0, ge=1e-6, le=1e6, description="weight of the entropy at the start")
    tune_temperature: bool = Field(True, description="steer the temperature so that the entropy meets target_entropy")
    target_entropy: float | None = Field(
        None, ge=-1e9, le=1e9, description="in nats; none: minus the number of the action's entries"
    )
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
                    f"sample of agent.batch_size {batch}; use --num_envs {_nearest_multiples(share, block)}"
                )
        if not self.capacity_per_env(total):
            raise UsageError(
                f"agent.replay_size {self.replay_size} does not hold one iteration of {total} envs x "
                f"agent.num_steps_per_env {self.num_steps_per_env}; use {total * self.num_steps_per_env} or more"
            )


AGENTS: dict[str, type[AgentConfig]] = {"ppo": PpoConfig, "sac": SacConfig}
"""The kind of ``agent`` that belongs to each algorithm."""
AgentT = TypeVar("AgentT", bound=AgentConfig)


class EvaluationConfig(Config):
    """Evaluation during training: deterministic policy, its own envs and random streams."""

    interval: int = Field(
        50, ge=0, lt=2**31, description="iterations between evaluations; 0: none, not even at the end"
    )
    num_episodes: Count = Field(64, description="episodes per evaluation, one per env")


class CheckpointConfig(Config):
    """When checkpoints are written, how many are kept, and what happens when the disk refuses."""

    interval: Count = Field(50, description="iterations between checkpoints; there is always one at the end")
    interval_s: float = Field(
        600.0, ge=0, le=1e9, description="seconds without a checkpoint after which there is one all the same; 0: never"
    )
    keep: Count = Field(5, description="how many of the newest are kept")
    on_error: Literal["continue", "stop"] = Field(
        "continue", description="when the disk refuses a file of the run: go on and try again, or stop"
    )


class TrainConfig(Config):
    """Everything that determines a training; what ``config.yaml`` holds."""

    task: str
    ml_framework: Literal["torch", "jax"] = "torch"
    algorithm: str = Field("ppo", description="learning algorithm: ppo, or sac (jax only); it decides on agent.*")
    rl_library: str = Field("lockstep", description="whose learner")
    runner: str = Field("", description="a training loop of your own instead, as my_package.module:Class")
    num_envs: Count | tuple[Share, ...] = Field(
        512, description="envs per device; or one number for each rank, as 320,192"
    )
    max_iterations: Count = Field(300, description="iterations in total, resumed ones included")
    seed: int = Field(1, ge=0, lt=2**63, description="of every random stream")
    device: str = Field("auto", description="auto, cpu, cuda or cuda:<index>")
    num_torch_threads: int = Field(
        0, ge=0, le=1024, description="torch's CPU threads; 0: one if the networks are small, else the cores there are"
    )
    enable_multi_devices: bool = Field(True, description="jax: train on all devices of a process, not on one alone")
    num_devices: int = Field(0, ge=0, lt=2**16, description="jax: devices of each process; 0: all there are")
    enable_jit: bool = Field(True, description="jax: compile; off for debugging, with the same result")
    dtype: Literal["float32", "float64", "bfloat16"] = Field("float32", description="bfloat16: as autocast")
    engine: Literal["auto", "mujoco", "warp", "mjx", "analytic", "genesis"] = Field("auto", description="physics")
    log_root: str = Field("logs", min_length=1, description="folder of all runs")
    run_name: str = Field("", description="appended to the run directory's name")
    logger: Literal["tensorboard", "wandb", "none"] = Field("tensorboard", description="besides metrics.jsonl")
    video: bool = Field(False, description="film the policy at the end: videos/model_<iteration>.mp4 of the run")
    env: SerializeAsAny[EnvConfig] = EnvConfig()
    agent: SerializeAsAny[AgentConfig] = PpoConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoints: CheckpointConfig = CheckpointConfig()
    sentinel_interval: int = Field(
        25, ge=0, lt=2**31, description="iterations between comparisons of what all ranks must have alike; 0: never"
    )

    @model_validator(mode="before")
    @classmethod
    def _agent_is_of_the_algorithm(cls, values: Any) -> Any:
        """Make the agent from its settings, or from nothing, as the algorithm says."""
        if not isinstance(values, Mapping):
            return values
        algorithm, agent = values.get("algorithm", "ppo"), values.get("agent")
        kind = AGENTS.get(str(algorithm), PpoConfig)
        if agent is None or isinstance(agent, Mapping):
            return {**values, "agent": kind.model_validate(agent or {})}
        if isinstance(agent, AgentConfig) and not isinstance(agent, kind):
            raise ValueError(
                f"algorithm {algorithm!r} has an agent of its own, {kind.__name__}, not {type(agent).__name__}; begin "
                "with the recipe of the algorithm"
            )
        return values

    @field_validator("log_root")
    @classmethod
    def _is_a_path(cls, log_root: str) -> str:
        if "\0" in log_root:
            raise ValueError("has a zero byte, which no path may have")
        return log_root

    @field_validator("num_envs")
    @classmethod
    def _has_envs(cls, num_envs: int | tuple[int, ...]) -> int | tuple[int, ...]:
        if isinstance(num_envs, int):
            return num_envs
        if sum(num_envs) == 0:
            raise ValueError("must have at least one env on some rank")
        return num_envs[0] if len(num_envs) == 1 else num_envs

    @model_validator(mode="after")
    def _minibatches_divide_the_envs(self) -> "TrainConfig":
        block = self.agent.env_block()
        shares = (self.num_envs,) if isinstance(self.num_envs, int) else self.num_envs
        for share in shares:
            if share % block:
                raise ValueError(
                    f"num_envs {share} is not divisible by {self.agent.block_setting()}; "
                    f"use --num_envs {_nearest_multiples(share, block)}"
                )
        return self

    @model_validator(mode="after")
    def _one_device_is_not_several(self) -> "TrainConfig":
        if not self.enable_multi_devices and self.num_devices > 1:
            raise ValueError(
                f"num_devices {self.num_devices} and enable_multi_devices false contradict each other; leave one out"
            )
        return self

    def agent_as(self, kind: type[AgentT]) -> AgentT:
        """Return ``agent`` as what it is; ``kind`` is the one that belongs to the algorithm."""
        if not isinstance(self.agent, kind):
            raise TypeError(f"agent is a {type(self.agent).__name__}, not a {kind.__name__}")
        return self.agent

    def envs_by_rank(self, world_size: int) -> tuple[int, ...]:
        """Return how many envs each rank has.

        Raises:
            UsageError: ``num_envs`` names as many numbers as there are ranks, or one for all; here it does not. Or the
                learner can't deal with so many.
        """
        shares = self._shares(world_size)
        self.agent.check_envs(shares)
        return shares

    def _shares(self, world_size: int) -> tuple[int, ...]:
        if isinstance(self.num_envs, int):
            return (self.num_envs,) * world_size
        if len(self.num_envs) != world_size:
            given = ",".join(map(str, self.num_envs))
            raise UsageError(
                f"num_envs {given} is for {len(self.num_envs)} ranks, and there {_are(world_size)}; give one number "
                "per rank, one number for all, or --total_envs"
            )
        return self.num_envs

    def with_total_envs(self, total: int, world_size: int) -> "TrainConfig":
        """Return this config with ``total`` envs shared out to so many ranks; some may get none.

        Raises:
            UsageError: ``total`` is no multiple of the agent's ``env_block``.
        """
        if isinstance(self.num_envs, int) and self.num_envs * world_size == total:
            return self
        if not isinstance(self.num_envs, int) and (len(self.num_envs), sum(self.num_envs)) == (world_size, total):
            return self
        return merge(self, {"num_envs": deal(total, world_size, self.agent)})


def deal(total: int, world_size: int, agent: AgentConfig) -> int | list[int]:
    """Return ``num_envs`` of a config for ``total`` envs on so many ranks, in blocks, as evenly as that goes.

    Raises:
        UsageError: ``total`` is no multiple of the agent's ``env_block``.
    """
    block = agent.env_block(total)
    if total % block:
        raise UsageError(
            f"total_envs {total} is not divisible by {agent.block_setting()}; use --total_envs "
            f"{_nearest_multiples(total, block)}"
        )
    shares = split_evenly(total, world_size, block)
    return shares[0] if len(set(shares)) == 1 else list(shares)


def ranks_of_run(run: Mapping[str, Any]) -> int:
    """Return how many ranks a run had by its ``config.yaml``.

    Raises:
        UsageError: it has a ``world_size`` that is none.
    """
    world_size = run.get("world_size", 1)
    if isinstance(world_size, bool) or world_size not in range(1, 2**31):
        raise UsageError(f"world_size must be a whole number above 0, not {show(world_size)}; mend the run's config")
    return int(world_size)


def envs_of_run(run: Mapping[str, Any]) -> int | None:
    """Return the envs of a whole run by its ``config.yaml``, None if that does not say.

    Raises:
        UsageError: what it says can't be.
    """
    if "num_envs" not in run:
        return None
    settings = {"agent": {"num_mini_batches": 1}, "num_envs": run["num_envs"]}
    return sum(merge(TrainConfig(task=""), settings).envs_by_rank(ranks_of_run(run)))


def split_evenly(total: int, world_size: int, block: int = 1) -> tuple[int, ...]:
    """Return ``total`` in ``world_size`` shares that are multiples of ``block`` and differ by one block at most.

    ``block`` divides ``total``.
    """
    blocks, extra = divmod(total // block, world_size)
    return tuple(block * (blocks + (rank < extra)) for rank in range(world_size))


def _nearest_multiples(number: int, block: int) -> str:
    lower = number // block * block
    return f"{lower} or {lower + block}" if lower else f"{block}"


def _nearest_batches(batch_size: int, total_envs: int) -> str:
    """Return the sizes below and above that are a multiple or a divisor of the number of envs."""
    if batch_size > total_envs:
        return _nearest_multiples(batch_size, total_envs)
    small = [size for size in range(1, math.isqrt(total_envs) + 1) if total_envs % size == 0]
    divisors = [*small, *(total_envs // size for size in small)]
    lower = max(size for size in divisors if size < batch_size)
    return f"{lower} or {min(size for size in divisors if size > batch_size)}"


def _are(count: int) -> str:
    return f"are {count}" if count > 1 else "is 1"
