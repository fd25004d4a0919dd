"""A replay of skrl in a checkpoint: its rows by env, so that it can be dealt to any number of ranks (torch)."""

from collections.abc import Mapping
from typing import Any

import torch

from lockstep.learn.torch.sharding import Nest


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
