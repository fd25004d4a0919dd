"""Which rank's end is the job's, and what is said of it that the screen has not shown yet."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from lockstep.core.gpu_mask import Gpu
from lockstep.core.outcome import RankOutcome, read_outcomes, write_outcome
from lockstep.launch.ends import JobEnd, RankEnd, deciding, ended_early, exit_code, read_end, report
from lockstep.launch.logs import Follower, last_lines
from lockstep.launch.plan import Options, Plan, Work, make_plan

GPUS = [Gpu(index, f"GPU-{index}", "H200", "0", 1, "1", ()) for index in range(3)]
KILLED, TERMINATED, CRASHED = -signal.SIGKILL, -signal.SIGTERM, -signal.SIGSEGV


def ended(rank: int, process_code: int = 0, said: int | None = None, at_s: float = 100.0, order: int = 0) -> RankEnd:
    """Return the end of a rank: its process's code, and the exit code it noted itself, if any."""
    outcome = None if said is None else RankOutcome(rank, said, "no luck", time_s=at_s)
    return RankEnd(rank, rank, process_code, outcome, pid=7, failed_at_s=at_s, order=order)


def plan(tmp_path: Path, is_script: bool = False, **options: Any) -> Plan:
    work = Work(("-m", "x"), is_script=is_script)
    return make_plan(Options(log_dir=tmp_path / "logs", **options), work, GPUS, {}, job="abc")


@pytest.mark.parametrize(
    ("ranks", "code"),
    [
        ([], 0),
        ([ended(0, said=0), ended(1, said=0)], 0),
        ([ended(0, said=75), ended(1, said=75)], 75),
        ([ended(0, said=130), ended(1, said=75)], 130),
        ([ended(0, said=130), ended(1, 2, said=2)], 2),
        ([ended(0, 1, said=1), ended(1, 2, said=2)], 1),
        ([ended(0, 1, said=1), ended(1, KILLED)], 137),  # the peer of a rank that was killed fails too
        ([ended(0, CRASHED, order=1), ended(1, 1, said=1)], 139),
        ([ended(0, CRASHED, said=0)], 139),  # it crashed after its work was done
        ([ended(0, CRASHED, said=1)], 1),  # ... or after it had failed
        # What torchrun ended because of another decides nothing.
        ([ended(0, TERMINATED, order=1), ended(1, 1, said=1)], 1),
        ([ended(0, KILLED, at_s=130.0, order=1), ended(1, 2, said=2)], 2),
        ([ended(0, said=75), ended(1, 1, said=1)], 1),
        ([ended(0, TERMINATED), ended(1, TERMINATED, order=1)], 143),
    ],
)
def test_the_worst_end_decides(ranks: list[RankEnd], code: int) -> None:
    assert exit_code(JobEnd(tuple(ranks), agent_code=1 if code else 0), is_script=False) == code


@pytest.mark.parametrize(
    ("ranks", "code"),
    [
        ([ended(0, 3, order=1), ended(1, 77)], 77),
        ([ended(0, 1), ended(1, KILLED, order=1)], 1),
        ([ended(0, TERMINATED), ended(1, 5, order=1)], 5),
    ],
)
def test_the_first_failed_rank_of_a_script_decides(ranks: list[RankEnd], code: int) -> None:
    assert exit_code(JobEnd(tuple(ranks), agent_code=1), is_script=True) == code


def test_of_ranks_that_are_as_bad_the_first_by_its_own_clock_decides() -> None:
    ranks = [ended(0, 1, said=1, at_s=100.2), ended(1, 1, said=1, at_s=100.1, order=1)]
    decider = deciding(ranks, is_script=False)
    assert decider is not None
    assert decider.rank == 1


@pytest.mark.parametrize(("agent_code", "code"), [(0, 0), (1, 1), (-9, 137)])
def test_without_word_of_any_rank_the_agent_decides(agent_code: int, code: int) -> None:
    assert exit_code(JobEnd((), agent_code), is_script=False) == code


def failure(rank: int, code: int) -> dict[str, object]:
    return {"rank": rank, "local_rank": rank % 2, "pid": 40 + rank, "exit_code": code, "time_s": 100, "error_file": ""}


def leave(folder: Path, restart: int = 0, **report_of_agent: object) -> None:
    """Leave what torchrun's agent leaves in an attempt folder; the ranks on this node are 2 and 3."""
    ranks = []
    for local_rank in (0, 1):
        log = folder / f"{local_rank}.log"
        ranks.append({"local_rank": local_rank, "rank": 2 + local_rank, "stdout": "", "stderr": str(log)})
        log.write_text("".join(f"line {number} of {local_rank}\n" for number in range(100)))
    (folder / "logs.json").write_text(json.dumps({"restart": restart, "ranks": ranks}))
    content = {"failures": [], "signal": 0, "error": ""} | report_of_agent
    (folder / "agent.json").write_text(json.dumps(content))


