"""What making skrl's agents has in common for torch and JAX. Imports neither, and nothing of the library."""

import dataclasses
import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from gymnasium import Space

from lockstep.adapters.spaces import actions_of, observations_of
from lockstep.core.errors import UsageError, in_one_line, nearest
from lockstep.core.types import Task
from lockstep.learn.config import TrainConfig

PREPROCESSORS = ("observation", "state", "value")
"""What the library scales."""
QUIET = {"write_interval": 0, "checkpoint_interval": 0, "directory": ".", "experiment_name": "skrl"}
"""Its ``experiment``: the run directory has it all; an interval of 0 keeps it from making folders and files."""


def agent_class(framework: str, algorithm: str) -> tuple[Any, dict[str, Any]]:
    """Return an agent's class, and the fields of its configuration with their defaults."""
    module = importlib.import_module(f"skrl.agents.{framework}.{algorithm}")
    described = getattr(module, f"{algorithm.upper()}_CFG")
    known = {field.name: getattr(described(), field.name) for field in dataclasses.fields(described)}
    return getattr(module, algorithm.upper()), known


def spaces_of(task: Task, has_critic: bool) -> dict[str, Space[Any] | None]:
    """Return the library's spaces: its observations are our group ``actor``, its states ``critic``."""
    sizes = task.num_observations
    return {
        "observation_space": observations_of(sizes["actor"]),
        "state_space": observations_of(sizes["critic"]) if has_critic else None,
        "action_space": actions_of(task.action_space),
    }


def look_up(found: dict[str, Any], name: str, known: Mapping[str, Any]) -> bool:
    """Put what the name in a setting stands for in its place; return whether there is one.

    Args:
        found: the settings.
        name: of the setting.
        known: what there is, by name.

    Raises:
        UsageError: there is nothing of that name.
    """
    wanted = found.get(name)
    if wanted is None:
        return False
    if not isinstance(wanted, str) or wanted not in known:
        raise UsageError(f"library.{name} {wanted!r} is not known{nearest(str(wanted), known)}")
    found[name] = known[wanted]
    return True


def look_up_scaler(found: dict[str, Any], kind: str, known: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Put the class of a normaliser in the place of its name, and what it is made with beside it.

    Args:
        found: the settings.
        kind: one of ``PREPROCESSORS``.
        known: classes by name.
        own: arguments that are ours to give; with ``size`` None there is nothing to scale.

    Raises:
        UsageError: there is no class of that name.
    """
    name = f"{kind}_preprocessor"
    if not look_up(found, name, known):
        return
    if own["size"] is None:
        found[name] = None
    else:
        found[f"{name}_kwargs"] = {**(found.get(f"{name}_kwargs") or {}), **own}


@contextmanager
def refusals_in_words(config: TrainConfig) -> Iterator[None]:
    """Return the context in which an agent is made.

    Raises:
        UsageError: ``config.library`` has something that the library does not take.
    """
    try:
        yield
    except TypeError as error:
        if not config.library:
            raise
        raise UsageError(f"library has something that skrl does not take: {in_one_line(error)}") from error
