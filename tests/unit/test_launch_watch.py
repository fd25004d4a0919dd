"""The launcher's watch: which process is ended, and when the launcher must end the job itself."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep.cli.launch_request import options_of, split
from lockstep.core import process_control
from lockstep.core.blame import HANG_TIMEOUT, Limits, ProcessState, process_state
from lockstep.core.errors import UsageError
from lockstep.core.outcome import RankOutcome, read_verdicts, write_outcome
from lockstep.core.stack_dump import read_main_thread, stack_path
from lockstep.launch import watch
from lockstep.launch.plan import JOB, Options, Work, make_plan
from lockstep.launch.rendezvous import Nodes
from lockstep.launch.watch import Watch

TIMEOUT_S = 60.0

# A rank that beats no more, as if all of its threads stood still, and that answers when it is asked for its stack.
RANK = """
import os, sys, time
from pathlib import Path
from lockstep.core import beats, stack_dump
folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
if sys.argv[2] == "beating":
    stack_dump.answer(stack_dump.stack_path(folder, rank))
    beats.open_beats(folder, rank, 0)
    for _ in range(2):  # the first rollout counts as compilation
        beats.enter("rollout")
        beats.at_iteration(11)
    beats.enter("rollout")
(folder / f"ready_{rank}").touch()
def stand_still():
    while True:
        time.sleep(0.05)
stand_still()
"""


class Node:
    """Ranks of one node, children of this process as of torchrun's agent, and a watch with a clock that is set."""

    def __init__(self, state_of: Callable[[int], ProcessState] = process_state, **options: Any) -> None:
        work = Work(("-m", "x"), "cpu", is_script=True, has_phases=True)
        plan = make_plan(Options(2, **options), work, (), {}, job="abc")
        self.folder = plan.attempt_dir
        self.folder.mkdir(parents=True)
        self.note_start(0)
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self._ahead_s = 0.0
        self.watch = Watch(plan, os.getpid(), lambda: time.monotonic() + self._ahead_s, state_of)

    def note_start(self, restart: int) -> None:
        """Do as torchrun's agent does when it starts the ranks."""
        ranks = [{"local_rank": rank, "rank": rank, "stdout": "", "stderr": ""} for rank in (0, 1)]
        (self.folder / "logs.json").write_text(json.dumps({"restart": restart, "ranks": ranks}))

    def start(self, rank: int, job: str = "abc", how: str = "beating") -> subprocess.Popen[bytes]:
        """Start a rank, and return when it stands still."""
        environment = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", JOB: job}
        command = [sys.executable, "-c", RANK, str(self.folder), how]
        self.processes[rank] = subprocess.Popen(command, env=os.environ | environment)
        deadline = time.monotonic() + TIMEOUT_S
        while not (self.folder / f"ready_{rank}").exists():
            assert time.monotonic() < deadline and self.processes[rank].poll() is None
            time.sleep(0.02)
        return self.processes[rank]

    def stop(self, rank: int) -> subprocess.Popen[bytes]:
        """Stop a rank's process."""
        process = self.processes[rank]
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        return process

    def pass_s(self, seconds: int) -> None:
        """Let time pass, with the looks that come in it."""
        for _ in range(seconds):
            self._ahead_s += 1.0
            self.watch.look()

    def sleep_s(self, seconds: float) -> None:
        """Let time pass in which the launcher can't look."""
        self._ahead_s += seconds
        self.watch.look()


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., Node]]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made: list[Node] = []

    def make(*arguments: Any, **options: Any) -> Node:
        made.append(Node(*arguments, **options))
        return made[-1]

    yield make
    for process in (process for node in made for process in node.processes.values()):
        process.kill()
        process.wait()


