"""Checkpoint folders of JAX: everything comes back bit for bit, and what is damaged or foreign is told in one line."""

import json
import logging
import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from lockstep.core.errors import RunError, UsageError
from lockstep.core.run_directory import RunDirectory
from lockstep.learn.jax import checkpoint
from lockstep.learn.resuming import DamagedError
from lockstep.learn.torch import checkpoint as torch_checkpoint
from tests.unit.jax_training_fixtures import array_differences

HEADER = "lockstep.json"
FULL_DISK = """
import sys
from pathlib import Path

import numpy as np
from lockstep.learn.jax import checkpoint

noise = np.random.default_rng(0).normal(size=(40, 2000))
content = {"sharded": {}, "replicated": {str(row): noise[row] for row in range(40)}, "iteration": 1}
for number in range(3):
    try:
        checkpoint.save(content, Path(sys.argv[1]) / str(number))
    except OSError as error:
        print(error.errno, end=" ")
"""


def arrays(num_envs: int = 3) -> dict[str, Any]:
    """Return nests with every kind of number, and names that no file would have."""
    generator = np.random.default_rng(3)
    payload = np.array([0x7FF8DEADBEEF0001, 0xFFF0000000000000, 0x8000000000000000], np.uint64)
    return {
        "replicated": {
            "odd names": {"a/b.c": np.arange(3), "~": {"..": np.zeros((), np.float64)}, "ü": np.full(2, -1, np.int8)},
            "bits": payload.view(np.float64),  # a NaN with a message, minus infinity and minus zero
            "half": generator.normal(size=5).astype(ml_dtypes.bfloat16),
            "is_on": np.array([[True], [False]]),
            "count": np.array(2**62 + 1),
            "nothing": {"rows": np.zeros((0, 4), np.float32)},
        },
        "sharded": {
            "physics": generator.integers(0, 2**32, (num_envs, 6), np.uint32),
            "none": np.zeros((num_envs, 0), np.int32),
            "wide": generator.normal(size=(num_envs, 40)),
        },
    }


def plain() -> dict[str, Any]:
    return {
        "format": checkpoint.FORMAT,
        "ml_framework": "jax",
        "task": "t",
        "config": {"task": "t", "agent": {"gamma": 0.99, "layers": [64, 64]}},
        "iteration": 7,
        "env_steps": 2**40,
        "wall_s": 0.1 + 0.2,
        "weights": ["replicated.half"],
    }


@pytest.fixture(scope="module")
def content() -> dict[str, Any]:
    return plain() | arrays()


@pytest.fixture(scope="module")
def whole(content: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint") / "model_7"
    checkpoint.save(content, path)
    return path


@pytest.fixture
def path(tmp_path: Path, whole: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "model_7"))


def refused(path: Path, kind: type[UsageError] = UsageError) -> str:
    with pytest.raises(kind) as caught:
        checkpoint.load(path)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    return message


def files_of(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file())


def outcome(path: Path, content: dict[str, Any]) -> str:
    """What loading a damaged folder comes to; anything but a UsageError is let through."""
    try:
        loaded = checkpoint.load(path)
    except UsageError as error:
        assert "\n" not in str(error)
        return "refused"
    return "equal" if array_differences(loaded, content) == [] else "different"


def test_everything_comes_back_bit_for_bit(whole: Path, content: dict[str, Any]) -> None:
    assert array_differences(checkpoint.load(whole), content) == []


def test_a_copy_is_taken_and_written_in_another_thread(tmp_path: Path) -> None:
    content = plain() | arrays()
    view = content["sharded"]["wide"][:]
    content["sharded"]["wide"] = view  # memory of somebody else's
    content["replicated"]["odd names"]["a/b.c"] = np.arange(4)[::2]
    expected = plain() | arrays()
    expected["replicated"]["odd names"]["a/b.c"] = np.array([0, 2])
    run = RunDirectory.create(tmp_path, "t", "", "a: 1", {})
    named = threading.Event()
    saver = run.saver(keep=1, saved=named.set)
    saver.start(7, lambda: checkpoint.snapshot(content))
    view[:] = 0.0
    content["iteration"] = 8
    saver.wait()
    (saved,) = saver.take_results()
    assert saved.error is None
    assert named.is_set()
    assert array_differences(checkpoint.load(run.path / "checkpoints" / "model_7"), expected) == []
    run.close()


