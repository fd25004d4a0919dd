"""Checkpoints that are folders: whole at any instant, found, kept and cleared away as files are."""

import errno
import json
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lockstep.core.checkpoint_files import replace_checkpoint, restore_aside, set_aside
from lockstep.core.errors import RunError
from lockstep.core.run_directory import RunDirectory, latest_checkpoint
from lockstep.core.runs import newest_iteration


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDirectory]:
    run = RunDirectory.create(tmp_path, "t", "", "a: 1", {})
    yield run
    run.close()


def folder_of(text: str) -> Callable[[Path], None]:
    """Return what makes a folder with a file in it, and one in a folder below."""

    def write(path: Path) -> None:
        (path / "arrays").mkdir(parents=True)
        (path / "header").write_text(text)
        (path / "arrays" / "data").write_text(text)

    return write


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def content(path: Path) -> set[str]:
    return {(path / "header").read_text(), (path / "arrays" / "data").read_text()}


def test_the_newest_is_the_latest_and_only_some_are_kept(run: RunDirectory) -> None:
    for iteration in (9, 10, 11, 100):
        path = run.save_checkpoint(iteration, folder_of(str(iteration)), keep=3)
        assert path == run.path / "checkpoints" / f"model_{iteration}"
        assert latest_checkpoint(run.path) == path
    assert [path.name for path in run.checkpoints()] == ["model_100", "model_11", "model_10"]
    assert newest_iteration(run.path) == 100
    assert names(run.path / "checkpoints") == ["latest", "model_10", "model_100", "model_11"]
    assert (run.path / "checkpoints" / "latest").readlink() == Path("model_100")
    run.write_progress(100, 100, 1, 1.0)
    assert json.loads((run.path / "progress.json").read_text())["checkpoint"] == "checkpoints/model_100"
    assert run.named_checkpoint == "checkpoints/model_100"


def test_one_of_the_same_iteration_is_replaced(run: RunDirectory) -> None:
    for text in ("old", "new"):
        path = run.save_checkpoint(5, folder_of(text))
        assert content(path) == {text}
    assert names(run.path / "checkpoints") == ["latest", "model_5"]


@pytest.mark.parametrize("hidden", [False, True])
def test_a_failed_save_leaves_the_one_before(run: RunDirectory, hidden: bool) -> None:
    run.save_checkpoint(1, folder_of("whole"))

    def fail(path: Path) -> None:
        folder_of("half")(path)
        raise ValueError("a library's own words") if hidden else OSError(errno.ENOSPC, "No space left on device")

    for iteration in (1, 2):
        with pytest.raises(ValueError if hidden else RunError) as caught:
            run.save_checkpoint(iteration, fail)
        assert hidden or f"model_{iteration}: no space left on device" in str(caught.value)
    assert names(run.path / "checkpoints") == ["latest", "model_1"]
    assert content(latest_checkpoint(run.path)) == {"whole"}


def test_a_full_disk_that_a_library_hides_is_told(run: RunDirectory) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fail(path: Path) -> None:
        folder_of("half")(path)
        raise ValueError("a library's own words")

    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        with pytest.raises(RunError, match=r"model_2: file too large"):
            run.save_checkpoint(2, fail)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert names(run.path / "checkpoints") == []


def test_the_state_of_a_failure_is_a_folder_too(run: RunDirectory) -> None:
    path = run.save_failure(7, folder_of("state"))
    assert path == run.path / "failure_7"
    assert content(path) == {"state"}
    assert run.checkpoints() == []

    def refused(path: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    assert run.save_failure(8, refused) is None


def test_damaged_ones_are_set_aside_whatever_is_there_already(run: RunDirectory) -> None:
    for text in ("first", "second"):
        aside = set_aside(run.save_checkpoint(3, folder_of(text)))
        assert aside == run.path / "checkpoints" / "damaged_model_3"
        assert content(aside) == {text}
    assert run.checkpoints() == []
    file = set_aside(run.save_checkpoint(4, lambda path: path.write_text("file")))
    assert file is not None and file.read_text() == "file"
    assert set_aside(run.path / "checkpoints" / "model_9") is None


def test_a_kill_while_one_makes_way_for_another_loses_neither(run: RunDirectory) -> None:
    folder = run.path / "checkpoints"
    path = run.save_checkpoint(5, folder_of("old"))
    path.rename(folder / ".aside-model_5")
    run.close()
    RunDirectory.open(run.path).close()
    assert content(path) == {"old"}
    shutil.copytree(path, folder / ".aside-model_5")
    (path / "header").write_text("new")
    restore_aside(folder)
    assert (path / "header").read_text() == "new"
    assert names(folder) == ["latest", "model_5"]


def test_where_the_new_one_can_not_take_its_place_the_old_one_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = replace_checkpoint(tmp_path / "model_5", folder_of("old"))
    rename, refused = Path.rename, list[Path]()

    def refuse(self: Path, target: Path) -> Path:
        if self.name.startswith(".tmp-") and len(refused) < 2:  # also once the old one has made way
            refused.append(target)
            raise OSError(errno.ENOTEMPTY if len(refused) == 1 else errno.EIO, "refused")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(RunError, match="model_5: refused"):
        replace_checkpoint(tmp_path / "model_5", folder_of("new"))
    assert refused == [path, path]
    assert names(tmp_path) == ["model_5"]
    assert content(path) == {"old"}


# Saves again and again, now and then the same iteration twice, as a run does that goes on from an older checkpoint.
VICTIM = """
import sys
from lockstep.core.run_directory import RunDirectory
from tests.unit.test_checkpoint_folders import folder_of
run = RunDirectory.create(sys.argv[1], "t", "", "a: 1", {})
run.save_checkpoint(0, folder_of("0 " + "x" * 20000), keep=1)
print(run.path, flush=True)
for iteration in range(1, 10**6):
    run.save_checkpoint(iteration // 2, folder_of(f"{iteration // 2} " + "x" * 20000), keep=1)
"""


def test_a_kill_at_any_instant_leaves_a_whole_one(tmp_path: Path) -> None:
    chance, root = random.Random(7), Path(__file__).parents[2]
    for _ in range(8):
        command = [sys.executable, "-c", VICTIM, str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) as process:
            assert process.stdout is not None
            path = Path(process.stdout.readline().strip())
            time.sleep(chance.uniform(0.0, 0.1))
            assert process.poll() is None
            process.send_signal(signal.SIGKILL)
        RunDirectory.open(path).close()
        newest = latest_checkpoint(path)
        (text,) = content(newest)
        assert text == f"{newest.name.removeprefix('model_')} " + "x" * 20000
        assert not [name for name in names(path / "checkpoints") if name.startswith(".")]