def has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Return whether a process is gone now; one that was killed is so in a moment."""
    try:
        return process.wait(0.5) is not None
    except subprocess.TimeoutExpired:
        return False


def test_a_stopped_rank_writes_down_where_it_is_and_is_killed(nodes: Callable[..., Node]) -> None:
    node = nodes()
    node.start(1)
    process = node.stop(1)
    node.pass_s(5)
    assert not has_ended(process)
    node.pass_s(15)
    assert has_ended(process)
    assert process.returncode == -signal.SIGKILL
    (verdict,) = node.watch.verdicts(0).values()
    assert (verdict.rank, verdict.kind, verdict.beat.phase, verdict.beat.iteration) == (1, "stopped", "rollout", 11)
    assert any("in stand_still" in line for line in read_main_thread(stack_path(node.folder, 1)))
    assert node.watch.verdicts(1) == {}


def test_a_rank_that_was_stopped_before_its_first_beat_is_killed(nodes: Callable[..., Node]) -> None:
    node = nodes()
    node.start(1, how="speechless")
    process = node.stop(1)
    node.pass_s(6)
    assert not has_ended(process)
    node.pass_s(15)
    assert has_ended(process)
    assert node.watch.verdicts(0)[1].kind == "stopped"


def test_time_in_which_the_launcher_could_not_look_counts_for_nothing(nodes: Callable[..., Node]) -> None:
    node = nodes()
    node.start(0)
    node.start(1, how="speechless")
    process = node.stop(1)
    node.pass_s(6)
    node.sleep_s(3600.0)
    node.pass_s(6)
    assert not has_ended(process)
    assert node.watch.verdicts(0) == {}
    node.pass_s(15)
    assert has_ended(process)


def test_one_look_proves_nothing(nodes: Callable[..., Node]) -> None:
    state: ProcessState = "running"
    node = nodes(lambda pid: state)
    process = node.start(0)
    for _ in range(15):
        state = "running"
        node.pass_s(1)
        state = "traced"  # a debugger comes and goes
        node.pass_s(1)
    assert not has_ended(process)
    state = "running"
    node.pass_s(2)
    assert has_ended(process)


def test_processes_of_another_start_or_job_are_let_alone(nodes: Callable[..., Node]) -> None:
    node = nodes()
    node.start(0)
    node.start(1, job="another")
    before = node.processes[0]
    node.note_start(1)
    node.pass_s(30)
    assert not has_ended(before)  # its beats are of the start before
    node.note_start(0)
    node.pass_s(30)
    assert has_ended(before)
    assert not has_ended(node.processes[1])


def test_a_rank_with_a_title_over_its_environment_is_killed_too(
    nodes: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    node = nodes()
    process = node.start(1)
    monkeypatch.setattr(process_control, "environment_of", lambda pid: {"title": "of its own"})
    node.pass_s(30)
    assert has_ended(process)
    assert node.watch.verdicts(0)[1].kind == "silent"


def test_who_is_not_killed_has_no_verdict_and_hides_no_other(nodes: Callable[..., Node]) -> None:
    node = nodes()
    node.start(0, job="another")
    node.pass_s(5)
    process = node.start(1)
    node.pass_s(40)
    assert not has_ended(node.processes[0])
    assert has_ended(process)
    assert node.watch.verdicts(0).keys() == {1}


def test_a_job_that_lives_keeps_its_folder_from_getting_old(nodes: Callable[..., Node]) -> None:
    node = nodes(hang_timeout_s=0.0)

    for _ in range(2):
        os.utime(node.folder, (0, time.time() - 25 * 3600))
        node.pass_s(601)
        assert time.time() - node.folder.stat().st_mtime < 3600


def test_the_watch_can_be_switched_off(nodes: Callable[..., Node]) -> None:
    node = nodes(hang_timeout_s=0.0)
    node.start(1)
    process = node.stop(1)
    node.pass_s(700)
    assert not has_ended(process)


def test_a_rank_that_only_does_not_end_when_another_has_failed_is_no_cause(nodes: Callable[..., Node]) -> None:
    node = nodes()
    write_outcome(node.folder, RankOutcome(0, 1, "the disk is full", time_s=time.time() - 60.0))
    process = node.start(1)
    node.pass_s(30)
    assert has_ended(process)  # sooner than torchrun would
    assert node.watch.verdicts(0) == {}


@pytest.mark.parametrize(("code", "is_blamed"), [(1, False), (0, True)])
def test_a_rank_that_has_said_why_it_failed_may_be_slow_to_end(
    nodes: Callable[..., Node], code: int, is_blamed: bool
) -> None:
    node = nodes()
    process = node.start(1)
    write_outcome(node.folder, RankOutcome(1, code, "the disk is full"))
    node.pass_s(45)
    assert has_ended(process) == is_blamed
    node.pass_s(30)
    assert has_ended(process)  # it must not last for ever
    assert (1 in node.watch.verdicts(0)) == is_blamed
    assert bool(read_verdicts(node.folder, 0)[1]) == is_blamed


def test_why_a_rank_is_killed_is_noted_before_it_is(
    nodes: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    node = nodes()
    node.start(1)
    noted: list[dict[int, str]] = []
    monkeypatch.setattr(watch, "send", lambda pid, number: noted.append(read_verdicts(node.folder, 0)))
    node.pass_s(15)
    assert len(noted) == 1
    assert noted[0][1].startswith("gave no sign of life for 1")


def outcomes(node: Node, *codes: int) -> None:
    for rank, code in enumerate(codes):
        write_outcome(node.folder, RankOutcome(rank, code, "words"))


def test_an_agent_that_outstays_failed_ranks_is_told(nodes: Callable[..., Node]) -> None:
    node = nodes()
    outcomes(node, 1)
    process = node.start(1, how="speechless")
    node.pass_s(30)
    assert not node.watch.is_stranded  # a rank is left
    process.kill()
    process.wait()
    node.pass_s(6)
    assert not node.watch.is_stranded
    node.pass_s(15)
    assert node.watch.is_stranded


@pytest.mark.parametrize("codes", [(), (0, 0), (75, 75), (130, 75)])
def test_an_agent_may_wait_for_other_nodes_after_ranks_that_ended_well(
    nodes: Callable[..., Node], codes: tuple[int, ...]
) -> None:
    node = nodes(nodes=Nodes("2", "1", "127.0.0.1", "2345"))
    outcomes(node, *codes)
    node.pass_s(400)
    assert not node.watch.is_stranded


def test_an_agent_that_outstays_ranks_that_all_ended_well_on_the_only_node_is_told(nodes: Callable[..., Node]) -> None:
    node = nodes()
    outcomes(node, 75)
    node.pass_s(400)
    assert not node.watch.is_stranded  # the other rank has not said how it ended
    outcomes(node, 75, 0)
    node.pass_s(6)
    assert not node.watch.is_stranded
    node.pass_s(10)
    told = node.watch.is_stranded, node.watch.agent_is_stopped, node.watch.agent_trouble
    assert told == (True, False, "did not end with its ranks")


def test_an_agent_that_is_stopped_is_told_while_its_ranks_train(nodes: Callable[..., Node]) -> None:
    state: ProcessState = "stopped"
    node = nodes(lambda pid: state if pid == os.getpid() else "screen")
    node.start(0)
    node.pass_s(6)
    state = "running"
    node.pass_s(1)
    state = "stopped"
    node.sleep_s(3600.0)
    node.pass_s(6)
    assert not node.watch.is_stranded  # it went on in between, and the host slept
    node.pass_s(6)
    told = node.watch.is_stranded, node.watch.agent_is_stopped, node.watch.agent_trouble
    assert told == (True, True, "was stopped by a signal (SIGSTOP or the like)")


def test_without_a_watch_an_agent_may_be_stopped(nodes: Callable[..., Node]) -> None:
    node = nodes(lambda pid: "stopped", hang_timeout_s=0.0)
    node.pass_s(60)
    assert not node.watch.is_stranded


def test_an_agent_may_wait_for_other_nodes_before_it_starts_ranks_again(nodes: Callable[..., Node]) -> None:
    node = nodes(max_restarts=1)
    outcomes(node, 1, 1)
    node.pass_s(5)
    (node.folder / "meeting_0").touch()
    node.pass_s(400)
    assert not node.watch.is_stranded
    node.note_start(1)
    for rank in (0, 1):
        write_outcome(node.folder, RankOutcome(rank, 1, "words", restart=1))
    node.pass_s(20)
    assert node.watch.is_stranded


def test_an_agent_that_does_not_come_to_meet_the_others_is_told_with_restarts_left(nodes: Callable[..., Node]) -> None:
    node = nodes(max_restarts=3)
    outcomes(node, 1, 1)
    node.pass_s(20)
    assert not node.watch.is_stranded  # the network may be back in a moment
    node.sleep_s(3600.0)
    node.pass_s(5)
    assert not node.watch.is_stranded  # nobody could go on in that time
    node.pass_s(40)
    assert node.watch.is_stranded


def test_a_rank_that_a_kill_does_not_end_strands_the_job(nodes: Callable[..., Node]) -> None:
    node = nodes(lambda pid: "disk")
    node.start(1)
    while not node.watch.verdicts(0):
        node.pass_s(1)
    assert node.watch.verdicts(0)[1].in_disk
    node.pass_s(5)
    assert not node.watch.is_stranded
    node.pass_s(15)
    assert node.watch.is_stranded


def test_the_limit_is_the_flags_or_that_of_the_environment() -> None:
    def limits_of(words: list[str], environment: dict[str, str], has_phases: bool) -> tuple[Limits, str | None]:
        options = options_of(split(["--num_gpus", "2", *words]).own)
        work = Work(("-m", "x"), "cpu", is_script=not has_phases, has_phases=has_phases)
        made = make_plan(options, work, (), environment, job="abc")
        return made.limits, made.added.get(HANG_TIMEOUT)

    assert limits_of([], {}, False) == (Limits(20.0), None)
    assert limits_of([], {HANG_TIMEOUT: "50"}, False) == (Limits(50.0), None)
    assert limits_of(["--hang_timeout", "45"], {HANG_TIMEOUT: "50"}, False) == (Limits(45.0), "45")
    # Of a training it is known what it does before its first iteration and after its last.
    assert limits_of(["--hang_timeout", "45"], {}, True)[0].stuck_s("start") == 1350.0
    with pytest.raises(UsageError, match=r"^--hang_timeout 'soon' must be a number of seconds"):
        limits_of(["--hang_timeout", "soon"], {}, True)
