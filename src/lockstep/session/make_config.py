"""From a task's name to its full config."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lockstep.core.config import merge
from lockstep.recipes.catalog import DEFAULT_ALGORITHM, check_offered, recipe_of
from lockstep.recipes.libraries import OWN

if TYPE_CHECKING:
    from lockstep.learn.config import TrainConfig


def make_config(task: str, **settings: Any) -> TrainConfig:
    """Return the recipe of a task with some settings changed, such as ``num_envs=64, agent={"gamma": 0.98}``.

    With ``algorithm`` it is the task's recipe for that algorithm, whose ``agent`` has other settings; with
    ``rl_library`` as well, that library's algorithm need not be one that the task has a recipe for.

    Raises:
        UsageError: an unknown task or setting, or a value that is not allowed or not available in this version.
    """
    algorithm, library = settings.get("algorithm", DEFAULT_ALGORITHM), settings.get("rl_library", OWN)
    config = merge(recipe_of(task, str(algorithm), str(library)), settings)
    check_offered(config)
    return config
