"""What skrl's agents remember: rollouts, whose advantages all ranks normalise alike, and replays (torch)."""

from collections.abc import Mapping
from typing import Any

import torch
from skrl.memories.torch import RandomMemory

from lockstep.adapters.skrl.torch_models import SharedValueScaler
from lockstep.core.types import Comm
from lockstep.distributed.torch_statistics import merge_moments, moments_of
from lockstep.learn.torch.sharding import Nest

_EPSILON = 1e-8  # as the library has it


class RolloutMemory(RandomMemory):  # type: ignore[misc]
    """A rollout in which advantages are normalised over the samples of all ranks; the library does it on each alone.

    Attributes:
        value_scaler: of the agent; None if it has none.
    """

    def __init__(self, *, comm: Comm, **named: Any) -> None:
        super().__init__(**named)
        self.comm = comm
        self.value_scaler: SharedValueScaler | None = None
        self._values = torch.empty(0)

    def set_tensor_by_name(self, name: str, tensor: torch.Tensor) -> None:
        """Overwrite a tensor ``(num_steps, num_envs, size)``; an update does so with values, returns, advantages."""
        if name == "values":
            self._values = self.tensors["values"].clone()  # as they were before any scaling
        elif name == "advantages":
            tensor = self._normalised_advantages()
        super().set_tensor_by_name(name, tensor)

    def _normalised_advantages(self) -> torch.Tensor:
        returns = self.tensors["returns"] if self.value_scaler is None else self.value_scaler.given
        advantages = returns - self._values
        moments = merge_moments(moments_of(advantages.reshape(-1)), comm=self.comm)
        std = (moments.m2 / (moments.count - 1)).sqrt()
        return (advantages - moments.mean.float()) / (std.float() + _EPSILON)


def replay_rows(memory: Any) -> Nest:
    """Return what a memory holds, ``(num_envs, num_steps, size)`` by name, in the order of its slots."""
    num_steps = memory.memory_size if memory.filled else memory.memory_index
    return {name: tensor[:num_steps].transpose(0, 1) for name, tensor in memory.tensors.items()}


def load_replay(memory: Any, rows: Mapping[str, torch.Tensor], place: int) -> None:
    """Fill a memory.

    Args:
        memory: of the same envs; if it holds fewer steps than there are, it gets the newest.
        rows: as ``replay_rows`` gave them.
        place: the slot that was to be written next.
    """
    num_steps, size = next(iter(rows.values())).shape[1], memory.memory_size
    kept = min(num_steps, size)
    for name, tensor in memory.tensors.items():
        by_step = rows[name].transpose(0, 1)
        # Slots stay what they were, so that the same batches are drawn; in a memory of another size, by age.
        tensor[:kept].copy_(by_step if num_steps == size else by_step.roll(-place, 0)[-kept:])
    memory.filled = kept == size
    memory.memory_index = place if num_steps == size else kept % size
