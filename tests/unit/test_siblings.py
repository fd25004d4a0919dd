"""Ranks under a bare torchrun that look after one another, as real processes that need no torch."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.core import beats, process_control
from lockstep.core.blame import Limits, Verdict
from lockstep.distributed.siblings import Siblings
from tests.multiproc.commands import wait_for
from tests.unit.heartbeat_fixtures import RANK_OF_TWO, WAITS, Rank, folders


def test_a_stopped_rank_is_ended_by_the_other(start_rank: Callable[..., Rank], temporary: Path) -> None:
    script = RANK_OF_TWO.format(work="work_until(lambda: False)")
    healthy = start_rank(WAITS, 0, LOCKSTEP_HANG_TIMEOUT_S="5")
    stopped = start_rank(script, 1, LOCKSTEP_HANG_TIMEOUT_S="5")
    assert (healthy.says(), stopped.says()) == ("ready", "ready")
    (folder,) = folders(temporary)
    assert folder.stat().st_mode & 0o777 == 0o700
    stopped.send(signal.SIGSTOP)
    assert stopped.end()[0] == -signal.SIGKILL
    assert (folder / "failed_0").exists()  # what torchrun's SIGTERM to the other will mean
    Path("enough").touch()
    code, errors = healthy.end()
    assert code == 0
    line = errors.splitlines()[0]
    assert line.startswith("lockstep: error: rank 1 (on ")
    assert f"pid {stopped.pid}) was stopped by a signal" in line
    assert line.endswith("in iteration 10, phase rollout; rank 0 ends it, and with it the job")
    assert folders(temporary) == []


def test_a_rank_that_hangs_is_ended_with_its_stack(start_rank: Callable[..., Rank], temporary: Path) -> None:
    script = RANK_OF_TWO.format(work="hang_in_c()")
    stuck = start_rank(script, 0, LOCKSTEP_HANG_TIMEOUT_S="5")
    healthy = start_rank(WAITS, 1, LOCKSTEP_HANG_TIMEOUT_S="5")
    assert (healthy.says(), stuck.says()) == ("ready", "ready")
    assert stuck.end()[0] == -signal.SIGKILL
    Path("enough").touch()
    code, errors = healthy.end()
    assert code == 0
    line, *stack = errors.splitlines()
    assert f"rank 0 (on {os.uname().nodename}, pid {stuck.pid}) is stuck: its main thread has not moved for" in line
    assert line.endswith("in iteration 10, phase rollout; rank 1 ends it, and with it the job")
    assert stack[0].endswith("in hang_in_c")
    assert stack[-1].endswith("in <module>")


def test_the_first_rank_that_is_well_ends_all_that_are_not(start_rank: Callable[..., Rank], temporary: Path) -> None:
    environment = {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", "LOCKSTEP_HANG_TIMEOUT_S": "6"}
    scripts = {
        0: RANK_OF_TWO.format(work="hang_with_the_lock()"),
        1: WAITS,
        2: RANK_OF_TWO.format(work="work_until(lambda: False)"),
    }
    ranks = [start_rank(script, rank, **environment) for rank, script in scripts.items()]
    assert [rank.says() for rank in ranks] == ["ready"] * 3
    ranks[2].send(signal.SIGSTOP)
    assert [ranks[rank].end()[0] for rank in (0, 2)] == [-signal.SIGKILL] * 2
    Path("enough").touch()
    code, errors = ranks[1].end()
    assert code == 0
    lines = [line for line in errors.splitlines() if line.endswith("; rank 1 ends it, and with it the job")]
    assert len(lines) == 2
    (silent,) = (line for line in lines if "gave no sign of life for" in line and "stopped" not in line)
    assert silent.startswith("lockstep: error: rank 0 ")


def test_a_rank_with_a_title_over_its_environment_is_ended_too(
    start_rank: Callable[..., Rank], temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = start_rank(RANK_OF_TWO.format(work="work_until(lambda: False)"), 1)
    assert stopped.says() == "ready"
    (folder,) = folders(temporary)
    stopped.send(signal.SIGSTOP)
    verdict = Verdict(1, stopped.pid, "stopped", 11.0, beats.read_beats(folder)[1])
    said: list[str] = []

    def ended(parent: int) -> list[str]:
        monkeypatch.setattr(os, "getppid", lambda: parent)
        Siblings(folder, 0, 0, 2, Limits(20.0), said.append)._end(verdict)
        return said

    monkeypatch.setattr(process_control, "environment_of", lambda pid: {"title": "of its own"})
    assert ended(1) == []  # not of the agent that started this rank
    monkeypatch.setattr(process_control, "environment_of", lambda pid: {"RANK": "7"})
    assert ended(os.getpid()) == []
    monkeypatch.setattr(process_control, "environment_of", lambda pid: {"title": "of its own"})
    assert "rank 1 " in ended(os.getpid())[0]
    assert stopped.end()[0] == -signal.SIGKILL


def test_a_rank_that_was_killed_is_noted_as_failed(start_rank: Callable[..., Rank], temporary: Path) -> None:
    waiting = start_rank(WAITS, 0)
    assert waiting.says() == "ready"
    (folder,) = folders(temporary)
    assert start_rank(RANK_OF_TWO.format(work="pass"), 1).end()[0] == 0
    time.sleep(2.5)  # some looks
    assert not (folder / "failed_0").exists()  # it ended well
    killed = start_rank(RANK_OF_TWO.format(work="work_until(lambda: False)"), 1)
    assert killed.says() == "ready"
    killed.send(signal.SIGKILL)
    assert killed.end()[0] == -signal.SIGKILL
    wait_for((folder / "failed_0").exists)  # what torchrun's SIGTERM to the other will mean
    Path("enough").touch()
    assert waiting.end() == (0, "")


def test_a_rank_that_fails_in_a_script_is_noted_as_failed(start_rank: Callable[..., Rank], temporary: Path) -> None:
    waiting = start_rank(WAITS, 0, LOCKSTEP_HANG_TIMEOUT_S="0")  # which looks at nobody
    assert waiting.says() == "ready"
    (folder,) = folders(temporary)
    script = """
