"""Gloo's threads leave the core to the rank that they work for."""

import os
import subprocess
import sys
import threading

import pytest

from lockstep.distributed.gloo_threads import started_as_batch_work
from tests.multiproc.commands import free_port, own_environment

pytestmark = pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="only Linux has SCHED_BATCH")


def policy_of_a_new_thread() -> int:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(os.sched_getscheduler(0)))
    thread.start()
    thread.join()
    return found[0]


def test_threads_that_are_started_meanwhile_are_batch_work() -> None:
    assert (os.sched_getscheduler(0), policy_of_a_new_thread()) == (os.SCHED_OTHER, os.SCHED_OTHER)
    with pytest.raises(LookupError), started_as_batch_work():
        assert policy_of_a_new_thread() == os.SCHED_BATCH
        raise LookupError
    assert (os.sched_getscheduler(0), policy_of_a_new_thread()) == (os.SCHED_OTHER, os.SCHED_OTHER)


def test_a_policy_that_the_user_has_chosen_stays() -> None:
    def run() -> None:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        with started_as_batch_work():
            found.append(os.sched_getscheduler(0))
        found.append(os.sched_getscheduler(0))

    found: list[int] = []
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [os.SCHED_IDLE] * 2


JAX_RANK = """
import os, sys
import jax
import lockstep.distributed.jax_group as jax_group

jax_group.join("cpu")
policies = {thread: os.sched_getscheduler(int(thread)) for thread in os.listdir("/proc/self/task")}
assert policies.pop(str(os.getpid())) == os.SCHED_OTHER
print(len(policies), list(policies.values()).count(os.SCHED_BATCH))
"""


def test_of_a_rank_of_jax_gloos_threads_alone_are_batch_work() -> None:
    pytest.importorskip("jax")
    job = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", JAX_RANK],
            env=own_environment(job | {"RANK": str(rank), "LOCAL_RANK": str(rank)}),
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for process in processes:
        said, _ = process.communicate(timeout=120)
        assert process.returncode == 0
        threads, batch = map(int, said.splitlines()[-1].split())
        assert 0 < batch < threads
