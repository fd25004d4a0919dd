"""Of a rank of JAX gloo's threads alone are batch work, which leave the core to the rank."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.multiproc.commands import free_port, own_environment

RANK = """
import os
import lockstep.distributed.jax_group as jax_group

jax_group.join("cpu")
policies = {thread: os.sched_getscheduler(int(thread)) for thread in os.listdir("/proc/self/task")}
assert policies.pop(str(os.getpid())) == os.SCHED_OTHER
print(len(policies), list(policies.values()).count(os.SCHED_BATCH))
"""


@pytest.fixture
def job() -> Iterator["list[subprocess.Popen[str]]"]:
    """Two ranks of JAX that meet and end."""
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RANK],
            env=own_environment(place | {"RANK": str(rank), "LOCAL_RANK": str(rank)}),
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="only Linux has SCHED_BATCH")
def test_gloos_threads_alone_are_batch_work(job: "list[subprocess.Popen[str]]") -> None:
    for process in job:
        said, _ = process.communicate(timeout=120)
        assert process.returncode == 0
        threads, batch = map(int, said.splitlines()[-1].split())
        assert 0 < batch < threads
