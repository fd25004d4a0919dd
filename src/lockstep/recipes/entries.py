"""What is known of a task without loading it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lockstep.recipes.suites import Suite

DEFAULT_ALGORITHM = "ppo"


@dataclass(frozen=True)
class TaskEntry:
    """A task by import strings, so that listing tasks loads nothing."""

    name: str
    description: str
    task: str
    """Import string of the task class, constructed as ``TaskClass(config.env)``."""
    recipe: str
    """Import string of a function without arguments that returns the task's full ``TrainConfig``, for PPO."""
    engines: tuple[str, ...]
    """The engines it runs on with torch, the default first; ``engines_of`` knows those of every framework."""
    other_recipes: Mapping[str, str] = field(default_factory=dict)
    """The same as ``recipe``, for each algorithm besides PPO."""
    suite: Suite | None = None
    """Of other people's envs that it is one of, which then makes its envs; None for a task of our own kind."""
    env_id: str = ""
    """What the suite calls it; first argument of ``task`` and of the recipes, where there is a suite."""

    @property
    def recipes(self) -> dict[str, str]:
        """Import strings of all recipes by algorithm, the default first."""
        return {DEFAULT_ALGORITHM: self.recipe, **self.other_recipes}

    @property
    def arguments(self) -> tuple[str, ...]:
        """What ``task`` and the recipes take before anything else."""
        return () if self.suite is None else (self.env_id,)
