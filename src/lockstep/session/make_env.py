"""From a config to a batch of envs: task and engine by their import strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lockstep.core.errors import UsageError
from lockstep.core.registry import Registry, load
from lockstep.distributed.isolation import given_gpu, placement_problem
from lockstep.distributed.topology import from_environment
from lockstep.recipes.catalog import TASKS, make_task
from lockstep.session.make_config import make_config
from lockstep.session.process import check_memory

if TYPE_CHECKING:
    import torch

    from lockstep.core.types import Engine, Task
    from lockstep.envs.batch_env import BatchEnv
    from lockstep.learn.config import TrainConfig
    from lockstep.recipes.suites import Suite

ENGINES: Registry[str] = Registry("engine")
"""Name to import string of a function ``(task, *, num_envs, first_env_id, seed, ...) -> Engine``; see _build_engine."""
ENGINES.register("analytic", "lockstep.sim.analytic:make_engine")
ENGINES.register("mujoco", "lockstep.sim.mujoco_c:make_engine")


def make_env(task: str, num_envs: int | None = None, *, seed: int = 1, device: str = "auto", **env: Any) -> BatchEnv:
    """Return ``num_envs`` envs of a task for code of your own; under torchrun every rank gets as many of its own.

    Args:
        task: a name that ``lockstep tasks`` lists.
        num_envs: how many on this rank; None for the recipe's number.
        seed: of all random streams.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:<index>``.
        env: settings of the task's env, such as ``max_episode_steps=200``.

    Raises:
        UsageError: an unknown task or setting, a device that is not there, or an env of JAX.
    """
    count = {} if num_envs is None else {"num_envs": num_envs}
    # Envs alone are dealt to no minibatches, so any number of them will do.
    agent = {"num_mini_batches": 1}
    config = make_config(task, seed=seed, device=device, env=env, agent=agent, **count)
    topology = from_environment()
    return build_share(config, config.envs_by_rank(topology.world_size), topology.rank)


def require_torch(task: str) -> Suite | None:
    """Return the suite that a task is of, None for one of our own kind, once its envs are known to be had in torch.

    Raises:
        UsageError: they are functions of JAX, which its training compiles.
    """
    suite = TASKS.get(task).suite
    if suite is not None and suite.framework != "torch":
        raise UsageError(
            f"task {task} is for ml_framework {suite.framework}, and the envs that code of your own steps are torch's; "
            f"train it with lockstep train {task}, or make it by its library, {suite.distribution.name}"
        )
    return suite


def build_share(
    config: TrainConfig, shares: Sequence[int], rank: int, streams: str = "train", task: Task | None = None
) -> BatchEnv:
    """Return the envs of one rank: ``shares`` says how many each has, and global ids follow the order of ranks."""
    return build_env(config, num_envs=shares[rank], first_env_id=sum(shares[:rank]), streams=streams, task=task)


def build_env(
    config: TrainConfig,
    *,
    num_envs: int | None = None,
    first_env_id: int = 0,
    streams: str = "train",
    task: Task | None = None,
) -> BatchEnv:
    """Return the envs that a config asks for.

    Args:
        config: of the run.
        num_envs: this rank's; None for a job of one process, which has them all.
        first_env_id: global id of the first of them.
        streams: prefix of the random streams' purposes; anything but ``train`` starts every episode at its beginning.
        task: of other envs by the same config, which then share its models; None for a new one.

    Raises:
        UsageError: the task is an env of a library of JAX, or the device is not there.
    """
    suite = require_torch(config.task)
    import torch

    from lockstep.envs.torch_env import TorchEnv

    device = resolve_device(config.device)
    dtype = torch.float64 if config.dtype == "float64" else torch.float32
    env_config = config.env
    if streams != "train":
        env_config = env_config.model_copy(update={"randomize_initial_episode_length": False})
    task = make_task(config) if task is None else task
    count = config.envs_by_rank(1)[0] if num_envs is None else num_envs
    if device.type == "cpu":  # a GPU says for itself when it is full, before anything else suffers
        check_memory(least_bytes(task, count, config.agent.num_steps_per_env if streams == "train" else 1), count)
    if suite is not None:
        guests: BatchEnv = load(suite.make_env)(
            TASKS.get(config.task).env_id,
            task,
            env_config,
            num_envs=count,
            first_env_id=first_env_id,
            seed=config.seed,
            streams=streams,
            device=device,
            dtype=dtype,
            num_threads=_num_threads(config),
        )
        return guests
    engine = _build_engine(config, task, count, first_env_id, dtype, device)
    return TorchEnv(
        task,
        engine,
        env_config,
        seed=config.seed,
        device=device,
        dtype=dtype,
        first_env_id=first_env_id,
        streams=streams,
        noise_block=config.agent.num_steps_per_env,
    )


def least_bytes(task: Task, num_envs: int, num_steps: int) -> int:
    """Return less than the memory that envs, a rollout of them and one copy of it take."""
    per_sample = sum(task.num_observations.values()) + task.num_observations["critic"] + 2 * task.action_space.size + 6
    return num_envs * (256 + 2 * 4 * per_sample * num_steps)


def _build_engine(
    config: TrainConfig, task: Task, num_envs: int, first_env_id: int, dtype: torch.dtype, device: torch.device
) -> Engine:
    import array_api_compat.torch as xp

    name = TASKS.get(config.task).engines[0] if config.engine == "auto" else config.engine
    engine: Engine = load(ENGINES.get(name))(
        task,
        num_envs=num_envs,
        first_env_id=first_env_id,
        seed=config.seed,
        decimation=config.env.decimation,
        num_threads=_num_threads(config),
        xp=xp,
        dtype=dtype,
        device=device,
    )
    return engine


def _num_threads(config: TrainConfig) -> int:
    from lockstep.distributed.cores import threads_per_rank

    return config.env.num_physics_threads or threads_per_rank()


def resolve_device(name: str) -> torch.device:
    """Return the device that ``--device`` names; ``auto`` is the GPU if there is one.

    Raises:
        UsageError: not a device, one that this machine does not have, or one that this rank could not be given.
    """
    import torch

    problem = placement_problem()
    if problem is not None and name.startswith(("auto", "cuda")):
        raise UsageError(problem)
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        if given_gpu() is not None and torch.version.cuda is not None:
            # Its peers may well compute on their GPUs: this rank must not become the slow one without a word.
            raise UsageError(
                f"this rank has GPU {given_gpu()}, which torch can't use; see nvidia-smi, or use --device cpu"
            )
        return torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"device '{name}' is unknown; use auto, cpu, cuda or cuda:<index>") from None
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"device '{name}' is not supported; use auto, cpu, cuda or cuda:<index>")
    if device.type == "cuda" and not torch.cuda.is_available():
        why = "this torch has no CUDA" if torch.version.cuda is None else "torch sees no GPU"
        raise UsageError(f"device '{name}' was asked for but {why}; use --device cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(f"device '{name}' is not there; torch sees {torch.cuda.device_count()} GPU(s), from cuda:0 on")
    return device
