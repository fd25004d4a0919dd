"""A trained policy, from its checkpoint into code of your own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from lockstep.core.files import is_file
from lockstep.core.run_directory import latest_checkpoint
from lockstep.session.framework import framework_of_checkpoint

if TYPE_CHECKING:
    from lockstep.core.types import Array, Observations
    from lockstep.learn.config import TrainConfig


class Policy(Protocol):
    """Chooses the most likely action; remembers, if it has a memory, from one call to the next.

    Its arrays are those of the framework that trained it. With torch it also has ``network``, the actor and critic.
    """

    config: TrainConfig
    """Of the run that trained it."""
    iteration: int
    """Iterations it was trained for."""
    num_observations: int
    """Of the group ``actor``."""

    def reset(self, done: Array | None = None) -> None:
        """Forget everything, or only in the envs of ``done (num_envs,)``; call it when episodes end."""

    def __call__(self, observations: Observations | Array) -> Array:
        """Return actions ``(num_envs, size)`` (discrete: ``(num_envs,)``) for raw observations.

        Args:
            observations: the env's groups, or those of the group ``actor`` alone, ``(num_envs, num_observations)``; of
                the framework, or numpy.
        """


def checkpoint_of(path: str | Path) -> Path:
    """Return the newest checkpoint of a run directory; the path of anything else as it is.

    Raises:
        UsageError: the run directory has none.
    """
    return latest_checkpoint(path) if is_file(Path(path) / "config.yaml") else Path(path)


def load_policy(path: str | Path, device: str = "auto") -> Policy:
    """Load the policy of a checkpoint, or of the newest checkpoint of a run directory.

    A checkpoint of torch is a file, one of JAX a folder.

    Raises:
        UsageError: no such checkpoint, damaged, or of a task that this installation doesn't have.
    """
    path = checkpoint_of(path)
    return framework_of_checkpoint(path).load_policy(path, device)
