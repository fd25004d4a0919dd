"""Settings of a training: the learner's (``agent``), the evaluation's, and the whole (``TrainConfig``)."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, SerializeAsAny, field_validator, model_validator

from lockstep.core.config import Config, merge, show
from lockstep.core.errors import UsageError
from lockstep.envs.config import EnvConfig

Width = Annotated[int, Field(ge=1, le=2**16)]
Count = Annotated[int, Field(ge=1, lt=2**31)]
Share = Annotated[int, Field(ge=0, lt=2**31)]  # a rank may have no envs at all


class PpoConfig(Config):
    """Proximal policy optimisation (Schulman et al. 2017, arXiv:1707.06347); names as the field uses them."""

    num_steps_per_env: Count = Field(24, description="env steps per env and iteration")
    num_learning_epochs: Count = Field(5, description="passes over the rollout per iteration")
    num_mini_batches: Count = Field(4, description="minibatches per epoch; num_envs must be divisible by it")
    learning_rate: float = Field(1e-3, gt=0, le=1e9, description="of Adam; where it starts if the schedule is adaptive")
    schedule: Literal["adaptive", "fixed"] = Field("adaptive", description="adaptive: steered by desired_kl")
    desired_kl: float = Field(0.01, gt=0, le=1e9, description="KL divergence that the adaptive schedule aims at")
    min_learning_rate: float = Field(1e-5, gt=0, le=1e9, description="lower bound of the adaptive schedule")
    max_learning_rate: float = Field(1e-2, gt=0, le=1e9, description="upper bound of the adaptive schedule")
    gamma: float = Field(0.99, ge=0, le=1, description="discount factor")
    lam: float = Field(0.95, ge=0, le=1, description="lambda of generalised advantage estimation")
    clip_param: float = Field(0.2, gt=0, le=1e9, description="clip range of the probability ratio and of the value")
    use_clipped_value_loss: bool = Field(
        False, description="clip the value loss as the surrogate is clipped; holds a critic of large returns back"
    )
    value_loss_coef: float = Field(1.0, ge=0, le=1e9, description="weight of the value loss")
    entropy_coef: float = Field(0.0, ge=0, le=1e9, description="weight of the entropy bonus")
    max_grad_norm: float = Field(1.0, gt=0, le=1e9, description="gradient norm above which gradients are scaled down")
    normalize_advantages: bool = Field(True, description="by mean and standard deviation over the whole rollout")
    normalize_observations: bool = Field(True, description="by running mean and standard deviation")
    actor_hidden_dims: tuple[Width, ...] = Field((64, 64), description="widths of the actor's hidden layers")
    critic_hidden_dims: tuple[Width, ...] = Field((64, 64), description="widths of the critic's hidden layers")
    activation: Literal["elu", "relu", "tanh", "silu"] = "elu"
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
    algorithm: str = Field("ppo", description="learning algorithm")
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
    dtype: Literal["float32", "float64", "bfloat16"] = Field("float32", description="bfloat16: as autocast")
    engine: Literal["auto", "mujoco", "warp", "mjx", "analytic", "genesis"] = Field("auto", description="physics")
    log_root: str = Field("logs", min_length=1, description="folder of all runs")
    run_name: str = Field("", description="appended to the run directory's name")
    logger: Literal["tensorboard", "wandb", "none"] = Field("tensorboard", description="besides metrics.jsonl")
    env: SerializeAsAny[EnvConfig] = EnvConfig()
    agent: PpoConfig = PpoConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoints: CheckpointConfig = CheckpointConfig()
    sentinel_interval: int = Field(
        25, ge=0, lt=2**31, description="iterations between comparisons of what all ranks must have alike; 0: never"
    )

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
        block = self.agent.num_mini_batches
        shares = (self.num_envs,) if isinstance(self.num_envs, int) else self.num_envs
        for share in shares:
            if share % block:
                raise ValueError(
                    f"num_envs {share} is not divisible by agent.num_mini_batches {block}; "
                    f"use --num_envs {_nearest_multiples(share, block)}"
                )
        return self

    def envs_by_rank(self, world_size: int) -> tuple[int, ...]:
        """Return how many envs each rank has.

        Raises:
            UsageError: ``num_envs`` names as many numbers as there are ranks, or one for all; here it does not.
        """
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
            UsageError: ``total`` is no multiple of ``agent.num_mini_batches``.
        """
        if isinstance(self.num_envs, int) and self.num_envs * world_size == total:
            return self
        if not isinstance(self.num_envs, int) and (len(self.num_envs), sum(self.num_envs)) == (world_size, total):
            return self
        return merge(self, {"num_envs": deal(total, world_size, self.agent.num_mini_batches)})


def deal(total: int, world_size: int, block: int) -> int | list[int]:
    """Return ``num_envs`` of a config for ``total`` envs on so many ranks, in blocks, as evenly as that goes.

    Raises:
        UsageError: ``total`` is no multiple of ``block``.
    """
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

    Raises:
        UsageError: ``total`` is no multiple of ``block``.
    """
    if total % block:
        raise UsageError(
            f"total_envs {total} is not divisible by agent.num_mini_batches {block}; use --total_envs "
            f"{_nearest_multiples(total, block)}"
        )
    blocks, extra = divmod(total // block, world_size)
    return tuple(block * (blocks + (rank < extra)) for rank in range(world_size))


def _nearest_multiples(number: int, block: int) -> str:
    lower = number // block * block
    return f"{lower} or {lower + block}" if lower else f"{block}"


def _are(count: int) -> str:
    return f"are {count}" if count > 1 else "is 1"
