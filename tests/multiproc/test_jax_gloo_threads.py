"""Of a rank of JAX gloo's threads alone are batch work, which leave the core to the rank."""

import os

import pytest

from tests.multiproc.commands import free_port, started_together

RANK = """
import os
import lockstep.distributed.jax_group as jax_group

jax_group.join("cpu")
policies = {thread: os.sched_getscheduler(int(thread)) for thread in os.listdir("/proc/self/task")}
assert policies.pop(str(os.getpid())) == os.SCHED_OTHER
print(len(policies), list(policies.values()).count(os.SCHED_BATCH))
"""


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="only Linux has SCHED_BATCH")
def test_gloos_threads_alone_are_batch_work() -> None:
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}"}
    environments = [place | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    with started_together([["-c", RANK]] * 2, environments) as processes:
        for process in processes:
            said, errors = process.communicate(timeout=120)
            assert process.returncode == 0, errors
            threads, batch = map(int, said.splitlines()[-1].split())
            assert 0 < batch < threads
