"""One of two processes with two CPU devices each; prints what it found, in JSON, as its last line.

Run as ``python -m tests.multiproc.jobs_jax_mesh PORT PROCESS``.
"""

import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils

from lockstep.core.errors import RunError, UsageError
from lockstep.distributed import jax as vocabulary
from lockstep.distributed import jax_mesh
from lockstep.distributed.jax import REPLICATED, SHARDED, RankMesh
from lockstep.distributed.jax_sentinel import Sentinel

KINDS = (np.float64, np.uint32, np.bool_, jnp.bfloat16)


def join(port: str, process: int) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)
    assert not vocabulary.is_dist_initialized()
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, process, initialization_timeout=60, local_device_ids=[0, 1])
    assert vocabulary.is_dist_initialized()


def gather_text(text: str, tag: str) -> list[str]:
    """Every process's text; the arrays that carry it have one size."""
    own = np.zeros(1000, np.uint8)
    own[: len(text)] = np.frombuffer(text.encode(), np.uint8)
    return [bytes(row).rstrip(b"\0").decode() for row in multihost_utils.process_allgather(own)]


def collectives(ranks: RankMesh) -> dict[str, Any]:
    def function(rows: Any, one: Any) -> Any:
        return {
            "sum": vocabulary.psum(rows.sum()),
            "mean": vocabulary.pmean(rows.sum()),
            "max": vocabulary.pmax(rows.sum()),
            "min": vocabulary.pmin(rows.sum()),
            "all": vocabulary.all_gather(rows, tiled=True),
            "ones": vocabulary.psum(one),
            "moments": vocabulary.merge_over_ranks([vocabulary.Moments.of(rows[:, None])])[0].pack(),
        }

    run = ranks.compile(function, (SHARDED, REPLICATED), REPLICATED)
    try:
        ranks.compile(vocabulary.psum, SHARDED, REPLICATED, enable_jit=False)
        refusal = ""
    except UsageError as error:
        refusal = str(error)
    rows, one = ranks.shard(np.arange(8.0)), ranks.replicate(1.0)
    found = {name: array.tolist() for name, array in ranks.to_host(run(rows, one)).items()}
    return {"found": found, "not compiled": refusal}


def placement(ranks: RankMesh, process: int) -> dict[str, Any]:
    local = np.arange(4.0) + 10 * process
    array = ranks.shard_local({"rows": local})["rows"]
    jax_mesh._GATHER_BYTES = 1 << 7  # so that some arrays travel in several pieces
    whole = {str(np.dtype(kind)): np.arange(24).reshape(12, 2).astype(kind) for kind in KINDS}
    keys = jax.random.split(jax.random.key(3), 4)
    back = ranks.unshard(ranks.shard(whole | {"keys": keys}))
    copies = ranks.replicate({"host": np.arange(3.0), "device": jnp.arange(3.0), "again": array})
    return {
        "shape": array.shape,
        "here": [shard.data.tolist() for shard in array.addressable_shards],
        "whole": ranks.unshard(array).tolist(),
        "kinds": [
            bool((back[name] == value).all()) and back[name].dtype == value.dtype for name, value in whole.items()
        ],
        "keys": bool((back["keys"] == jax.random.key_data(keys)).all()),
        "copies": {name: value.tolist() for name, value in ranks.to_host(copies).items()},
        "one": vocabulary.unreplicate(copies)["host"].tolist(),
    }


def training(ranks: RankMesh) -> list[float]:
    """The mean of 0, ..., 7 is taken off the parameter, then clipped to 1."""
    optimizer = optax.sgd(1.0)
    update = vocabulary.gradient_update(lambda weight, rows: (weight * rows).mean(), optimizer)
    clipped = vocabulary.gradient_update(lambda weight, rows: (weight * rows).mean(), optimizer, max_grad_norm=1.0)

    def function(weight: Any, rows: Any) -> Any:
        _, once, state = update(weight, optimizer.init(weight), rows)
        return [once, clipped(once, state, rows)[1]]

    run = ranks.compile(function, (REPLICATED, SHARDED), REPLICATED)
    return [float(value) for value in ranks.to_host(run(ranks.replicate(0.0), ranks.shard(np.arange(8.0))))]


def population(ranks: RankMesh) -> dict[str, Any]:
    members = np.arange(15.0).reshape(5, 3)
    evaluate = vocabulary.shmap_vmap(lambda member: member.sum(), ranks, SHARDED, SHARDED)
    one_by_one = vocabulary.shmap_map(lambda member: member.sum(), ranks, SHARDED, SHARDED)(members)
    placed = vocabulary.tree_device_put(members[:4], ranks)
    keys = vocabulary.split_key_to_devices(jax.random.key(7))
    draw = ranks.compile(lambda keys: jax.random.bits(keys[0], (1, 2)), SHARDED, SHARDED)
    gather = ranks.compile(lambda rows: rows, SHARDED, SHARDED)
    return {
        "several": ranks.to_host(evaluate(members)).tolist(),
        "from copies": ranks.to_host(evaluate(ranks.replicate(members))).tolist(),
        "one by one": ranks.to_host(one_by_one).tolist(),
        "placed": [shard.data.tolist() for shard in placed.addressable_shards],
        "bits": ranks.unshard(draw(keys)).tolist(),
        "rows": ranks.unshard(gather(placed)).tolist(),
    }


def sentinel(ranks: RankMesh, process: int) -> list[str]:
    def line(tree: Any, iteration: int = 40) -> str:
        try:
            Sentinel(ranks, 1, gather_text).check(iteration, tree)
        except RunError as error:
            return str(error)
        return ""

    tree = ranks.replicate({"weight": np.zeros(3), "count": np.int32(2)})
    copies = [jax.device_put(np.zeros(3) + (rank == 2), ranks.mesh.devices[rank]) for rank in ranks.local_ranks]
    changed = tree | {"weight": jax.make_array_from_single_device_arrays((3,), ranks.replicated, copies)}
    fewer = {"weight": tree["weight"]} if process == 1 else tree
    return [line(tree), line(changed), line(tree, 40 + process), line(fewer)]


def main() -> None:
    port, process = sys.argv[1], int(sys.argv[2])
    join(port, process)
    with jax.enable_x64(True):
        ranks = vocabulary.make_mesh()
        found = {
            "ranks": [ranks.num_ranks, ranks.local_ranks, ranks.is_multiprocess],
            "global ranks": vocabulary.get_global_ranks().tolist(),
            "processes": [device.process_index for device in ranks.mesh.devices],
            "collectives": collectives(ranks),
            "placement": placement(ranks, process),
            "training": training(ranks),
            "population": population(ranks),
            "sentinel": sentinel(ranks, process),
        }
    print(json.dumps(found))
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