from lockstep.distributed import torch_group
torch_group.is_joined = lambda: True
torch_group._end_at_once_on_failure()
heartbeat.begin()
raise LookupError("planted")
"""
    code, errors = start_rank(script, 1).end()
    assert (code, errors.splitlines()[-1]) == (1, "LookupError: planted")
    assert (folder / "failed_0").exists()
    assert beats.read_beats(folder).keys() == {0}
    Path("enough").touch()
    assert waiting.end() == (0, "")


class Pair:
    """Two ranks, which wait in the same exchange for ever and look at one another; whom one would end is noted."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        self.ended: list[tuple[int, int]] = []
        self._alive = []
        monkeypatch.setattr(time, "monotonic", lambda: self.now_s)
        monkeypatch.setattr(Siblings, "_end", lambda watch, verdict: self.ended.append((watch._rank, verdict.rank)))
        for rank in (0, 1):
            beats.open_beats(folder, rank, 0)
            beats.enter("rollout")
            beats.at_iteration(1)
            beats.enter("rollout")
            beats.exchanges_on_device("gradients")
            assert beats._writer is not None
            self._alive.append(beats._writer.alive)
        beats.close_beats()
        self.watches = [Siblings(folder, rank, 0, 2, Limits(20.0), print) for rank in (0, 1)]

    def after(self, seconds: float) -> None:
        self.now_s += seconds
        for alive in self._alive:
            alive()
        for watch in self.watches:
            watch.look()


def test_time_in_which_nobody_looked_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(tmp_path, monkeypatch)
    pair.after(1.0)
    pair.after(3600.0)  # all were stopped, or the host had no time for them
    for _ in range(19):
        pair.after(1.0)
    assert pair.ended == []
    for _ in range(3):
        pair.after(1.0)
    assert pair.ended == [(1, 0)]