def test_what_is_left_is_read_together(tmp_path: Path) -> None:
    leave(tmp_path, failures=[failure(3, 1), failure(2, TERMINATED)])
    write_outcome(tmp_path, RankOutcome(3, 1, "ValueError: boom", "Traceback\nValueError: boom"))
    end = read_end(tmp_path, agent_code=1)
    assert [(rank.rank, rank.local_rank, rank.pid, rank.exit_code) for rank in end.ranks] == [
        (2, 0, 42, 143),
        (3, 1, 43, 1),
    ]
    assert exit_code(end, is_script=False) == 1


def test_what_ranks_said_before_a_restart_does_not_count(tmp_path: Path) -> None:
    leave(tmp_path, restart=1)
    write_outcome(tmp_path, RankOutcome(2, 1, "first try", restart=0))
    write_outcome(tmp_path, RankOutcome(3, 0, restart=1))
    assert set(read_outcomes(tmp_path, 1)) == {3}
    assert exit_code(read_end(tmp_path, agent_code=0), is_script=False) == 0


def test_a_damaged_or_missing_report_is_no_reason_to_fail(tmp_path: Path) -> None:
    assert read_end(tmp_path, agent_code=-9).ranks == ()
    for name in ("agent.json", "logs.json", "outcome_0.json"):
        (tmp_path / name).write_text('{"rank')
    assert exit_code(read_end(tmp_path, agent_code=-9), is_script=False) == 137


def test_a_hidden_rank_is_shown_with_its_traceback(tmp_path: Path) -> None:
    leave(tmp_path, failures=[failure(3, 1)])
    write_outcome(
        tmp_path, RankOutcome(3, 1, "ValueError: boom", "Traceback (most recent call last):\nValueError: boom")
    )
    lines = report(read_end(tmp_path, 1), plan(tmp_path)).lines
    assert lines[0].startswith("lockstep: error: rank 3 (local rank 1 on ")
    assert lines[0].endswith(", pid 43) ended with exit code 1")
    assert lines[1:3] == ("  Traceback (most recent call last):", "  ValueError: boom")
    assert lines[-1] == f"  its full log: {tmp_path}"


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
    assert log.startswith("  its full log")


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


def exited(rank: int, code: int, time_s: float) -> dict[str, object]:
    return {"rank": rank, "local_rank": rank % 2, "pid": 40 + rank, "exit_code": code, "time_s": time_s}


def test_who_ended_well_before_others_failed(tmp_path: Path) -> None:
    leave(tmp_path, failures=[failure(2, 1)], exits=[exited(2, 1, 100.0), exited(3, 0, 100.2)])
    assert [end.rank for end in ended_early(read_end(tmp_path, 1).ranks)] == [3]
    leave(tmp_path, exits=[exited(2, 0, 100.0), exited(3, 0, 100.2)])
    assert ended_early(read_end(tmp_path, 0).ranks) == []


LOST = "lost another rank in the exchange of gradients (Connection closed by peer); it has ended"


def test_a_rank_that_ended_early_and_well_is_named_as_the_cause(tmp_path: Path) -> None:
    leave(tmp_path, failures=[failure(2, 1)], exits=[exited(3, 0, 100.0), exited(2, 1, 100.5)])
    write_outcome(tmp_path, RankOutcome(2, 1, LOST))
    end = read_end(tmp_path, 1)
    lines = report(end, plan(tmp_path)).lines
    assert lines[0].startswith("lockstep: error: rank 3 (local rank 1 on ")
    assert lines[0].endswith(", pid 43) ended early with exit code 0 while the others went on")
    assert lines[-1] == f"  its full log: {tmp_path}"
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


def test_lines_are_followed_whole_and_with_their_rank(tmp_path: Path) -> None:
    said: list[tuple[str, bool]] = []
    follower = Follower(tmp_path, (0, 3), lambda line, to_stderr: said.append((line, to_stderr)))
    follower.follow()  # the ranks have not started yet
    leave(tmp_path)
    log = tmp_path / "1.log"
    log.write_bytes(b"one\ntw")
    follower.follow()
    with log.open("ab") as file:
        file.write("o\nzürich".encode())
        file.flush()
        follower.follow()
        assert said == [("[rank 3] one", True), ("[rank 3] two", True)]
        file.write(b"\xff")
    follower.follow(to_the_end=True)
    assert said[-1] == ("[rank 3] zürich�", True)


def test_the_end_of_a_log(tmp_path: Path) -> None:
    path = tmp_path / "log"
    assert last_lines(path, 3) == []
    assert last_lines(None, 3) == []
    path.write_text("x" * 100_000 + "\na\nb\n\n")
    assert last_lines(path, 2) == ["a", "b"]