def test_a_full_disk_is_a_refusal_of_the_disk(tmp_path: Path) -> None:
    folder = tmp_path / "mounted"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting a file system needs root")
    try:
        run = RunDirectory.create(folder, "t", "", "a: 1", {})
        large = {"sharded": {"noise": np.random.default_rng(0).normal(size=(100, 1000))}, "replicated": {}}
        with pytest.raises(RunError, match=r"model_7: no space left on device; free some space there"):
            run.save_checkpoint(7, checkpoint.snapshot(plain() | large))
        run.save_checkpoint(8, checkpoint.snapshot(plain() | arrays()))
        assert [path.name for path in run.checkpoints()] == ["model_8"]
        run.close()
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize("size", ["24k", "60k"])  # where orbax makes its folders, and while it writes arrays
def test_a_save_that_fails_says_nothing_itself(size: str, tmp_path: Path) -> None:
    folder = tmp_path / "mounted"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting a file system needs root")
    try:
        # In a process of its own: pytest takes such hooks for itself.
        done = subprocess.run(
            [sys.executable, "-c", FULL_DISK, str(folder)], capture_output=True, text=True, timeout=120
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "28 28 28 ", "")
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize("kind", ["Future", "Task"])
def test_of_what_nobody_waits_for_only_refused_writes_are_kept_off_the_screen(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint.save(plain() | arrays(), tmp_path / "model_1")
    logger = logging.getLogger("asyncio")
    errors = [ValueError("Failed [OS error 28: ENOSPC]"), ValueError("[source os_error_code='28']"), ValueError("own")]
    for error in errors:
        logger.error("%s exception was never retrieved", kind, exc_info=error)
    logger.error("Slow", exc_info=errors[0])
    told = [(record.message, record.exc_info and record.exc_info[1]) for record in caplog.records]
    assert told == [(f"{kind} exception was never retrieved", errors[2]), ("Slow", errors[0])]


# --- damaged -------------------------------------------------------------------------------------------------------


def test_a_flipped_bit_is_found_or_does_no_harm(path: Path, content: dict[str, Any]) -> None:
    generator = random.Random(0)
    counts = {"refused": 0, "equal": 0, "different": 0}
    for file in files_of(path):
        before = file.read_bytes()
        for _ in range(12 if before else 0):
            damaged = bytearray(before)
            damaged[generator.randrange(len(damaged))] ^= 1 << generator.randrange(8)
            file.write_bytes(damaged)
            counts[outcome(path, content)] += 1
        file.write_bytes(before)
    assert counts["different"] == 0
    assert counts["refused"] > 60
    assert outcome(path, content) == "equal"


def test_truncated_or_missing_files(path: Path, content: dict[str, Any]) -> None:
    files = files_of(path)
    assert len(files) > 5
    for file in files:
        before = file.read_bytes()
        for length in {0, len(before) // 2, len(before) - 1} if before else ():
            file.write_bytes(before[:length])
            message = refused(path, DamagedError)
            assert message.endswith("use an older one")
            assert file.name == HEADER or f"has {length} bytes, not {len(before)}" in message
        file.unlink()
        if file.name == HEADER:
            assert "is not a lockstep checkpoint: it has no lockstep.json" in refused(path)
        else:
            assert f"it lacks {file.relative_to(path)}" in refused(path, DamagedError)
        file.write_bytes(before)
    shutil.rmtree(path / "arrays")
    assert f"and {len(files) - 2} more" in refused(path, DamagedError)


def test_a_file_that_is_not_of_it(path: Path, content: dict[str, Any]) -> None:
    (path / "notes.txt").write_text("mine")
    (path / "arrays" / ".nfs0001").write_text("")
    assert outcome(path, content) == "equal"
    (path / "arrays" / "d" / "0123").write_text("")
    assert "arrays/d/0123 is not of it" in refused(path, DamagedError)


def test_a_number_that_was_changed_by_hand(path: Path) -> None:
    header = path / HEADER
    header.write_text(header.read_text().replace('"iteration": 7', '"iteration": 9'))
    assert "damaged (lockstep.json)" in refused(path, DamagedError)


# --- foreign -------------------------------------------------------------------------------------------------------


def reseal(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the header of a folder and make its sum right again, as another version of lockstep would have it."""
    header = json.loads((path / HEADER).read_text())
    header.pop("sha256")
    change(header)
    header["sha256"] = checkpoint._digest_of_text(checkpoint._canonical(header))
    (path / HEADER).write_text(json.dumps(header))


def test_other_formats_and_frameworks(path: Path) -> None:
    reseal(path, lambda header: header.update(format=99))
    assert "has format 99, this version reads format 1" in refused(path)
    reseal(path, lambda header: header.update(format=1, ml_framework="numpy"))
    assert "is of framework 'numpy', not jax; use --ml_framework numpy" in refused(path)
    reseal(path, lambda header: header.update(ml_framework="jax", iteration="seven"))
    assert "has iteration of type str" in refused(path)
    reseal(path, lambda header: header.pop("weights"))
    assert "not a lockstep checkpoint" in refused(path)


def test_arrays_that_orbax_can_not_read(path: Path) -> None:
    shutil.rmtree(path / "arrays")
    reseal(path, lambda header: header.update(files={}))
    assert "can't be read (" in refused(path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"files": {}}', '{"files": 1, "sha256": 2}', "[" * 100_000, "\x00"])
def test_other_headers(path: Path, text: str) -> None:
    (path / HEADER).write_text(text)
    refused(path)
    (path / HEADER).write_bytes(b"\xff\xfe")
    refused(path, DamagedError)


def test_what_is_no_folder_of_ours(tmp_path: Path) -> None:
    assert "does not exist; 'checkpoints/' of a JAX run's directory has folders" in refused(tmp_path / "model_9")
    refused(tmp_path / ("x" * 300))
    assert "has no lockstep.json; name a folder such as checkpoints/model_100" in refused(tmp_path)
    (tmp_path / "model_9").write_text("text")
    assert "is no folder; name one such as checkpoints/model_100" in refused(tmp_path / "model_9")


def test_each_framework_names_the_other(tmp_path: Path, path: Path) -> None:
    file = tmp_path / "model_9.pt"
    torch.save({"format": 1}, file)
    assert refused(file).endswith("is of framework 'torch', not jax; use --ml_framework torch")
    with pytest.raises(UsageError, match="is of framework 'jax', not torch; use --ml_framework jax"):
        torch_checkpoint.load(path)
