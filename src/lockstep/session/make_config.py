"""From a task's name to its full config."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lockstep.core.config import merge
from lockstep.core.registry import load
from lockstep.recipes.catalog import TASKS, check_offered

if TYPE_CHECKING:
    from lockstep.learn.config import TrainConfig


def make_config(task: str, **settings: Any) -> TrainConfig:
    """Return the recipe of a task with some settings changed, such as ``num_envs=64, agent={"gamma": 0.98}``.

    Raises:
        UsageError: an unknown task or setting, or a value that is not allowed or not available in this version.
    """
    recipe: TrainConfig = load(TASKS.get(task).recipe)()
    config = merge(recipe, settings)
    check_offered(config)
    return config
