"""What is said below a block, what stays of a crash loop, and what of a job that the user has ended."""

import json
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lockstep.core.beats import Beat
from lockstep.core.blame import Verdict
from lockstep.core.outcome import ATTEMPT_DIR, RankOutcome, note_run
from lockstep.launch import local
from lockstep.launch.ends import JobEnd, RankEnd, exit_code, read_end
from lockstep.launch.failures import FILE, keep_report, note_stop, ways_on
from lockstep.launch.plan import Options, Plan, Work, make_plan
from lockstep.launch.rendezvous import Nodes
from lockstep.launch.report import Report, report
from tests.unit.launch_fixtures import GPUS, leave

TOLD = Report(("lockstep: error: rank 1 was killed",))
LOST = "lost another rank in the exchange of gradients"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a run directory whose newest checkpoint is of iteration 40."""
    run = tmp_path / "a run"
    (run / "checkpoints").mkdir(parents=True)
    for iteration in (20, 40):
        (run / "checkpoints" / f"model_{iteration}.pt").write_bytes(b"x")
    (run / "progress.json").write_text(json.dumps({"iteration": 44, "status": "running", "reason": None}))
    return run


@pytest.fixture
def launched(tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Plan]:
    """Returns a launch of ranks 0 and 1 that trains in the run."""

    def make(device: str = "cpu", **options: Any) -> Plan:
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
        made = make_plan(Options(2, **options), Work(("-m", "x"), device), GPUS, {}, job="abc")
        made.attempt_dir.mkdir(parents=True)
        ranks = [{"local_rank": rank, "rank": rank, "stdout": "", "stderr": ""} for rank in (0, 1)]
        (made.attempt_dir / "logs.json").write_text(json.dumps({"restart": 0, "ranks": ranks}))
        monkeypatch.setenv(ATTEMPT_DIR, str(made.attempt_dir))
        monkeypatch.delenv("LOCKSTEP_RUN_KEY", raising=False)
        note_run(run)
        return made

    return make


def progress_of(run: Path) -> tuple[str, str | None]:
    content = json.loads((run / "progress.json").read_text())
    return content["status"], content["reason"]


@pytest.mark.parametrize(
    ("device", "options", "command"),
    [
        ("cpu", {}, "lockstep train_multigpu --num_gpus 2 --resume '{run}'"),
        ("auto", {}, "lockstep train_multigpu --resume '{run}'"),
        (
            "cpu",
            {"nodes": Nodes("2", "1", "127.0.0.1", "2345")},
            "the same command and --resume '{run}' on every node",
        ),
    ],
)
def test_a_block_says_how_to_go_on(
    launched: Callable[..., Plan],
    run: Path,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    options: dict[str, Any],
    command: str,
) -> None:
    made = launched(device, **options)
    blocks = f"  all blocks: {run / FILE}"
    assert ways_on(made, 137, TOLD) == [f"  continue with {command.format(run=run)} (from iteration 40)", blocks]
    assert [ways_on(made, code, TOLD) for code in (0, 2, 75, 130)] == [[]] * 4
    assert ways_on(made, 1, Report()) == []
    monkeypatch.setenv("LOCKSTEP_RUN_KEY", "slurm-7")
    assert ways_on(made, 137, TOLD) == [blocks]
    monkeypatch.delenv("LOCKSTEP_RUN_KEY")
    for path in (run / "checkpoints").iterdir():
        path.unlink()
    assert ways_on(made, 137, TOLD) == [blocks]


def test_a_run_that_was_ended_by_force_says_so(launched: Callable[..., Plan], run: Path) -> None:
    made = launched()
    said: list[str] = []
    local._tell(made, 130, Report(), lambda line, to_stderr: said.append(line), was_forced=True)
    assert said == [f"lockstep: the newest checkpoint is {run}/checkpoints/model_40.pt"]
    assert progress_of(run) == ("interrupted", "interrupted, nothing saved since iteration 40")
    # Between two starts of the ranks, it has said that it failed.
    (run / "progress.json").write_text(json.dumps({"status": "failed", "reason": f"{LOST}: rank 1 has ended"}))
    for path in (run / "checkpoints").iterdir():
        path.unlink()
    assert note_stop(made, "preempted") == f"there is no checkpoint in {run}"
    assert progress_of(run) == ("preempted", "preempted, before the first checkpoint")
    (run / "progress.json").write_text(json.dumps({"status": "finished", "reason": None}))
    note_stop(made, "interrupted")
    assert progress_of(run) == ("finished", None)


def test_the_last_word_of_a_crash_loop_is_kept(launched: Callable[..., Plan], run: Path) -> None:
    made = launched(max_restarts=9)
    loop = "3 attempts in a row failed before a new checkpoint; last reason: rank 1 was killed by SIGKILL"
    ends = [RankEnd(rank, rank, 1, RankOutcome(rank, 1, loop, time_s=100.0 - rank), 40 + rank) for rank in (0, 1)]
    told = report(JobEnd(tuple(ends), 1), made)
    assert told.lines == ()  # rank 0 has said it
    assert told.more == (f"the job ended: {loop}",)
    (run / "progress.json").write_text(json.dumps({"status": "failed", "reason": f"{LOST}: rank 1 has ended"}))
    assert local._note_failure(made, 1, told, lambda line, to_stderr: None)
    assert progress_of(run) == ("failed", loop)


def test_where_a_rank_failed_and_what_it_said_are_one_reason(launched: Callable[..., Plan]) -> None:
    beat = Beat(0, 0, 40, 0.0, 0.0, 11, 40, "rollout", "")
    end = RankEnd(0, 0, 1, RankOutcome(0, 1, "KeyError: x"), 40, beat=beat)
    told = report(JobEnd((end,), 1), launched())
    assert told.lines[0].endswith("failed in iteration 12, phase rollout, as said above")
    assert told.reason.startswith("rank 0 (local rank 0 on ")
    assert told.reason.endswith("failed in iteration 12, phase rollout: KeyError: x")


def test_kept_blocks_say_of_which_start_they_are(launched: Callable[..., Plan], run: Path) -> None:
    made = launched(max_restarts=3)
    keep_report(made, TOLD, 0)
    keep_report(made, TOLD, 2)
    heads = [line for line in (run / FILE).read_text().splitlines() if " on " in line]
    assert [head.partition(", ")[2] for head in heads] == ["first start", "restart 2 of 3"]


STACK = """Stack (most recent call first):
  File "mine.py", line 3 in spin
  File "<frozen runpy>", line 88 in _run_code
