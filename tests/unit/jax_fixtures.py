"""Meshes of a few CPU devices of this process, and functions run on them."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from lockstep.distributed.jax_mesh import REPLICATED, SHARDED, RankMesh, make_mesh

NUM_RANKS = (1, 2, 4)


def ranks_of(num_ranks: int) -> RankMesh:
    """Return a mesh of the first CPU devices."""
    return make_mesh(jax.devices("cpu")[:num_ranks])


def on_ranks(
    num_ranks: int,
    function: Callable[..., Any],
    *arguments: Any,
    in_specs: Any = SHARDED,
    out_specs: Any = REPLICATED,
    check_vma: bool = True,
) -> Any:
    """Return in numpy what a function gives on ranks that share the rows of whole arrays."""
    ranks = ranks_of(num_ranks)
    mapped = jax.shard_map(function, mesh=ranks.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma)
    return jax.tree.map(np.asarray, jax.jit(mapped)(*arguments))
