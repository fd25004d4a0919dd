"""From a config to envs as pure functions of JAX: task and engine by their import strings."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing
from functools import partial
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from lockstep.core.registry import Registry, load
from lockstep.distributed.cores import threads_per_rank
from lockstep.envs.jax_env import JaxEnv
from lockstep.recipes.catalog import TASKS, engines_of, make_task
from lockstep.session.make_env import ENGINES, least_bytes
from lockstep.session.mjx_choice import make_mjx_engine
from lockstep.session.process import check_memory

if TYPE_CHECKING:
    from lockstep.core.types import Engine, PureEngine, Task
    from lockstep.distributed.jax_mesh import RankMesh
    from lockstep.learn.config import TrainConfig

PURE_ENGINES: Registry[str] = Registry("engine")
"""Name to import string of a function ``(task, *, decimation, dtype, ...) -> PureEngine``.

It is handed ``num_threads`` and ``host_engine`` too; that of ``mjx`` the settings in ``config.env.mjx`` instead.
"""
PURE_ENGINES.register("analytic", "lockstep.sim.analytic:make_pure_engine")
PURE_ENGINES.register("mujoco", "lockstep.sim.jax_host:make_pure_engine")
PURE_ENGINES.register("mjx", "lockstep.sim.mjx:make_pure_engine")

_HOST_ENGINE = "mujoco"
"""Of ``make_env.ENGINES``: what steps numpy arrays where the engine of that name is asked for."""


def build_env(
    config: TrainConfig, platform: str, resources: ExitStack, streams: str = "train", task: Task | None = None
) -> JaxEnv:
    """Return the envs that a config asks for; they hold no state, so all devices of a process share them.

    Args:
        config: of the run.
        platform: of the devices: ``cpu`` or ``gpu``.
        resources: the engine is closed with them.
        streams: prefix of the random streams' purposes; anything but ``train`` starts every episode at its beginning.
        task: of other envs by the same config, which then share its models; None for a new one.
    """
    env_config = config.env
    if streams != "train":
        env_config = env_config.model_copy(update={"randomize_initial_episode_length": False})
    task = make_task(config) if task is None else task
    dtype = jnp.float64 if config.dtype == "float64" else jnp.float32
    suite = TASKS.get(config.task).suite
    if suite is not None:  # other people's envs, which have physics of their own
        guests: JaxEnv = load(suite.make_env)(task, env_config, seed=config.seed, dtype=dtype, streams=streams)
        return guests
    engine = resources.enter_context(closing(_build_engine(config, task, platform, dtype)))
    return JaxEnv(task, engine, env_config, seed=config.seed, dtype=dtype, streams=streams)


def check_room(config: TrainConfig, env: JaxEnv, ranks: RankMesh) -> None:
    """Refuse what this process can't hold; a GPU says for itself when it is full.

    Raises:
        UsageError: more than all the memory there is.
    """
    if platform_of(ranks) == "cpu":
        shares: Sequence[int] = config.envs_by_rank(ranks.num_ranks)
        num_envs = sum(shares[rank] for rank in ranks.local_ranks)
        check_memory(least_bytes(env.task, num_envs, config.agent.num_steps_per_env), num_envs)


def platform_of(ranks: RankMesh) -> str:
    """Return what the ranks compute on: ``cpu`` or ``gpu``."""
    return str(ranks.mesh.devices.flat[0].platform)


def _build_engine(config: TrainConfig, task: Task, platform: str, dtype: Any) -> PureEngine:
    name: str = config.engine
    if name == "auto":
        name = engines_of(config.task, "jax", on_gpu=platform != "cpu")[0]
    make: Any = partial(
        load(PURE_ENGINES.get(name)), task, decimation=config.env.decimation, seed=config.seed, dtype=dtype
    )
    num_threads = config.env.num_physics_threads or threads_per_rank()
    if name == "mjx":
        return make_mjx_engine(make, config.env.mjx.model_dump(), platform=platform, dtype=jnp.dtype(dtype).name)
    engine: PureEngine = make(num_threads=num_threads, host_engine=_make_host_engine)
    return engine


def _make_host_engine(*arguments: Any, **named: Any) -> Engine:
    engine: Engine = load(ENGINES.get(_HOST_ENGINE))(*arguments, **named)  # loaded only where it is used
    return engine
