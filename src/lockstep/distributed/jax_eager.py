"""A function of all ranks, run operation by operation in one process: slow, and open to a debugger.

``jax.shard_map`` without ``jax.jit`` compiles each operation anew each time it meets it, which takes minutes where this
takes seconds. So one rank runs as it stands, without an axis, and several are an axis of ``jax.vmap`` on one device.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from lockstep.distributed.jax_collectives import AXIS_NAME, Tree

_SHARDED = PartitionSpec(AXIS_NAME)


def eager(function: Callable[..., Any], mesh: jax.sharding.Mesh, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """Return a function of global arrays, all on devices of this process, that runs ``function`` on every rank's part.

    Args:
        function: of this rank's part; collectives of ``lockstep.distributed.jax`` work in it.
        mesh: whose first device does everything.
        in_specs: as ``jax.shard_map`` takes them, each split over the ranks or not split.
        out_specs: the same for what is returned.
    """
    num_ranks, device = int(mesh.size), mesh.devices.flat[0]

    def part(spec: PartitionSpec, tree: Tree) -> Tree:
        here = jax.device_put(tree, device)
        if spec != _SHARDED or num_ranks == 1:
            return here
        return jax.tree.map(lambda leaf: leaf.reshape(num_ranks, leaf.shape[0] // num_ranks, *leaf.shape[1:]), here)

    def whole(spec: PartitionSpec, tree: Tree) -> Tree:
        if spec == _SHARDED and num_ranks > 1:
            tree = jax.tree.map(lambda leaf: leaf.reshape(num_ranks * leaf.shape[1], *leaf.shape[2:]), tree)
        return jax.device_put(tree, NamedSharding(mesh, spec))

    on_ranks = function
    if num_ranks > 1:
        on_ranks = jax.vmap(function, _axes(in_specs), _axes(out_specs), axis_name=AXIS_NAME, axis_size=num_ranks)

    def run(*arguments: Any) -> Any:
        parts = jax.tree.map(part, in_specs, arguments)
        return jax.tree.map(whole, out_specs, on_ranks(*parts))

    return run


def _axes(specs: Any) -> Any:
    return jax.tree.map(lambda spec: 0 if spec == _SHARDED else None, specs)
