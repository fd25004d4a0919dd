"""What the end of a rank's process means under the launcher, under a bare torchrun, and alone."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.cli import tasks
from lockstep.cli.main import main
from lockstep.core.errors import LockstepError, RunError, UsageError
from lockstep.core.outcome import read_outcomes, read_pid
from lockstep.distributed import rank_exit

RANK_1 = {"RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_RESTART_COUNT": "3"}


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs a command that ends with an exit code or an exception, as a rank whose environment is given."""

    def run(end: int | BaseException, **environment: str) -> int:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)

        def command(argv: list[str]) -> int:
            if isinstance(end, BaseException):
                raise end
            return end

        monkeypatch.setattr(tasks, "main", command)
        monkeypatch.setattr(rank_exit, "end_with_parent", lambda number, parent: None)  # would outlive the test
        return main(["tasks"])

    return run


@pytest.mark.parametrize("code", [0, 1, 2, 75, 130])
def test_alone_a_process_returns_its_own_code(rank: Callable[..., int], code: int) -> None:
    assert rank(code) == code


@pytest.mark.parametrize(("code", "returned"), [(0, 0), (1, 1), (2, 2), (75, 0), (130, 130)])
def test_a_bare_torchrun_must_not_restart_what_was_preempted(
    rank: Callable[..., int], code: int, returned: int
) -> None:
    assert rank(code, **RANK_1) == returned


@pytest.mark.parametrize(
    ("end", "returned", "content"),
    [
        (0, 0, {"exit_code": 0, "status": "finished", "message": ""}),
        (75, 0, {"exit_code": 75, "status": "preempted", "message": ""}),
        (130, 0, {"exit_code": 130, "status": "interrupted", "message": ""}),
        (KeyboardInterrupt(), 0, {"exit_code": 130, "status": "interrupted", "message": ""}),
        (UsageError("no such\ntask"), 2, {"exit_code": 2, "status": "refused", "message": "no such task"}),
        (RunError("NaN"), 1, {"exit_code": 1, "status": "failed", "message": "NaN", "traceback": ""}),
        (OSError(28, "No space left"), 1, {"exit_code": 1, "status": "failed", "message": "No space left"}),
    ],
)
def test_the_launcher_reads_the_rest_in_a_file(
    rank: Callable[..., int], end: int | BaseException, returned: int, content: dict[str, object], tmp_path: Path
) -> None:
    assert rank(end, **RANK_1, LOCKSTEP_ATTEMPT_DIR=str(tmp_path)) == returned
    written = json.loads((tmp_path / "outcome_1.json").read_text())
    assert written["rank"] == 1
    assert written["restart"] == 3
    assert {name: written[name] for name in content} == content
    assert read_pid(tmp_path, 1) == os.getpid()


def test_an_unexpected_exception_leaves_its_traceback(rank: Callable[..., int], tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        rank(ZeroDivisionError("by zero"), **RANK_1, LOCKSTEP_ATTEMPT_DIR=str(tmp_path))
    written = json.loads((tmp_path / "outcome_1.json").read_text())
    assert written["message"] == "ZeroDivisionError: by zero"
    assert written["traceback"].startswith("Traceback (most recent call last):\n")
    assert written["traceback"].endswith("ZeroDivisionError: by zero\n")


def test_a_folder_that_is_gone_hides_no_exit_code(rank: Callable[..., int], tmp_path: Path) -> None:
    assert rank(75, **RANK_1, LOCKSTEP_ATTEMPT_DIR=str(tmp_path / "gone")) == 75


@pytest.mark.parametrize(
    ("error", "message"),
    [(RunError("lost another rank"), "lost another rank"), (KeyError("a\nb"), "KeyError: 'a\\nb'")],
)
def test_a_script_leaves_word_of_an_exception_unless_it_has(error: Exception, message: str, tmp_path: Path) -> None:
    environment = RANK_1 | {"LOCKSTEP_ATTEMPT_DIR": str(tmp_path)}
    for each in (error, ValueError("while it ends")):
        rank_exit.RankExit(environment).leave_word(each)
    (said,) = read_outcomes(tmp_path, 3).values()
    assert (said.exit_code, said.message) == (1, message)
    assert type(error).__name__ in said.traceback
    rank_exit.RankExit(RANK_1).leave_word(error)  # without a launcher there is nobody to tell


def shared(error: LockstepError) -> LockstepError:
    error.shared = True
    return error


@pytest.mark.parametrize(
    ("environment", "error", "said"),
    [
        ({}, RunError("NaN"), "lockstep: error: NaN\n"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, RunError("NaN"), "lockstep: error: NaN\n"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, RunError("NaN"), "lockstep: error: rank 1: NaN\n"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, OSError(28, "No space left"), "lockstep: error: rank 1: No space left\n"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, shared(RunError("NaN")), "lockstep: error: NaN\n"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, shared(RunError("NaN")), ""),
    ],
)
def test_who_says_what(
    rank: Callable[..., int],
    environment: dict[str, str],
    error: Exception,
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert rank(error, **environment) == 1
    assert capsys.readouterr().err == said


def test_variables_that_make_no_sense_do_not_get_in_the_way(rank: Callable[..., int]) -> None:
    assert rank(0, RANK="one") == 0