"""


def test_a_stack_is_kept_once_and_without_pythons_own_calls(launched: Callable[..., Plan], tmp_path: Path) -> None:
    stack = tmp_path / "stack_1.txt"
    stack.write_text(STACK)
    verdict = Verdict(1, 41, "stuck", 21.0, Beat(1, 0, 41, 0.0, 0.0, 11, 40, "rollout", ""))
    end = RankEnd(1, 1, -signal.SIGKILL, None, 41, verdict=verdict, beat=verdict.beat, stack=stack)
    told = report(JobEnd((end,), 1), launched())
    assert told.lines[1:] == ("  where it was, the innermost call first:", '    File "mine.py", line 3 in spin')
    assert told.more == ()


@pytest.mark.parametrize(("pid", "quoted"), [(43, ("  of this one",)), (44, ())])
def test_a_block_quotes_no_earlier_start(
    launched: Callable[..., Plan], tmp_path: Path, pid: int, quoted: tuple[str, ...]
) -> None:
    head = "--- 2026-11-30T12:00:00+00:00 node7 pid"
    log = tmp_path / "rank_1.log"
    log.write_text(f"{head} 42: lockstep\nold\n{head} 43: lockstep\n--- loss 3.0 pid 5: low\nof this one\n")
    end = RankEnd(1, 1, -signal.SIGKILL, None, pid, run_log=log)
    lines = report(JobEnd((end,), 1), launched()).lines[1:]
    assert lines == (("  --- loss 3.0 pid 5: low", *quoted) if quoted else ()) + (f"  its full log: {log}",)


def test_a_signal_that_ended_torchruns_agent_is_named(launched: Callable[..., Plan], tmp_path: Path) -> None:
    leave(tmp_path, signal=int(signal.SIGHUP))
    (line,) = report(read_end(tmp_path, 1), launched()).lines
    assert line == "lockstep: error: torchrun's agent was ended by SIGHUP; the ranks were ended with it"


@pytest.mark.parametrize(
    ("codes", "code", "said"),
    [
        ((0, 0), 0, "warning: torchrun's agent was stopped, and was killed; the ranks had ended well"),
        ((75, 75), 75, "warning: torchrun's agent was stopped, and was killed; the ranks saved and stopped"),
        ((0,), 137, "error: torchrun's agent was stopped, and was killed; the ranks were ended with it"),
    ],
)
def test_an_agent_that_the_launcher_had_to_end_is_named(
    launched: Callable[..., Plan], tmp_path: Path, codes: tuple[int, ...], code: int, said: str
) -> None:
    leave(tmp_path)
    for rank, each in enumerate(codes, start=2):
        (tmp_path / f"outcome_{rank}.json").write_text(json.dumps({"rank": rank, "exit_code": each}))
    end = replace(read_end(tmp_path, -signal.SIGKILL), agent_trouble="was stopped")
    assert exit_code(end, is_script=False) == code
    assert report(end, launched()).lines == (f"lockstep: {said}",)


def test_a_script_that_lost_a_rank_and_spoke_on_the_screen_names_who_left(
    launched: Callable[..., Plan], tmp_path: Path
) -> None:
    ends = (
        RankEnd(0, 0, 1, RankOutcome(0, 1, f"{LOST}: rank 1 has ended"), 40, failed_at_s=100.0, ended_at_s=100.0),
        RankEnd(1, 1, 0, None, 41, ended_at_s=101.0, order=1),
    )
    made = launched()
    script = replace(made, work=replace(made.work, is_script=True))
    (line,) = report(JobEnd(ends, 1), script).lines
    assert line.startswith("lockstep: error: rank 1 (local rank 1 on ")
    assert line.endswith(") ended early with exit code 0 while the others went on")


def test_a_failure_whose_reason_is_not_known_is_marked_all_the_same(launched: Callable[..., Plan], run: Path) -> None:
    assert local._note_failure(launched(), 1, Report(), lambda line, to_stderr: None)
    assert progress_of(run) == ("failed", "the job ended with exit code 1")
