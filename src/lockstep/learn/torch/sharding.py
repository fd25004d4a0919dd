"""The state of envs that live on several ranks: gathered for a checkpoint, and dealt out from one.

A nest is a dict of dicts and tensors whose first axis is the env. Rows travel as bytes, so one exchange moves tensors
of all types.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from lockstep.core.types import Comm

Nest = dict[str, Any]


def gather(nest: Nest, comm: Comm, device: torch.device) -> Nest:
    """Return the rows of all ranks, in the order of ranks, on rank 0; other ranks get their own."""
    return _unpack(comm.gather_rows(_pack(nest, device), "env state"), nest)


def deal(saved: Nest | None, own: Nest, total_envs: int, first_env: int, comm: Comm, device: torch.device) -> Nest:
    """Return this rank's rows of what rank 0 has read.

    Args:
        saved: ``total_envs`` rows on rank 0, ignored elsewhere.
        own: this rank's envs as they are now: names, types and shapes.
        total_envs: envs of the whole job.
        first_env: global id of this rank's first env.
        comm: the ranks.
        device: that rows travel on.
    """
    num_envs = next(_tensors(own)).shape[0]
    width = _pack(own, device).shape[1]
    rows = torch.zeros((total_envs, width), dtype=torch.uint8, device=device) if saved is None else _pack(saved, device)
    comm.broadcast_({"rows": rows}, "env state")
    return _unpack(rows[first_env : first_env + num_envs], own)


def with_rows(nest: Nest, num_rows: int) -> Nest:
    """Return a nest of the same names, types and widths with another number of rows, on no device."""
    return {
        name: with_rows(value, num_rows)
        if isinstance(value, dict)
        else torch.empty((num_rows, *value.shape[1:]), dtype=value.dtype, device="meta")
        for name, value in nest.items()
    }


def _tensors(nest: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    for value in nest.values():
        if isinstance(value, Mapping):
            yield from _tensors(value)
        else:
            yield value


def _pack(nest: Nest, device: torch.device) -> torch.Tensor:
    """Return ``(num_rows, row_bytes)`` uint8."""
    return torch.cat([_as_bytes(tensor.to(device)) for tensor in _tensors(nest)], dim=1)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    # A copy, not ``contiguous()``: that takes none or one row as it is, whatever the stride between rows, which may be
    # 0 in what comes from numpy; and such a tensor can't be viewed as bytes.
    flat = tensor.clone(memory_format=torch.contiguous_format).flatten()
    # The number of bytes is spelled out, since there may be no rows, or rows of nothing.
    return flat.view(torch.uint8).view(tensor.shape[0], _row_bytes(tensor))


def _row_bytes(tensor: torch.Tensor) -> int:
    return math.prod(tensor.shape[1:]) * tensor.element_size()


def _unpack(rows: torch.Tensor, like: Nest) -> Nest:
    widths = [_row_bytes(tensor) for tensor in _tensors(like)]
    columns = iter(rows.split(widths, dim=1))

    def take(nest: Nest) -> Nest:
        return {
            name: take(value) if isinstance(value, dict) else _as(next(columns), value) for name, value in nest.items()
        }

    return take(like)


def _as(column: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    shape = (column.shape[0], *like.shape[1:])
    # A copy of its own begins where any type may begin.
    return column.flatten().clone().view(like.dtype).view(shape).to(like.device)
