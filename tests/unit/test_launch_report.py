"""What is said of the end of a job that the screen has not shown yet, and what of it stays in the run directory."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from lockstep.core.beats import Beat, Phase
from lockstep.core.blame import Verdict
from lockstep.core.outcome import ATTEMPT_DIR, RankOutcome, note_run, write_outcome
from lockstep.launch.ends import JobEnd, RankEnd, exit_code, read_end
from lockstep.launch.failures import FILE, Restarts, keep_report, mark_run
from lockstep.launch.memory import num_oom_kills
from lockstep.launch.rendezvous import Nodes
from lockstep.launch.report import Report, report
from lockstep.launch.watch import Watch
from tests.unit.launch_fixtures import CRASHED, KILLED, exited, failure, leave, plan

LOST = "lost another rank in the exchange of gradients (Connection closed by peer); it has ended"


def test_a_hidden_rank_is_shown_with_its_traceback(tmp_path: Path) -> None:
    leave(tmp_path, failures=[failure(3, 1)])
    write_outcome(
        tmp_path, RankOutcome(3, 1, "ValueError: boom", "Traceback (most recent call last):\nValueError: boom")
    )
    lines = report(read_end(tmp_path, 1), plan(tmp_path)).lines
    assert lines[0].startswith("lockstep: error: rank 3 (local rank 1 on ")
    assert lines[0].endswith(", pid 43) failed: ValueError: boom")
    assert lines[1:3] == ("  Traceback (most recent call last):", "  ValueError: boom")
    assert lines[-1] == f"  logs in {tmp_path}"


def test_logs_are_needed_only_by_what_names_them(tmp_path: Path) -> None:
    assert not report(JobEnd(), plan(tmp_path)).needs_logs
    assert report(read_end(tmp_path, 1), plan(tmp_path)).needs_logs  # torchrun's own trouble
    assert not report(read_end(tmp_path, -9), plan(tmp_path)).needs_logs
    leave(tmp_path, failures=[failure(3, CRASHED)])
    assert report(read_end(tmp_path, 1), plan(tmp_path)).needs_logs
    assert not report(read_end(tmp_path, 1), plan(tmp_path, log_all_ranks=True)).needs_logs
    # Words that happen to contain the folder's path are no reason.
    write_outcome(tmp_path, RankOutcome(3, 2, f"no such task {tmp_path / 'logs'}"))
    leave(tmp_path, failures=[failure(3, 2)])
    told = report(read_end(tmp_path, 1), plan(tmp_path))
    assert str(tmp_path / "logs") in told.lines[0] and not told.needs_logs


def test_a_hidden_rank_without_words_is_shown_with_the_end_of_its_log(tmp_path: Path) -> None:
    leave(tmp_path, failures=[failure(3, CRASHED)])
    lines = report(read_end(tmp_path, 1), plan(tmp_path)).lines
    assert lines[0].endswith("was killed by SIGSEGV")
    assert lines[1] == "  line 60 of 1"
    assert lines[-2] == "  line 99 of 1"


def test_an_expected_failure_of_a_hidden_rank_is_one_line(tmp_path: Path) -> None:
    leave(tmp_path, failures=[failure(3, 1)])
    write_outcome(tmp_path, RankOutcome(3, 1, "the disk is full"))
    first, log = report(read_end(tmp_path, 1), plan(tmp_path)).lines
    assert first.endswith("failed: the disk is full")
    assert log.startswith("  logs in ")


@pytest.mark.parametrize("shown_by", [0, 1])
def test_what_the_screen_has_shown_is_not_said_again(tmp_path: Path, shown_by: int) -> None:
    # Local rank 0 is on the screen. It failed itself, or it spoke for the others that raised the same error.
    leave(tmp_path, failures=[failure(2 + shown_by, 1), failure(2, 1)])
    for rank in (2 + shown_by, 2):
        write_outcome(tmp_path, RankOutcome(rank, 1, "the loss is NaN", time_s=100.0 - rank))
    assert report(read_end(tmp_path, 1), plan(tmp_path)).lines == ()
    everything = plan(tmp_path, log_all_ranks=True)
    assert report(read_end(tmp_path, 1), everything).lines == ()


def test_a_rank_that_was_killed_could_not_say_so_itself(tmp_path: Path) -> None:
    leave(tmp_path, failures=[failure(2, KILLED)])
    (line,) = report(read_end(tmp_path, 1), plan(tmp_path)).lines
    assert line.endswith("pid 42) was killed by SIGKILL")


def test_a_refusal_is_one_line(tmp_path: Path) -> None:
    leave(tmp_path, failures=[failure(3, 2)])
    write_outcome(tmp_path, RankOutcome(3, 2, "no such task"))
    assert report(read_end(tmp_path, 1), plan(tmp_path)).lines == ("lockstep: error: rank 3: no such task",)


@pytest.mark.parametrize("code", [75, 130])
def test_stopping_when_asked_to_is_no_failure(tmp_path: Path, code: int) -> None:
    leave(tmp_path)
    for rank in (2, 3):
        write_outcome(tmp_path, RankOutcome(rank, code))
    end = read_end(tmp_path, 0)
    assert (exit_code(end, is_script=False), report(end, plan(tmp_path)).lines) == (code, ())


def test_of_many_ranks_on_the_screen_a_last_line_names_the_one(tmp_path: Path) -> None:
    leave(tmp_path, failures=[failure(3, 5)])
    (line,) = report(read_end(tmp_path, 1), plan(tmp_path, log_all_ranks=True)).lines
    assert line.endswith("pid 43) ended with exit code 5")


def test_an_agent_that_was_killed_is_named(tmp_path: Path) -> None:
    assert report(read_end(tmp_path, -9), plan(tmp_path)).lines == (
        "lockstep: error: torchrun's agent was killed by SIGKILL; the ranks were ended with it",
    )
    write_outcome(tmp_path, RankOutcome(0, 75))
    assert report(read_end(tmp_path, -9), plan(tmp_path)).lines == (
        "lockstep: warning: torchrun's agent was killed by SIGKILL; the ranks saved and stopped",
    )


def test_the_agents_own_trouble_is_one_line(tmp_path: Path) -> None:
    leave(tmp_path, error="the nodes did not meet at h:1")
    (line,) = report(read_end(tmp_path, 1), plan(tmp_path)).lines
    assert line.startswith("lockstep: error: the nodes did not meet at h:1; see ")


def test_a_rank_that_ended_early_and_well_is_named_as_the_cause(tmp_path: Path) -> None:
    leave(tmp_path, failures=[failure(2, 1)], exits=[exited(3, 0, 100.0), exited(2, 1, 100.5)])
    write_outcome(tmp_path, RankOutcome(2, 1, LOST))
    end = read_end(tmp_path, 1)
    lines = report(end, plan(tmp_path)).lines
    assert lines[0].startswith("lockstep: error: rank 3 (local rank 1 on ")
    assert lines[0].endswith(", pid 43) ended early with exit code 0 while the others went on")
    assert lines[-1] == f"  logs in {tmp_path}"
    assert exit_code(end, is_script=False) == 1


def test_a_rank_that_had_finished_its_training_is_not_the_cause(tmp_path: Path) -> None:
    leave(tmp_path, failures=[failure(2, 1)], exits=[exited(3, 0, 100.0), exited(2, 1, 100.5)])
    write_outcome(tmp_path, RankOutcome(2, 1, "the disk is full"))
    write_outcome(tmp_path, RankOutcome(3, 0))
    assert report(read_end(tmp_path, 1), plan(tmp_path)).lines == ()  # rank 2 has said it on the screen


@pytest.mark.parametrize(("words", "first"), [(LOST, "error: rank 2 "), ("ValueError: boom", "error: rank 3 ")])
def test_ranks_of_a_script_may_be_through_before_another_fails(tmp_path: Path, words: str, first: str) -> None:
    leave(tmp_path, failures=[failure(3, 1)], exits=[exited(2, 0, 100.0), exited(3, 1, 100.5)])
    (tmp_path / "1.log").write_text(f"Traceback\n{words}\n")
    lines = report(read_end(tmp_path, 1), plan(tmp_path, is_script=True)).lines
    assert lines[0].startswith(f"lockstep: {first}")
    is_cause = words is LOST
    warnings = [line for line in lines if line.startswith("lockstep: warning: rank 2 ")]
    assert len(warnings) == (not is_cause)


def beat(rank: int, phase: Phase = "update", exchange: str = "gradients") -> Beat:
    return Beat(rank, 0, 40 + rank, 0.0, 0.0, 11, 40, phase, exchange)


def killed(rank: int, **more: Any) -> JobEnd:
    return JobEnd((RankEnd(rank, rank, KILLED, None, 40 + rank, beat=beat(rank)),), 1, **more)


def test_rank_host_device_phase_and_exchange_are_named(tmp_path: Path) -> None:
    (line,) = report(killed(1), plan(tmp_path)).lines
    assert line == (
        f"lockstep: error: rank 1 (local rank 1 on {socket.gethostname()}, GPU 1, pid 41) was killed by SIGKILL "
        "in iteration 12, phase update, in the exchange of gradients"
    )
    assert "(out of memory: " in report(killed(1, was_short_of_memory=True), plan(tmp_path)).lines[0]


def test_a_script_has_no_phases_of_ours(tmp_path: Path) -> None:
    end = RankEnd(0, 0, KILLED, None, 40, beat=beat(0, "start", ""))
    (line,) = report(JobEnd((end,), 1), plan(tmp_path, is_script=True)).lines
    assert line.endswith(") was killed by SIGKILL")


def test_where_rank_0_failed_is_added_to_what_it_said_itself(tmp_path: Path) -> None:
    end = RankEnd(0, 0, 1, RankOutcome(0, 1, "KeyError: x", "Traceback\nKeyError: x"), 40, beat=beat(0, "rollout", ""))
    told = report(JobEnd((end,), 1), plan(tmp_path))
    (line,) = told.lines
    assert line.endswith(", pid 40) failed in iteration 12, phase rollout, as said above")
    assert told.more == ("rank 0 said: KeyError: x", "Traceback", "KeyError: x")
    # What all ranks raised alike, rank 0 has said for all.
    others = RankEnd(1, 1, 1, RankOutcome(1, 1, "KeyError: x"), 41, beat=beat(1, "rollout", ""))
    assert report(JobEnd((end, others), 1), plan(tmp_path)).lines == ()


STACK = """Stack (most recent call first):
  File "earlier.py", line 56 in run
