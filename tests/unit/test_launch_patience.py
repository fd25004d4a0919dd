"""The launcher's end while the file system of the run directory does not answer.

A named pipe that nobody reads or writes stands for it: opening one hangs in the kernel as well.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lockstep.core import run_directory
from lockstep.core.outcome import ATTEMPT_DIR, RankOutcome, note_run, write_outcome
from lockstep.launch import ends, failures, local
from lockstep.launch import report as report_module
from lockstep.launch.ends import read_end
from lockstep.launch.failures import FILE, keep_report, mark_run
from lockstep.launch.local import _Launch
from lockstep.launch.patience import answer_within
from lockstep.launch.plan import Plan
from lockstep.launch.report import Report, report
from tests.unit.launch_fixtures import KILLED, failure, leave, plan

TOLD = Report(("lockstep: error: rank 3 was killed",))
SHORT_S = 0.2

HANGS = """
import sys
from lockstep.launch.patience import answer_within
print(answer_within(0.2, lambda: open(sys.argv[1]), "no answer"), flush=True)
sys.exit(7)
"""

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    """Return the plan of a launch that trains in the folder ``run``."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    made = plan(tmp_path)
    made.attempt_dir.mkdir(parents=True)
    (tmp_path / "run" / "ranks").mkdir(parents=True)
    monkeypatch.setenv(ATTEMPT_DIR, str(made.attempt_dir))
    note_run(tmp_path / "run")
    leave(made.attempt_dir, failures=[failure(3, KILLED)])
    return made


def wait_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the launcher lose patience at once, where all that follows hangs."""
    monkeypatch.setattr(ends, "LOOK_S", SHORT_S)
    monkeypatch.setattr(report_module, "LOOK_S", SHORT_S)
    monkeypatch.setattr(failures, "WRITE_S", SHORT_S)


def hold_rank_0(made: Plan) -> None:
    ranks = [{"local_rank": 0, "rank": 0, "stdout": "", "stderr": ""}]
    (made.attempt_dir / "logs.json").write_text(json.dumps({"restart": 0, "ranks": ranks}))


def test_what_comes_in_time_is_the_answer(tmp_path: Path) -> None:
    assert answer_within(30.0, lambda: "yes", "none") == "yes"
    with pytest.raises(FileNotFoundError):
        answer_within(30.0, (tmp_path / "absent").read_text, "none")


def test_a_process_ends_although_a_call_of_it_hangs(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "gone")
    ended = subprocess.run(
        [sys.executable, "-c", HANGS, str(tmp_path / "gone")], capture_output=True, text=True, timeout=30
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (7, "no answer\n", "")


def test_the_end_is_told_without_logs_that_can_not_be_looked_at(
    made: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_file = Path.is_file

    def hang_there(path: Path) -> bool:
        if path.is_relative_to(tmp_path / "run"):
            time.sleep(30.0)
        return is_file(path)

    monkeypatch.setattr(Path, "is_file", hang_there)
    wait_less(monkeypatch)
    for rank in range(8):
        write_outcome(made.attempt_dir, RankOutcome(rank, 1, "lost"))
    began_s = time.monotonic()
    end = read_end(made.attempt_dir, 1)
    assert time.monotonic() - began_s < 20.0
    assert [one.run_log for one in end.ranks] == [None] * 8


def test_the_end_is_told_without_a_log_that_can_not_be_read(
    made: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "run" / "ranks" / "rank_3.log"
    log.touch()
    (made.attempt_dir / "1.log").write_text("")
    end = read_end(made.attempt_dir, 1)
    log.unlink()
    os.mkfifo(log)
    wait_less(monkeypatch)
    told = report(end, made)
    assert told.lines[0].endswith("was killed by SIGKILL")
    assert told.lines[1:] == (f"  its full log: {log}",)


def test_a_failure_that_can_not_be_noted_is_said_to_be_so(
    made: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failures, "WRITE_S", 50.0)
    said: list[str] = []

    def note() -> None:
        local._note_failure(made, 137, TOLD, lambda line, to_stderr: said.append(line))

    hold_rank_0(made)
    assert keep_report(made, TOLD)
    assert mark_run(made, "words")  # there is no progress.json, which is no reason to wait
    note()
    assert said == []
    wait_less(monkeypatch)
    monkeypatch.setattr(run_directory, "mark_failed", lambda *words: time.sleep(30.0))
    assert not mark_run(made, "words")
    (tmp_path / "run" / FILE).unlink()
    os.mkfifo(tmp_path / "run" / FILE)
    assert not keep_report(made, TOLD)
    note()
    assert len(said) == 1
    assert said[0].startswith(f"lockstep: warning: {tmp_path / 'run'} did not answer within ")


def test_an_agent_that_waits_for_a_disk_is_not_waited_for(made: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    class Agent:
        """A process that no signal ends, as subprocess shows it."""

        def poll(self) -> None:
            return None

        def terminate(self) -> None:
            pass

        kill = terminate

        def wait(self, timeout: float | None = None) -> int:
            assert timeout is not None
            raise subprocess.TimeoutExpired("agent", timeout)

    monkeypatch.setattr(local, "end_job", lambda job, is_late: [42])
    agent: Any = Agent()
    assert _Launch(made, lambda line, to_stderr: None)._end_all(agent, 0.1) == [42]
