"""The pool of ranks that other tests use: what comes back from it, and what becomes of ranks that fail."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.rank_pool import ROOT, PerRank, RankError, RankPool

JOBS = "tests.multiproc.jobs_rank_pool"

# Starts a pool, says who its processes are, and waits to be killed.
OWNER = """
from tests.rank_pool import RankPool, RankServer
server = RankServer()
pool = RankPool(server, 2)
pids = [answer[-1] for answer in pool.run("tests.multiproc.jobs_rank_pool:add", 1, 1)]
print("started", pool._folder, *pids, server._process.pid, flush=True)
pool.run("tests.multiproc.jobs_rank_pool:fail_on", 1, "sleep")
"""


def assert_gone(pids: list[int], timeout_s: float = 10.0) -> None:
    """Wait until the processes have ended (a zombie has)."""

    def is_alive(pid: int) -> bool:
        try:
            return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return False

    deadline = time.monotonic() + timeout_s
    while any(map(is_alive, pids)):
        assert time.monotonic() < deadline, "processes are left"
        time.sleep(0.02)


def test_results_come_by_rank(ranks_4: RankPool) -> None:
    answers = ranks_4.run(f"{JOBS}:add", PerRank([1, 20, 300, 4000]), common := 5)
    assert [answer[:3] for answer in answers] == [(rank, 4, 4321 + common) for rank in range(4)]
    assert len({os.getpid(), *(answer[3] for answer in answers)}) == 5


def test_ranks_live_on(ranks_2: RankPool) -> None:
    first, second = ranks_2.run(f"{JOBS}:add", 1, 0), ranks_2.run(f"{JOBS}:add", 3, 0)
    assert [answer[2] for answer in first] == [2, 2]
    assert [answer[2] for answer in second] == [6, 6]
    assert [answer[3] for answer in first] == [answer[3] for answer in second] == ranks_2.pids


def test_ranks_work_where_the_test_does(ranks_2: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLOUR", "blue")
    for rank, seen in enumerate(ranks_2.run(f"{JOBS}:surroundings")):
        assert (seen["folder"], seen["COLOUR"], seen["num_threads"]) == (str(tmp_path), "blue", "1")
        assert [seen[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")] == [str(rank)] * 2 + [
            "2"
        ] * 2
    monkeypatch.delenv("COLOUR")
    assert "COLOUR" not in ranks_2.run(f"{JOBS}:surroundings")[0]
    assert "RANK" not in os.environ


def test_tensors_pass_both_ways(ranks_2: RankPool) -> None:
    given = {"a": torch.tensor([0.5, 3.0], dtype=torch.float64), "empty": torch.zeros(0, 2), "whole": torch.tensor(3)}
    for answer in ranks_2.run(f"{JOBS}:double", given):
        assert answer["a"].tolist() == [1.0, 6.0]
        assert answer["a"].dtype == torch.float64
        assert answer["empty"].shape == (0, 2)
        assert answer["whole"].item() == 6


@pytest.mark.parametrize(
    ("what", "said", "seen"),
    [
        ("raise", "raised ValueError: the ball is lost", "in raise_inside"),
        ("exit", "died (exit code 7)", ""),
        ("crash", "died (SIGABRT)", ""),
    ],
)
def test_a_failed_rank_is_named_and_the_others_are_not_waited_for(
    ranks_2: RankPool, what: str, said: str, seen: str
) -> None:
    before = ranks_2.run(f"{JOBS}:add", 1, 1) and ranks_2.pids
    began = time.monotonic()
    with pytest.raises(RankError) as caught:
        ranks_2.run(f"{JOBS}:fail_on", 1, what, timeout_s=60)
    assert time.monotonic() - began < 20
    assert caught.value.failures[1] == said
    message = str(caught.value)
    assert message.startswith(f"{JOBS}:fail_on: rank")
    assert f"rank 1 of 2 {said}" in message
    assert seen in message
    assert "--- rank 0: output ---\nprinted by rank 0" in message
    assert "--- rank 1: output ---\nprinted by rank 1" in message
    assert_gone(before)
    assert ranks_2.run(f"{JOBS}:add", 1, 1)[0][:3] == (0, 2, 3)


def test_a_hang_is_ended_and_shown(ranks_2: RankPool) -> None:
    ranks_2.run(f"{JOBS}:add", 1, 1)
    before = ranks_2.pids
    with pytest.raises(RankError) as caught:
        ranks_2.run(f"{JOBS}:fail_on", 1, "sleep", timeout_s=0.5)
    assert caught.value.failures == dict.fromkeys((0, 1), "did not return within 0.5 s")
    assert "in sleep_for_ever" in str(caught.value)  # the stack of rank 1
    assert "in all_gather" in str(caught.value)  # and that of rank 0
    assert_gone(before)
    assert ranks_2.run(f"{JOBS}:add", 1, 1)[1][:3] == (1, 2, 3)


@pytest.mark.parametrize("function", ["something_unpicklable", "no_such_job"])
def test_what_can_not_be_run_or_returned_is_an_error_of_the_rank(ranks_2: RankPool, function: str) -> None:
    with pytest.raises(RankError, match=function):
        ranks_2.run(f"{JOBS}:{function}")


def test_output_of_ranks_is_output_of_the_test(ranks_2: RankPool, capsys: pytest.CaptureFixture[str]) -> None:
    ranks_2.run(f"{JOBS}:speak")
    printed = "".join(f"--- rank {rank}: output ---\nprinted by rank {rank}\nand past Python\n" for rank in range(2))
    assert capsys.readouterr().out == printed
    ranks_2.run(f"{JOBS}:surroundings")
    assert capsys.readouterr().out == ""


def test_ranks_die_with_the_test_process() -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout is not None
        line = next(line for line in owner.stdout if line.startswith("started"))
        folder, *pids = line.split()[1:]
        assert len(pids) == 3
        time.sleep(0.2)  # rank 0 now waits for rank 1, which sleeps
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.communicate()
    assert_gone(list(map(int, pids)))
    assert not Path(folder).exists()
