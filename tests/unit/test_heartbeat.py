"""A rank's signs of life, and the folder that ranks under a bare torchrun beat into."""

import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.core.beats import read_beats
from lockstep.core.errors import UsageError
from lockstep.distributed import heartbeat
from tests.multiproc.commands import wait_for
from tests.unit.heartbeat_fixtures import WAITS, Rank, folders


def test_a_rank_is_alive_while_its_main_thread_hangs(start_rank: Callable[..., Rank], tmp_path: Path) -> None:
    rank = start_rank("heartbeat.begin()\nheartbeat.begin()\nhang_in_c()", LOCKSTEP_ATTEMPT_DIR=str(tmp_path))
    assert rank.says() == "hangs"
    first = read_beats(tmp_path)[1]
    wait_for(lambda: read_beats(tmp_path)[1].alive_s > first.alive_s)
    assert (read_beats(tmp_path)[1].pid, read_beats(tmp_path)[1].moved_s) == (rank.pid, first.moved_s)


def test_one_process_alone_does_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    heartbeat.begin({})
    assert heartbeat.current() is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"LOCKSTEP_HANG_TIMEOUT_S": "soon"}, "LOCKSTEP_HANG_TIMEOUT_S 'soon' must be a number of seconds"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK is 2 but WORLD_SIZE is 2"),
    ],
)
def test_variables_that_make_no_sense(variables: dict[str, str], said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=said):
        heartbeat.begin(variables | {"LOCKSTEP_ATTEMPT_DIR": str(tmp_path)})
    assert list(tmp_path.iterdir()) == []


def test_two_jobs_and_two_starts_have_folders_of_their_own(start_rank: Callable[..., Rank], temporary: Path) -> None:
    others = [{"MASTER_PORT": "29501"}, {"TORCHELASTIC_RESTART_COUNT": "1"}, {"GROUP_RANK": "1"}, {}]
    ranks = [start_rank(WAITS, 0, **other) for other in others] + [start_rank(WAITS, 1)]
    assert [rank.says() for rank in ranks] == ["ready"] * 5
    found = sorted(sorted(read_beats(folder)) for folder in folders(temporary))
    Path("enough").touch()
    assert [rank.end()[0] for rank in ranks] == [0] * 5
    assert found == [[0], [0], [0], [0, 1]]
    assert folders(temporary) == []


ENDS_TWICE = """
remove = heartbeat.shutil.rmtree
def remove_slowly(*arguments, **options):
    print("removes", flush=True)
    time.sleep(1.0)
    remove(*arguments, **options)
heartbeat.shutil.rmtree = remove_slowly
heartbeat.begin()
print("ready", flush=True)
threading.Thread(target=heartbeat.end, daemon=True).start()
while heartbeat.current() is not None:
    time.sleep(0.01)
heartbeat.end()
os._exit(1)
"""
LOOKS_FOR_LONG = """
class Writer:
    def look(self):
        print("looks", flush=True)
        time.sleep(1.0)
        (beating.folder / "late").touch()
        print("has looked", flush=True)
def remove(*arguments, **options):
    print("removes", flush=True)
heartbeat.shutil.rmtree = remove
heartbeat._siblings = lambda *arguments: Writer()
heartbeat.begin()
beating = heartbeat.current()
time.sleep(1.5)
"""


def test_who_ends_second_waits_until_all_is_taken_away(start_rank: Callable[..., Rank], temporary: Path) -> None:
    rank = start_rank(ENDS_TWICE)
    assert [rank.says(), rank.says()] == ["ready", "removes"]
    assert rank.end() == (1, "")
    assert folders(temporary) == []


def test_nothing_is_taken_away_while_the_thread_may_write(start_rank: Callable[..., Rank], temporary: Path) -> None:
    rank = start_rank(LOOKS_FOR_LONG)
    assert [rank.says() for _ in range(3)] == ["looks", "has looked", "removes"]


@pytest.mark.parametrize("trap", ["link", "open to others", "a file"])
def test_a_folder_that_others_may_write_to_is_refused(trap: str, temporary: Path) -> None:
    environment = {"RANK": "0", "WORLD_SIZE": "2"}
    folder = heartbeat._folder_of_job(environment)
    assert folder is not None
    folder.rmdir()
    if trap == "link":
        (temporary / "elsewhere").mkdir(mode=0o700)
        folder.symlink_to(temporary / "elsewhere")
    elif trap == "open to others":
        folder.mkdir()
        folder.chmod(0o770)
    else:
        folder.touch()
    assert heartbeat._folder_of_job(environment) is None


def test_a_rank_that_lives_keeps_its_folder_from_getting_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.01)
    folder = tmp_path / f"{heartbeat.FOLDER_PREFIX}x"
    folder.mkdir()
    os.utime(folder, (0, time.time() - 25 * 3600))
    rank = heartbeat.Heartbeat(folder, 0, 0, None)
    thread = threading.Thread(target=rank.run)
    thread.start()
    try:
        wait_for(lambda: folder.stat().st_mtime > time.time() - 3600)
    finally:
        rank.is_over.set()
        thread.join()
    heartbeat._remove_leftovers(tmp_path)
    assert folder.exists()  # though none of its processes is seen, as if they were on another host


def test_only_old_folders_without_a_process_are_removed(start_rank: Callable[..., Rank], temporary: Path) -> None:
    living = start_rank(WAITS, 0)
    assert living.says() == "ready"
    (used,) = folders(temporary)
    old, young, other = (temporary / name for name in (f"{used.name}1", f"{used.name}2", "lockstep-runs"))
    for folder in (old, young, other):
        folder.mkdir()
    for folder in (used, old, other):
        os.utime(folder, (0, time.time() - 25 * 3600))
    heartbeat._remove_leftovers(temporary)
    assert sorted(temporary.glob("lockstep-*")) == sorted([used, young, other])
    Path("enough").touch()
    assert living.end() == (0, "")