Stack (most recent call first):
  File "mine.py", line 3 in spin
  File "training.py", line 112 in iterate
"""


def test_a_rank_that_was_killed_for_standing_still_is_shown_with_its_stack(tmp_path: Path) -> None:
    leave(tmp_path, failures=[failure(2, 1), failure(3, KILLED)])
    write_outcome(tmp_path, RankOutcome(2, 1, LOST))
    (tmp_path / "stack_3.txt").write_text(STACK)
    verdict = Verdict(3, 43, "stuck", 21.0, beat(3, "rollout", ""))
    end = read_end(tmp_path, 1, {3: verdict})
    told = report(end, plan(tmp_path))
    assert told.lines[0].startswith("lockstep: error: rank 3 (local rank 1 on ")
    assert told.lines[0].endswith(
        ", pid 43) is stuck: its main thread has not moved for 21 s, in iteration 12, phase rollout; it was killed, so "
        "that the job ends"
    )
    assert told.lines[1:4] == (
        "  where it was, the innermost call first:",
        '    File "mine.py", line 3 in spin',
        '    File "training.py", line 112 in iterate',
    )
    assert told.lines[-2:] == ("  line 99 of 1", f"  logs in {tmp_path}")
    assert told.needs_logs
    assert told.more == ("the whole stack of rank 3:", *STACK.splitlines())


@pytest.mark.parametrize("names_rank_0", [True, False])
def test_ranks_that_only_lost_one_of_another_node_point_there(tmp_path: Path, names_rank_0: bool) -> None:
    nodes = Nodes("2", "1", "127.0.0.1", "2345")
    lost_on = 2 if names_rank_0 else 3
    leave(tmp_path, failures=[failure(lost_on, 1)])
    write_outcome(tmp_path, RankOutcome(lost_on, 1, LOST))
    (line,) = report(read_end(tmp_path, 1), plan(tmp_path, nodes=nodes)).lines
    assert line.startswith(
        f"lockstep: error: the cause is on another node, see what its launcher says: rank {lost_on} (local rank "
    )
    words = ", as said above" if names_rank_0 else f": {LOST}"
    assert line.endswith(f") lost a rank there{words}")
    # ... unless a rank of this node has failed by itself.
    write_outcome(tmp_path, RankOutcome(5 - lost_on, 1, "the disk is full", time_s=1.0))
    leave(tmp_path, failures=[failure(2, 1), failure(3, 1)])
    assert "another node" not in "".join(report(read_end(tmp_path, 1), plan(tmp_path, nodes=nodes)).lines)


def make_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attempt_dir: Path, **progress: object) -> Path:
    """Return a run directory that a job has told its launcher of."""
    run = tmp_path / "run"
    (run / "ranks").mkdir(parents=True)
    content = {"iteration": 11, "env_steps": 5, "status": "running", "reason": None} | progress
    (run / "progress.json").write_text(json.dumps(content))
    monkeypatch.setenv(ATTEMPT_DIR, str(attempt_dir))
    note_run(run)
    return run


def begin(pid: int) -> str:
    """Return the line that a process puts into its log in the run directory first."""
    return f"--- 2026-11-30T12:00:00+00:00 node7 pid {pid}: lockstep train\n"


def test_a_log_in_the_run_directory_is_named_instead_of_empty_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave(tmp_path, failures=[failure(3, KILLED)])
    log = make_run(tmp_path, monkeypatch, tmp_path) / "ranks" / "rank_3.log"
    log.write_text(f"{begin(5)}old\nTraceback (most recent call last):\n{begin(43)}new\n")
    told = report(read_end(tmp_path, 1), plan(tmp_path))
    assert told.needs_logs
    assert told.lines[-1] == f"  its full log: {log}, logs in {tmp_path}"
    (tmp_path / "1.log").write_text("")
    told = report(read_end(tmp_path, 1), plan(tmp_path))
    assert told.lines[1:] == ("  new", f"  its full log: {log}")
    assert not told.needs_logs


def test_what_was_printed_before_a_traceback_is_shown_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave(tmp_path, failures=[failure(3, 1)])
    trace = "Traceback (most recent call last):\nValueError: boom"
    write_outcome(tmp_path, RankOutcome(3, 1, "ValueError: boom", trace))
    run = make_run(tmp_path, monkeypatch, tmp_path)
    (run / "ranks" / "rank_3.log").write_text(f"{begin(43)}iteration 11\n{trace}\nmore\n{trace}\n")
    lines = report(read_end(tmp_path, 1), plan(tmp_path)).lines
    assert lines[1:5] == (
        "  Traceback (most recent call last):",
        "  ValueError: boom",
        "  the last it printed:",
        "    iteration 11",
    )


def launched(tmp_path: Path, **options: Any) -> Any:
    """Return a plan whose attempt folder is there."""
    made = plan(tmp_path, **options)
    made.attempt_dir.mkdir(parents=True)
    return made


@pytest.fixture(autouse=True)
def _temporary_folder_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))


def test_a_failure_stays_in_the_run_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = launched(tmp_path)
    keep_report(made, Report(("lockstep: error: before there was a run",)))
    run = make_run(tmp_path, monkeypatch, made.attempt_dir)
    keep_report(made, Report())
    assert not (run / FILE).exists()
    keep_report(made, Report(("lockstep: error: first", "  words"), more=("all threads",)))
    keep_report(made, Report(("lockstep: error: second",)))
    lines = (run / FILE).read_text().splitlines()
    assert lines[0].endswith(f" on {socket.gethostname()}")
    assert lines[1:5] == ["lockstep: error: first", "  words", "all threads", ""]
    assert lines[6] == "lockstep: error: second"


@pytest.mark.parametrize(
    ("progress", "is_marked"),
    [
        ({}, True),
        ({"status": "failed", "reason": LOST}, True),
        ({"status": "failed", "reason": "another rank failed"}, True),
        ({"status": "failed", "reason": "the disk is full"}, False),
        ({"status": "preempted"}, False),
    ],
)
def test_a_run_that_could_not_say_so_is_marked_as_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, progress: dict[str, object], is_marked: bool
) -> None:
    made = launched(tmp_path)
    run = make_run(tmp_path, monkeypatch, made.attempt_dir, **progress)
    before = json.loads((run / "progress.json").read_text())
    leave(made.attempt_dir)  # its ranks are 2 and 3, so rank 0 has the word
    mark_run(made, "rank 3 was killed")
    assert json.loads((run / "progress.json").read_text()) == before
    (made.attempt_dir / "logs.json").write_text(
        json.dumps({"restart": 0, "ranks": [{"local_rank": 0, "rank": 0, "stdout": "", "stderr": ""}]})
    )
    mark_run(made, "rank 0 was killed")
    marked = before | {"status": "failed", "reason": "rank 0 was killed"}
    assert json.loads((run / "progress.json").read_text()) == (marked if is_marked else before)
    (run / "progress.json").write_text(json.dumps(before | {"status": "failed", "reason": LOST}))
    mark_run(made, "the cause is on another node", is_cause=False)
    assert json.loads((run / "progress.json").read_text())["reason"] == LOST
    (run / "progress.json").write_text("{")
    mark_run(made, "rank 0 was killed")


def test_why_ranks_are_started_again_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = launched(tmp_path, is_script=True, max_restarts=3)
    run = make_run(tmp_path, monkeypatch, made.attempt_dir)
    said: list[str] = []
    restarts = Restarts(made, lambda line, to_stderr: said.append(line), Watch(made, 1))
    restarts.look()
    leave(made.attempt_dir)
    restarts.look()
    (made.attempt_dir / "exits_0.json").write_text(json.dumps([exited(3, CRASHED, 100.0)]))
    restarts.look()
    assert said == []
    leave(made.attempt_dir, restart=1)
    restarts.look()
    restarts.look()
    assert said[0].startswith("lockstep: warning: rank 3 (local rank 1 on ")
    assert said[0].endswith(") was killed by SIGSEGV")
    assert said[-1] == "lockstep: the ranks start again: restart 1 of 3"
    assert said.count(said[-1]) == 1
    assert "error: rank 3 " in (run / FILE).read_text()


@pytest.mark.parametrize(
    ("group", "counter"),
    [
        ("0::/jobs/7", "jobs/7/memory.events"),
        ("0::/not/seen/from/a/container", "memory.events"),
        ("5:cpu:/a\n4:memory:/jobs/7\n0::/", "memory/jobs/7/memory.oom_control"),
    ],
)
def test_the_kernel_counts_whom_it_ends_for_want_of_memory(tmp_path: Path, group: str, counter: str) -> None:
    groups, mount = tmp_path / "cgroup", tmp_path / "mount"
    assert num_oom_kills(groups, mount) is None
    groups.write_text(f"{group}\n")
    assert num_oom_kills(groups, mount) is None
    (mount / counter).parent.mkdir(parents=True)
    (mount / counter).write_text("oom 9\noom_kill 3\nunder_oom 0\n")
    assert num_oom_kills(groups, mount) == 3
