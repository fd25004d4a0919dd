"""Settings of a training: the evaluation's, the checkpoints', and the whole (``TrainConfig``), ``agent`` among them."""

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, SerializeAsAny, field_validator, model_validator

from lockstep.core.config import Config, merge, show
from lockstep.core.errors import UsageError
from lockstep.envs.config import EnvConfig
from lockstep.learn.agent_config import AGENTS as AGENTS
from lockstep.learn.agent_config import AgentConfig as AgentConfig
from lockstep.learn.agent_config import AgentT, Count, nearest_multiples
from lockstep.learn.agent_config import PpoConfig as PpoConfig
from lockstep.learn.agent_config import SacConfig as SacConfig

Share = Annotated[int, Field(ge=0, lt=2**31)]  # a rank may have no envs at all


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
    algorithm: str = Field(
        "ppo", description="ppo, or sac (jax); other libraries have more, which they name; it decides on agent.*"
    )
    rl_library: str = Field("lockstep", description="whose learner: lockstep, rsl_rl, rl_games, skrl or sb3")
    library: dict[str, Any] = Field(
        {}, description="settings of rl_library in its own names, laid over what it is given for agent.*"
    )
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

    @field_validator("library", mode="before")
    @classmethod
    def _library_is_a_mapping(cls, library: Any) -> Any:
        if not isinstance(library, Mapping):
            raise ValueError("must be a mapping, as in --library.NAME VALUE, or 'library:' in an overlay file")
        return library

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
                setting = self.agent.block_setting()
                raise ValueError(
                    f"num_envs {share} is not divisible by {setting}; use --num_envs "
                    f"{nearest_multiples(share, block)}, or --{setting.partition(' ')[0]} {math.gcd(share, block)}"
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
            f"{nearest_multiples(total, block)}"
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


def _are(count: int) -> str:
    return f"are {count}" if count > 1 else "is 1"
