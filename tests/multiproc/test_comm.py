"""The communicator of several processes: bits, rows, text and errors between real ranks."""

import os
import subprocess
import sys
import time
from typing import Any

import pytest
import torch

from tests.multiproc import jobs_comm
from tests.multiproc.commands import free_port
from tests.rank_pool import RankPool

JOBS = "tests.multiproc.jobs_comm"


def test_a_broadcast_brings_rank_0s_bits_whatever_the_type(ranks_2: RankPool, ranks_4: RankPool) -> None:
    expected = {name: jobs_comm.bits(tensor) for name, tensor in jobs_comm.tensors_of(0).items()}
    for pool in (ranks_2, ranks_4):
        assert pool.run(f"{JOBS}:broadcast") == [expected] * pool.world_size


@pytest.mark.parametrize("counts", [[1, 2, 0, 3], [0, 0, 0, 0], [0, 0, 2, 0], [2, 2, 2, 2]])
@pytest.mark.parametrize(("dtype", "width"), [(torch.float64, (2,)), (torch.bool, ()), (torch.int16, (1, 3))])
def test_rows_come_in_the_order_of_ranks(
    ranks_4: RankPool, counts: list[int], dtype: torch.dtype, width: tuple[int, ...]
) -> None:
    results = ranks_4.run(f"{JOBS}:gather_rows", counts, dtype, width)
    entries = [10 * rank + row for rank, count in enumerate(counts) for row in range(count)]
    whole = torch.tensor(entries).reshape(-1, *(1 for _ in width)).expand(sum(counts), *width).to(dtype)
    assert results[0] == whole.double().tolist()
    assert [len(own) for own in results[1:]] == counts[1:]


def test_texts_of_any_length(ranks_4: RankPool) -> None:
    texts = ["", "für alle", "x" * 5000, "\0\n"]
    assert ranks_4.run(f"{JOBS}:gather_text", texts) == [texts] * 4
    assert ranks_4.run(f"{JOBS}:gather_text", [""] * 4) == [[""] * 4] * 4


@pytest.mark.parametrize(
    ("fault", "here", "there"),
    [
        ("", "fine, größer", "fine, größer"),
        ("usage", "UsageError True: no such thing", "UsageError True: no such thing"),
        ("run", "RunError True: the disk is full", "RunError True: the disk is full"),
        ("bug", "as it was: oh\nno", "RunError True: rank 0 failed: ZeroDivisionError: oh"),
    ],
)
def test_what_rank_0_does_for_all_ends_alike_on_all(ranks_2: RankPool, fault: str, here: str, there: str) -> None:
    assert ranks_2.run(f"{JOBS}:on_main", fault) == [here, there]


def test_waiting_is_measured_where_it_happens(ranks_2: RankPool) -> None:
    (late, late_again), (early, early_again) = ranks_2.run(f"{JOBS}:wait_s", [0.5, 0.0])
    assert early > 0.3
    assert late < early
    assert (late_again, early_again) == (0.0, 0.0)


# --- joining -------------------------------------------------------------------------------------------------------

JOIN = """
import sys
from lockstep.core.errors import LockstepError
from lockstep.distributed import torch_group
try:
    for _ in range(2):
        topology = torch_group.setup()
    torch_group.barrier()
    torch_group.cleanup()
    torch_group.cleanup()
    torch_group.barrier()
    print("joined", topology.world_size)
except LockstepError as error:
    print(error)
"""


def start(port: int, rank: int, world_size: int, **variables: str) -> "subprocess.Popen[str]":
    job = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOCKSTEP_JOIN_TIMEOUT_S": 3, "LOCKSTEP_PIN": 0}
    environment = {name: str(value) for name, value in (job | address).items()} | variables
    return subprocess.Popen(
        [sys.executable, "-c", JOIN], env=os.environ | environment, stdout=subprocess.PIPE, text=True
    )


def ends(processes: list[Any]) -> list[str]:
    return [process.communicate(timeout=60)[0].strip() for process in processes]


def test_joining_twice_and_leaving_twice_is_joining_and_leaving(tmp_path: Any) -> None:
    port = free_port()
    debug = {"LOCKSTEP_DEBUG_COLLECTIVES": "1", "XDG_CACHE_HOME": str(tmp_path)}
    assert ends([start(port, rank, 2, **debug) for rank in range(2)]) == ["joined 2"] * 2


def test_ranks_that_do_not_come_are_named(tmp_path: Any) -> None:
    began = time.monotonic()
    port = free_port()
    processes = [start(port, rank, 4, XDG_CACHE_HOME=str(tmp_path)) for rank in (0, 2)]
    for said in ends(processes):
        assert said.startswith("ranks 1 and 3 of 4 did not start within 3 s; look at their logs")
    assert time.monotonic() - began < 40


def test_a_store_that_nobody_offers_is_named(tmp_path: Any) -> None:
    port = free_port()
    (said,) = ends([start(port, 1, 2, XDG_CACHE_HOME=str(tmp_path))])
    assert f"rank 1 can't reach the job's store at 127.0.0.1:{port}" in said
