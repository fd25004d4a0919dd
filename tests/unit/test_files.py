"""Atomic writing on real disks: full, limited, read-only, and interrupted half-way."""

import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.core.errors import RunError
from lockstep.core.files import AppendOnlyFile, remove_leftovers, replace_atomic, replace_link, write_atomic


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    folder = tmp_path / "small_disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting a small file system needs root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture
def file_size_limit() -> Iterator[int]:
    """No file of this process may grow beyond 10000 bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    yield 10_000
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_content_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write_atomic(path, "old")
    write_atomic(path, "néw")
    assert path.read_bytes() == b"n\xc3\xa9w"
    assert names(tmp_path) == ["a.txt"]


def test_a_new_file_has_the_permissions_of_any_other(tmp_path: Path) -> None:
    (tmp_path / "ordinary").write_text("x")
    write_atomic(tmp_path / "atomic", "x")
    assert (tmp_path / "atomic").stat().st_mode == (tmp_path / "ordinary").stat().st_mode


def test_readers_see_the_old_content_until_the_new_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    seen = []

    def write(temporary: Path) -> None:
        temporary.write_text("half of the n")
        seen.append(path.read_text())
        temporary.write_text("new")

    replace_atomic(path, write)
    assert seen == ["old"]
    assert path.read_text() == "new"


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_failure_half_way_leaves_the_old_content_alone(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")

    def write(temporary: Path) -> None:
        temporary.write_text("half")
        raise error

    with pytest.raises(error):
        replace_atomic(path, write)
    assert path.read_text() == "old"
    assert names(tmp_path) == ["a.txt"]


def test_a_full_disk_is_one_line_and_leaves_the_old_content(small_disk: Path) -> None:
    path = small_disk / "a.txt"
    path.write_text("old")
    with pytest.raises(RunError) as caught:
        write_atomic(path, b"x" * 100_000)
    assert str(caught.value) == f"can't write {path}: no space left on device; free some space there"
    assert path.read_text() == "old"
    assert names(small_disk) == ["a.txt"]


def test_a_full_disk_behind_an_error_of_a_library_is_named(small_disk: Path) -> None:
    def write(temporary: Path) -> None:
        try:
            temporary.write_bytes(b"x" * 100_000)
        except OSError:
            raise RuntimeError("unexpected pos 832 vs 726") from None

    with pytest.raises(RunError, match="no space left on device"):
        replace_atomic(small_disk / "a.txt", write)
    assert names(small_disk) == []


def test_a_limit_on_file_sizes_is_one_line(tmp_path: Path, file_size_limit: int) -> None:
    with pytest.raises(RunError, match="file too large; raise the limit on file sizes"):
        write_atomic(tmp_path / "a.txt", b"x" * (file_size_limit + 1))
    assert names(tmp_path) == []


def test_a_folder_that_is_gone_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no such file or directory; its folder is gone"):
        write_atomic(tmp_path / "gone" / "a.txt", "x")


def test_a_name_that_is_too_long_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"can't write .*: file name too long; choose a shorter name"):
        write_atomic(tmp_path / ("x" * 250), "new")
    assert list(tmp_path.iterdir()) == []


def test_a_link_is_replaced(tmp_path: Path) -> None:
    for target in ("one", "two"):
        (tmp_path / target).write_text(target)
        replace_link(tmp_path / "latest", target)
        assert (tmp_path / "latest").read_text() == target
    assert (tmp_path / "latest").readlink() == Path("two")


def test_where_there_is_no_room_for_a_link_there_is_none(small_disk: Path) -> None:
    link = small_disk / "latest"
    replace_link(link, "one")
    (small_disk / "ballast").write_bytes(bytes(64 * 1024))
    replace_link(link, "t" * 1000)  # a long one takes a block
    assert not link.is_symlink()


def test_leftovers_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    pid = os.fork()
    if pid == 0:  # the child dies in the middle of writing, without any clean-up
        replace_atomic(tmp_path / "a.txt", lambda temporary: (temporary.write_text("half"), os._exit(0)))
    os.waitpid(pid, 0)
    (leftover,) = names(tmp_path)
    (tmp_path / "kept.txt").write_text("mine")
    (tmp_path / f"{leftover}-folder").mkdir()
    remove_leftovers(tmp_path)
    assert names(tmp_path) == ["kept.txt"]


def test_records_are_appended(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text("before\n")
    file = AppendOnlyFile(path)
    file.write(b"one\n")
    file.write(b"two\n")
    assert path.read_text() == "before\none\ntwo\n"
    file.close()
    file.close()


def test_a_record_that_does_not_fit_leaves_nothing_of_itself(tmp_path: Path, file_size_limit: int) -> None:
    path = tmp_path / "a.log"
    file = AppendOnlyFile(path)
    record = b"x" * 2999 + b"\n"
    for _ in range(3):
        file.write(record)
    with pytest.raises(RunError, match="file too large"):
        file.write(record)
    assert path.read_bytes() == record * 3
    with pytest.raises(RunError, match="file too large"):
        file.write(b"y\n" * 1000)  # which keeps its place behind the one before
    file.close()
    assert path.read_bytes() == record * 3
    assert file.num_missing == 2


def test_records_are_written_in_their_order_once_there_is_room(small_disk: Path) -> None:
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(56 * 1024))
    file = AppendOnlyFile(small_disk / "a.log")
    records = [bytes([ord("a") + number]) * 2999 + b"\n" for number in range(5)]
    for number, record in enumerate(records):
        if number < 2:
            file.write(record)
            continue
        with pytest.raises(RunError, match="no space left on device"):
            file.write(record)
    assert file.num_missing == 3
    ballast.unlink()
    file.flush()
    assert file.num_missing == 0
    assert (small_disk / "a.log").read_bytes() == b"".join(records)
    file.close()


def test_of_too_many_refused_records_the_oldest_are_lost(
    tmp_path: Path, file_size_limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AppendOnlyFile, "MAX_WAITING_BYTES", 30_000)
    file = AppendOnlyFile(tmp_path / "a.log")
    first = b"1" * 11_000
    for record in (first, b"2" * 9_000, b"3" * 9_000, b"4" * 9_000):
        with pytest.raises(RunError):
            file.write(record)
        if record == first:
            assert file.num_missing == 1
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    file.flush()
    assert (tmp_path / "a.log").read_bytes() == b"2" * 9_000 + b"3" * 9_000 + b"4" * 9_000
    assert file.num_missing == 1


def test_a_file_that_was_removed_is_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "a.log"
    path.parent.mkdir()
    file = AppendOnlyFile(path)
    file.write(b"one\n")
    path.unlink()
    path.parent.rmdir()
    with pytest.raises(RunError, match="its folder is gone"):
        file.write(b"two\n")
    path.parent.mkdir()
    file.write(b"three\n")
    file.close()
    assert path.read_bytes() == b"two\nthree\n"
