"""A script of the user's own that uses JAX: its processes meet, or are refused."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.multiproc.commands import free_port, lockstep, own_environment, started_together

SCRIPT = """
import sys

import numpy as np

from lockstep.distributed.jax import REPLICATED, SHARDED, get_global_ranks, init, make_mesh, psum

ranks = init(num_devices=2) if "meet" in sys.argv else make_mesh()
assert init() == ranks
total = ranks.compile(lambda rows: psum(rows.sum()), SHARDED, REPLICATED)(ranks.shard(np.arange(4.0)))
print(ranks.num_ranks, *get_global_ranks(), ranks.to_host(total))
"""
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
READS_LATE = """
import sys, time
from lockstep.distributed import torch_store

announce = torch_store.announce
torch_store.announce = lambda *arguments: time.sleep(1.0) or announce(*arguments)
sys.argv = ["script.py", "meet"]
exec(open("script.py").read())
"""
ALONE = "JAX knows of none but itself; call init() of lockstep.distributed.jax, or jax.distributed.initialize, before"


@pytest.fixture(autouse=True)
def _script() -> None:
    Path("script.py").write_text(SCRIPT)


def test_processes_of_the_launcher_meet() -> None:
    done = lockstep("train_multigpu", "--num_gpus", "2", "--device", "cpu", "--script", "script.py", "meet")
    assert done.returncode == 0, done.stderr
    assert "4 0 1 6.0" in done.stdout


def test_processes_meet_without_an_agent_that_keeps_their_store() -> None:
    of_job = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environments = [of_job | {"RANK": rank, "LOCAL_RANK": rank, "LOCKSTEP_DEVICE": "cpu"} for rank in ("0", "1")]
    with started_together([["script.py", "meet"], ["-c", READS_LATE]], environments) as processes:
        for process in processes:
            output, errors = process.communicate(timeout=120)
            assert process.returncode == 0, errors
            assert "6.0" in output


def test_processes_that_have_not_met_are_refused() -> None:
    started = subprocess.run(
        [*TORCHRUN, "script.py"], capture_output=True, text=True, timeout=120, env=own_environment({}), check=False
    )
    assert started.returncode != 0
    assert f"process 0 of 2 (RANK, WORLD_SIZE), and {ALONE}" in started.stderr


def test_processes_that_name_their_own_devices_are_alone_on_purpose() -> None:
    named = (
        "import jax; from lockstep.distributed.jax import make_mesh; print(make_mesh(jax.local_devices()).num_ranks)"
    )
    environment = own_environment({"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "JAX_PLATFORMS": "cpu"})
    command = [sys.executable, "-c", named]
    alone = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)
    assert (alone.returncode, alone.stdout) == (0, "1\n"), alone.stderr


def test_one_process_needs_nobody() -> None:
    for arguments, said in (["meet"], "2 0 1 6.0"), ([], "1 0 6.0"):
        command = [sys.executable, "script.py", *arguments]
        alone = subprocess.run(
            command, capture_output=True, text=True, timeout=120, env=own_environment({}), check=False
        )
        assert alone.returncode == 0, alone.stderr
        assert said in alone.stdout
