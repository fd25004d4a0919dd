"""Ranks in JAX, for code of your own: collectives, gradients, keys and populations over the devices of all processes.

A rank is one device. Inside ``jax.shard_map`` over a mesh of ``make_mesh`` the collectives reduce over all ranks; where
there are none they change nothing, so the same code serves one device and many. No torch is loaded.
"""

from lockstep.distributed.jax_collectives import (
    AXIS_NAME,
    after,
    all_gather,
    axis_index,
    axis_size,
    is_bound,
    local_parameters,
    pmax,
    pmean,
    pmin,
    psum,
)
from lockstep.distributed.jax_gradients import gradient_update
from lockstep.distributed.jax_group import init
from lockstep.distributed.jax_mesh import (
    REPLICATED,
    SHARDED,
    RankMesh,
    get_global_ranks,
    is_dist_initialized,
    make_mesh,
)
from lockstep.distributed.jax_moments import Moments, merge_over_ranks
from lockstep.distributed.jax_population import (
    replicate,
    shmap_map,
    shmap_vmap,
    split_key_to_devices,
    tree_device_put,
    unreplicate,
)

__all__ = [
    "AXIS_NAME",
    "REPLICATED",
    "SHARDED",
    "Moments",
    "RankMesh",
    "after",
    "all_gather",
    "axis_index",
    "axis_size",
    "get_global_ranks",
    "gradient_update",
    "init",
    "is_bound",
    "is_dist_initialized",
    "local_parameters",
    "make_mesh",
    "merge_over_ranks",
    "pmax",
    "pmean",
    "pmin",
    "psum",
    "replicate",
    "shmap_map",
    "shmap_vmap",
    "split_key_to_devices",
    "tree_device_put",
    "unreplicate",
]
