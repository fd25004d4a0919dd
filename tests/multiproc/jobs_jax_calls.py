"""One process of several, which calls a compiled sum over all ranks again and again and waits for none of the calls.

Run as ``python -m tests.multiproc.jobs_jax_calls PORT PROCESS NUM_PROCESSES NUM_DEVICES``; prints the total in the end.
"""

import sys
from typing import Any

import jax
import numpy as np

from lockstep.distributed.jax import REPLICATED, SHARDED, make_mesh, psum, shmap_vmap

NUM_CALLS = 300
NUM_SUMS = 20  # in each call


def join(port: int, process: int, num_processes: int, num_devices: int) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", num_devices)
    if num_processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.config.update("jax_enable_preemption_service", False)
        address, local = f"127.0.0.1:{port}", list(range(num_devices))
        jax.distributed.initialize(address, num_processes, process, initialization_timeout=60, local_device_ids=local)
    jax.devices()  # as a script does that has started JAX before it comes to lockstep


def add(total: Any, rows: Any) -> Any:
    """Return the total and NUM_SUMS times the sum over all rows: enough to do that Python would be ahead of it."""

    def one(total: Any, _: None) -> Any:
        return total + psum(rows.sum()), None

    return jax.lax.scan(one, total, None, length=NUM_SUMS)[0]


def main() -> None:
    join(*(int(argument) for argument in sys.argv[1:5]))
    ranks = make_mesh()
    run = ranks.compile(add, (REPLICATED, SHARDED), REPLICATED)
    each = shmap_vmap(lambda row: row + psum(row), ranks, SHARDED, SHARDED)
    rows = ranks.shard(np.arange(ranks.num_ranks, dtype=np.float32))
    total = ranks.replicate(np.float32(0))
    for _ in range(NUM_CALLS):
        total = run(total, rows)
    last = rows
    for _ in range(NUM_CALLS):
        last = each(rows)
    print(float(total), ranks.unshard(last).tolist())


if __name__ == "__main__":
    main()
