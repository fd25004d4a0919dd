"""Ranks, for code of your own: which one am I, and how do we stay in step.

Names are imported when they are first used: those of ``ranks`` load no torch. ``lockstep.distributed.jax`` is the same
for JAX; it is not in ``__all__``, so that ``import *`` works where JAX is not installed.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.distributed import jax as jax
    from lockstep.distributed.ranks import (
        get_global_rank,
        get_local_rank,
        get_world_size,
        is_distributed,
        is_main_process,
        main_only,
    )
    from lockstep.distributed.torch_exchange import any_rank, gather_text
    from lockstep.distributed.torch_gradients import AveragedGradients, average_gradients
    from lockstep.distributed.torch_group import barrier, cleanup, setup
    from lockstep.distributed.torch_mixin import DistributedMixin
    from lockstep.distributed.torch_moments import Moments
    from lockstep.distributed.torch_state import broadcast_state, broadcast_value
    from lockstep.distributed.torch_statistics import merge_moments, moments_of, reduce_metrics

__all__ = [
    "AveragedGradients",
    "DistributedMixin",
    "Moments",
    "any_rank",
    "average_gradients",
    "barrier",
    "broadcast_state",
    "broadcast_value",
    "cleanup",
    "gather_text",
    "get_global_rank",
    "get_local_rank",
    "get_world_size",
    "is_distributed",
    "is_main_process",
    "main_only",
    "merge_moments",
    "moments_of",
    "reduce_metrics",
    "setup",
]

_HOMES = {
    "ranks": (
        "get_global_rank",
        "get_local_rank",
        "get_world_size",
        "is_distributed",
        "is_main_process",
        "main_only",
    ),
    "torch_exchange": ("any_rank", "gather_text"),
    "torch_gradients": ("AveragedGradients", "average_gradients"),
    "torch_group": ("barrier", "cleanup", "setup"),
    "torch_mixin": ("DistributedMixin",),
    "torch_moments": ("Moments",),
    "torch_state": ("broadcast_state", "broadcast_value"),
    "torch_statistics": ("merge_moments", "moments_of", "reduce_metrics"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name == "jax":
        return importlib.import_module("lockstep.distributed.jax")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'lockstep.distributed' has no attribute '{name}'")
    return getattr(importlib.import_module(f"lockstep.distributed.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "jax"})
