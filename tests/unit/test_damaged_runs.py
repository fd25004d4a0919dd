"""Runs with something in them that no training has written, and runs of others: passed over or refused in one line."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.core import files
from lockstep.core.errors import UsageError
from lockstep.core.files import read_json, require_place
from lockstep.core.run_directory import RunDirectory, check_run_directory, mark_failed
from lockstep.core.runs import newest_run, progress_of, run_info, runs_of
from lockstep.distributed.topology import Start
from lockstep.session.attempts import find
from tests.unit.attempt_fixtures import CONFIG, create, environment, requeued

DEEP = 200_000 * "[" + 200_000 * "]"


def test_a_run_that_this_user_may_not_look_into_is_passed_over() -> None:
    own = create()
    theirs = own.with_name("2999-01-01_00-00-00")
    theirs.mkdir()
    # As with a folder of another user's, pathlib raises when it is asked about this one (and root is told no either).
    (theirs / "run.json").symlink_to(300 * "x")
    with pytest.raises(OSError, match="too long"):
        (theirs / "run.json").stat()
    assert list(runs_of(CONFIG.log_root, CONFIG.task)) == [own]
    assert newest_run(CONFIG.log_root, CONFIG.task) == own
    assert find(CONFIG, "auto", {}).path == own


def damage(path: Path, **changes: object) -> None:
    """Change what run.json has of the first attempt."""
    run = json.loads((path / "run.json").read_text())
    run["attempts"][0] |= changes
    (path / "run.json").write_text(json.dumps(run))


@pytest.mark.parametrize("value", [None, [], "three", {}])
def test_numbers_of_an_attempt_that_are_none(value: object) -> None:
    path = create(start=Start("launch 1", 0, 0), key="k")
    damage(path, iteration=value, num_failures=value, num_requeues=value)
    assert find(CONFIG, None, environment(1, 1)).path == path
    assert find(CONFIG, "auto", requeued(2)).path == path


@pytest.mark.parametrize("name", ["run.json", "progress.json"])
def test_json_that_is_nested_too_deeply(name: str) -> None:
    path = create()
    (path / name).write_text(DEEP)
    assert (run_info(path) if name == "run.json" else progress_of(path)) == {}
    if name == "run.json":
        with pytest.raises(UsageError, match=r"run\.json is damaged"):
            check_run_directory(path)
    else:
        assert not mark_failed(path, "killed")
        run = RunDirectory.open(path)
        assert run.named_checkpoint is None
        run.close()


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), Path.mkdir])
@pytest.mark.parametrize("name", ["progress.json", "metrics.jsonl"])
@pytest.mark.timeout(20)
def test_what_is_no_regular_file_is_refused_and_not_read_for_ever(name: str, make: Callable[[Path], object]) -> None:
    path = create()
    (path / name).unlink(missing_ok=True)
    make(path / name)
    assert progress_of(path) == {} or name == "metrics.jsonl"
    with pytest.raises(UsageError, match=f"{name} is no regular file; move it away"):
        RunDirectory.open(path)


def test_a_file_that_is_too_large_for_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "large.json").write_text(f'"{100 * "x"}"')
    assert read_json(tmp_path / "large.json") == 100 * "x"
    monkeypatch.setattr(files, "MAX_JSON_BYTES", 101)
    with pytest.raises(ValueError, match="has more than"):
        read_json(tmp_path / "large.json")


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        (300 * "x", "file name too long"),
        (f"not there/{300 * 'x'}/more", "file name too long"),
        ("/".join(50 * [100 * "x"]), "file name too long"),
        ("file/x", "is no folder"),
    ],
)
def test_where_no_folder_can_be_made(path: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=reason):
        require_place("log_dir", tmp_path / path)
    require_place("log_dir", tmp_path / "not there" / "nor there")


def test_a_folder_of_others_is_not_said_to_be_missing(tmp_path: Path) -> None:
    (tmp_path / "theirs").symlink_to(300 * "x")
    with pytest.raises(UsageError, match=r"there is no run directory \S+theirs \(file name too long\)"):
        check_run_directory(tmp_path / "theirs")
    shutil.rmtree(tmp_path / "theirs", ignore_errors=True)
