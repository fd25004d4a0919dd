"""What learners ask of a batch of envs in torch, whoever has made the envs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from lockstep.core.types import Observations, Task
    from lockstep.envs.config import EnvConfig
    from lockstep.envs.episodes import EpisodeStatistics
    from lockstep.envs.torch_env import Transition


class Physics(Protocol):
    """What steps the envs, as the rest of a run sees it; every ``Engine`` and ``PureEngine`` is one."""

    @property
    def warning_counts(self) -> Mapping[str, int]:
        """How often the physics library gave which warning, in envs and env steps."""

    def log_to(self, path: Path) -> None:
        """Append what the physics library has to say (warnings) to a file from now on."""

    def close(self) -> None:
        """Release threads and memory."""


class BatchEnv(Protocol):
    """``num_envs`` envs of one task on one device: ``TorchEnv``, or ``GuestEnv`` around other people's."""

    num_envs: int
    num_steps: int
    """Env steps since the last reset."""
    device: torch.device
    dtype: torch.dtype
    env_ids: torch.Tensor
    """Global ids, ``(num_envs,)`` int32, ascending."""
    observations: Observations
    """Of all envs now."""
    episode_length: torch.Tensor
    """How many steps each episode has taken, ``(num_envs,)`` int32, by which the time limit goes; it may be set."""
    episodes: EpisodeStatistics
    num_diverged: torch.Tensor
    """``()`` int64: envs and steps whose physics failed, until a reader sets it back to 0."""

    @property
    def task(self) -> Task:
        """Sizes and names."""

    @property
    def config(self) -> EnvConfig:
        """The time limit and the like."""

    @property
    def engine(self) -> Physics:
        """What steps the envs."""

    def reset(self) -> Observations:
        """Start every env anew, at the start of its streams: the same episodes follow each time."""

    def step(self, action: torch.Tensor) -> Transition:
        """Apply one action per env: ``(num_envs, size)`` floats, or ``(num_envs,)`` integers if discrete."""

    def summarise(self, sums: Sequence[float]) -> dict[str, float | None]:
        """Turn sums over finished episodes, as ``episodes.take`` gives them, into metrics by name."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a continuation needs; per-env tensors lead with the env axis (local order)."""

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue where ``state_dict`` was taken."""

    def close(self) -> None:
        """Release what steps the envs."""
