"""The tasks there are: what each is called, where it lives, its recipe and its engines. Imports none of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lockstep.core.errors import UsageError
from lockstep.core.registry import Registry, load
from lockstep.distributed.topology import require_distributed

if TYPE_CHECKING:
    from lockstep.learn.config import TrainConfig


@dataclass(frozen=True)
class TaskEntry:
    """A task by import strings, so that listing tasks loads nothing."""

    name: str
    description: str
    task: str
    """Import string of the task class, constructed as ``TaskClass(config.env)``."""
    recipe: str
    """Import string of a function without arguments that returns the task's full ``TrainConfig``."""
    engines: tuple[str, ...]
    """The engines it runs on, the default first."""


TASKS: Registry[TaskEntry] = Registry("task")

for _entry in (
    TaskEntry(
        name="cartpole_classic",
        description="keep a pole up on a cart (Barto, Sutton, Anderson); --env.action_kind continuous or discrete",
        task="lockstep.tasks.cartpole_classic.task:CartpoleClassic",
        recipe="lockstep.recipes.cartpole:cartpole_classic",
        engines=("analytic",),
    ),
    TaskEntry(
        name="cartpole_balance",
        description="keep a pole up on a cart that stays near the middle of its rail",
        task="lockstep.tasks.cartpole_balance.task:CartpoleBalance",
        recipe="lockstep.recipes.cartpole:cartpole_balance",
        engines=("mujoco",),
    ),
    TaskEntry(
        name="cartpole_swingup",
        description="swing a hanging pole up by moving the cart, then keep it there",
        task="lockstep.tasks.cartpole_swingup.task:CartpoleSwingup",
        recipe="lockstep.recipes.cartpole:cartpole_swingup",
        engines=("mujoco",),
    ),
):
    TASKS.register(_entry.name, _entry)


def check_distributed(config: TrainConfig, world_size: int) -> None:
    """Raise UsageError if the config's task says that it can't train on several ranks (``distributed_unsupported``)."""
    require_distributed(load(TASKS.get(config.task).task), f"task {config.task}", world_size)


def check_offered(config: TrainConfig) -> None:
    """Raise UsageError if this version, or the config's task, has no such framework, library, algorithm or engine."""
    offered = {
        "ml_framework": ("torch",),
        "rl_library": ("lockstep",),
        "algorithm": ("ppo",),
        "engine": ("auto", *TASKS.get(config.task).engines),
    }
    for name, choices in offered.items():
        value = getattr(config, name)
        if value not in choices:
            where = f"task {config.task}" if name == "engine" else "this version of lockstep"
            raise UsageError(f"{name} {value!r} is not available: {where} has {', '.join(choices)}")
