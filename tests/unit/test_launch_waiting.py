"""A launch on which nothing moves says what it waits for, and not too often."""

import json
import os
import tempfile
from pathlib import Path

import pytest

from lockstep.core.gpu_mask import Gpu
from lockstep.core.outcome import ATTEMPT_DIR, note_joined, write_pid
from lockstep.launch import waiting
from lockstep.launch.plan import Options, Work, make_plan
from lockstep.launch.rendezvous import Nodes
from lockstep.launch.waiting import Waiting

GPUS = [Gpu(index, f"GPU-{index}", "H200", "0", 1, "1", ()) for index in range(3)]


class Silence:
    """A launch with a clock that the test sets."""

    def __init__(self, nodes: Nodes, is_script: bool = False, num_gpus: int = 2) -> None:
        plan = make_plan(Options(num_gpus, nodes), Work(("-m", "x"), is_script=is_script), GPUS, {}, job="abc")
        self.folder = plan.attempt_dir
        self.folder.mkdir(parents=True)
        self.lines: list[str] = []
        self._now_s = 1000.0
        self._waiting = Waiting(plan, lambda line, to_stderr: self.lines.append(line), lambda: self._now_s)

    def start_ranks(self) -> None:
        """Do as torchrun's agent does when it starts the ranks."""
        ranks = [{"local_rank": rank, "rank": rank, "stdout": "", "stderr": ""} for rank in (0, 1)]
        (self.folder / "logs.json").write_text(json.dumps({"restart": 0, "ranks": ranks}))

    def pass_s(self, seconds: int) -> list[str]:
        """Let time pass; return what was said in it."""
        before = len(self.lines)
        for _ in range(seconds):
            self._now_s += 1.0
            self._waiting.look()
        return self.lines[before:]


@pytest.fixture(autouse=True)
def _temporary_folder_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


STATIC = Nodes("2", "1", "127.0.0.1", "2345")


def test_nodes_that_do_not_meet_are_told_after_half_a_minute_and_then_once_a_minute() -> None:
    silence = Silence(STATIC)
    assert silence.pass_s(29) == []
    (line,) = silence.pass_s(1)
    assert line == (
        "lockstep: after 30 s still waiting: the nodes have not met at 127.0.0.1:2345; are all launchers up, or is "
        "something else listening there?"
    )
    assert silence.pass_s(59) == []
    (line,) = silence.pass_s(1)
    assert line.startswith("lockstep: after 90 s")


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        (
            Nodes(rdzv_endpoint="127.0.0.1:99"),
            "this node has not found its meeting point at 127.0.0.1:99; is something else",
        ),
        (Nodes(), "torchrun's agent is to start the ranks of this node"),
        (Nodes("2", rdzv_endpoint="127.0.0.1:99", rdzv_id="j"), "the nodes have not met at 127.0.0.1:99; are all"),
    ],
)
def test_what_is_waited_for_before_ranks_start(nodes: Nodes, words: str) -> None:
    (line,) = Silence(nodes).pass_s(31)
    assert words in line


def test_ranks_that_start_but_do_not_join_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    silence = Silence(STATIC)
    assert silence.pass_s(20) == []
    silence.start_ranks()
    assert silence.pass_s(30) == []  # it has moved 20 s ago
    (line,) = silence.pass_s(2)
    assert line.endswith("still waiting: ranks 0, 1 of this node to start")

    for rank in (0, 1):
        write_pid(silence.folder, rank, os.getpid())
    monkeypatch.setattr(waiting, "environment_of", lambda pid: {"MASTER_ADDR": "fd00::1", "MASTER_PORT": "77"})
    (line,) = silence.pass_s(61)
    assert line.endswith("the ranks of this node have started and are to meet all others at [fd00::1]:77")

    monkeypatch.setenv(ATTEMPT_DIR, str(silence.folder))
    note_joined(1)
    assert silence.pass_s(600) == []


def test_ranks_of_a_script_need_not_join() -> None:
    silence = Silence(STATIC, is_script=True)
    silence.start_ranks()
    assert silence.pass_s(600) == []


def test_one_rank_has_nobody_to_join() -> None:
    silence = Silence(Nodes(), num_gpus=1)
    silence.start_ranks()
    for rank in (0, 1):
        write_pid(silence.folder, rank, os.getpid())
    assert silence.pass_s(600) == []


def test_a_rank_without_a_launcher_has_nobody_to_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    note_joined(0)
    monkeypatch.setenv(ATTEMPT_DIR, str(tmp_path / "gone"))
    note_joined(0)
    assert list(tmp_path.iterdir()) == []
