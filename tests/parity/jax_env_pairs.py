"""The same envs in torch and in JAX, for every registered task and every engine it can use."""

from collections.abc import Callable
from typing import Any, NamedTuple

import array_api_compat.torch
import jax.numpy as jnp
import numpy as np
import torch

from lockstep.core.registry import load
from lockstep.core.types import InitialState, PureEngine, Task
from lockstep.envs.config import EnvConfig
from lockstep.envs.jax_env import JaxEnv
from lockstep.envs.torch_env import TorchEnv
from lockstep.recipes.catalog import TASKS
from lockstep.sim import analytic, jax_host, mjx, mujoco_c

# All that may happen to a quadruped within a few steps.
BUSY = {
    "randomization": {"num_models": 5},
    "push_interval_s": (0.02, 0.1),
    "command_interval_s": (0.02, 0.2),
}


class Case(NamedTuple):
    """A task with some of its settings, and an engine of JAX."""

    task: str
    engine: str
    settings: dict[str, Any]

    def __str__(self) -> str:
        words = [value for value in self.settings.values() if isinstance(value, str | float)]
        return "-".join((self.task, self.engine, *map(str, words)))

    def make_task(self, **settings: Any) -> Task:
        """Return the task with its settings, changed by ``settings``."""
        config = load(TASKS.get(self.task).recipe)().env
        made: Task = load(TASKS.get(self.task).task)(
            config.model_validate(config.model_dump() | self.settings | settings)
        )
        return made


def _cases() -> list[Case]:
    cases = []
    for name in TASKS:
        config = load(TASKS.get(name).recipe)().env
        task = load(TASKS.get(name).task)(config)
        engines = ["analytic"] if hasattr(task, "dynamics") else []
        engines += ["mujoco", "mjx"] if task.model_path is not None else []
        settings: list[dict[str, Any]] = [{"observation_noise": 0.02}] if hasattr(config, "observation_noise") else [{}]
        if hasattr(config, "randomization"):
            settings = [BUSY]
        if hasattr(config, "action_kind"):
            settings = [{"action_kind": kind} for kind in ("continuous", "discrete")]
        cases += [Case(name, engine, each) for engine in engines for each in settings]
    return cases


CASES = _cases()


def pure_engine(
    name: str,
    task: Task,
    dtype: str,
    decimation: int = 1,
    num_threads: int = 1,
    implementation: str = "jax",
    seed: int = 3,
) -> PureEngine:
    makers: dict[str, Callable[..., PureEngine]] = {
        "analytic": analytic.make_pure_engine,
        "mujoco": jax_host.make_pure_engine,
        "mjx": mjx.make_pure_engine,
    }
    return makers[name](
        task,
        decimation=decimation,
        num_threads=num_threads,
        seed=seed,
        dtype=jnp.dtype(dtype),
        host_engine=mujoco_c.make_engine,
        implementation=implementation,
    )


def make_pair(
    case: Case,
    task: Task,
    dtype: str,
    num_envs: int,
    config: EnvConfig,
    seed: int = 3,
    implementation: str = "jax",
) -> tuple[TorchEnv, JaxEnv]:
    """Return ``num_envs`` envs of a task in torch, and the same in JAX."""
    sizes: dict[str, Any] = {"num_envs": num_envs, "decimation": config.decimation, "num_threads": 1, "seed": seed}
    sizes["first_env_id"] = 0
    xp, torch_dtype = array_api_compat.torch, getattr(torch, dtype)
    maker = analytic.make_engine if case.engine == "analytic" else mujoco_c.make_engine
    engine = maker(task, **sizes, xp=xp, dtype=torch_dtype, device=torch.device("cpu"))
    in_torch = TorchEnv(task, engine, config, seed=seed, device=torch.device("cpu"), dtype=torch_dtype)
    pure = pure_engine(case.engine, task, dtype, config.decimation, implementation=implementation, seed=seed)
    return in_torch, JaxEnv(task, pure, config, seed=seed, dtype=jnp.dtype(dtype))


def is_robot(case: Case) -> bool:
    """Say whether a case is of a robot with many joints and contacts, whose every step counts."""
    return case.settings == BUSY


def scatter_half(task: Task) -> list[torch.Tensor]:
    """Let half of the episodes begin anywhere, beyond every limit too; the others begin as the task says.

    Robots begin higher or lower, and off their posture; where they face stays as it is.

    Returns a list, into which each call puts which those are, ``(num_envs, 1)``.
    """
    own, calls = task.reset, list[Any]()

    def reset(xp: Any, noise: Any) -> InitialState:
        usual, offset = own(xp, noise), 2 * noise - 1

        def spread(like: Any, reach: list[float]) -> Any:
            columns = [reach[number] * offset[:, number % offset.shape[1]] for number in range(like.shape[1])]
            return xp.stack(columns, axis=1)

        calls.append(noise[:, -1:] > 0.5)
        num_joints = usual.qpos.shape[1] - 7  # of a robot, whose trunk has three coordinates and a quaternion
        reach = [2.5] * 2 if num_joints < 0 else [0, 0, 0.3, 0, 0, 0, 0] + [0.3] * num_joints
        qpos = xp.where(calls[-1], usual.qpos + spread(usual.qpos, reach), usual.qpos)
        qvel = xp.where(calls[-1], usual.qvel + spread(usual.qvel, [2.0] * usual.qvel.shape[1]), usual.qvel)
        return InitialState(qpos, qvel, usual.variables)

    task.reset = reset  # type: ignore[method-assign]
    return calls


def to_torch(actions: np.ndarray, dtype: str) -> torch.Tensor:
    """Return actions as a policy of that precision would give them."""
    tensor = torch.from_numpy(actions)
    return tensor.to(getattr(torch, dtype)) if tensor.dtype.is_floating_point else tensor
