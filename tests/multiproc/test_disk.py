"""Disks that refuse in the middle of a training, and checkpoints by the clock, with real processes and file systems."""

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.multiproc.commands import SMALL, TIMEOUT_S, Command, lockstep, metrics_of, only_run, progress_of, wait_for
from tests.rank_pool import PerRank, RankPool

TASK = "cartpole_classic"
OFTEN = (*SMALL, "--checkpoints.interval", "1", "--max_iterations", "100000")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 400 KiB."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a file system")
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", folder], check=False)
    if mounted.returncode != 0:
        pytest.skip("this system does not let root mount a tmpfs")
    yield folder
    subprocess.run(["umount", folder], check=True)


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Let nobody write into a folder, root included."""
    subprocess.run(["mount", "--bind", folder, folder], check=True)
    try:
        # Whoever writes a file there at this moment keeps it writable.
        wait_for(lambda: subprocess.run(["mount", "-o", "remount,bind,ro", folder], check=False).returncode == 0)
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def fill(ballast: Path) -> None:
    """Let a file grow until there is no room on its disk."""
    with ballast.open("ab", buffering=0) as file:
        while True:
            try:
                file.write(bytes(4096))
            except OSError:
                break


class Followed(Command):
    """A command whose output can be read while it is at work."""

    def __init__(self, *arguments: str) -> None:
        self._files = Path("stdout.txt"), Path("stderr.txt")
        with self._files[0].open("w") as output, self._files[1].open("w") as errors:
            super().__init__(*arguments, stdout=output, stderr=errors, environment={"PYTHONUNBUFFERED": "1"})

    @property
    def output(self) -> str:
        return self._files[0].read_text()

    @property
    def errors(self) -> list[str]:
        return self._files[1].read_text().splitlines()

    def wait_for_output(self, words: str) -> None:
        self.wait_for(lambda: words in self.output)

    def preempt(self) -> int:
        """Ask for the end, and return the exit code."""
        self.send(signal.SIGTERM)
        return self.end()[0]

    def end(self) -> tuple[int, str, str]:
        return self.process.wait(TIMEOUT_S), self.output, "\n".join(self.errors)


@contextmanager
def started(*arguments: str) -> Iterator[Followed]:
    command = Followed(*arguments)
    try:
        yield command
    finally:
        command.kill()


def iteration_of(checkpoint: Path) -> int:
    """Read a checkpoint as anybody may."""
    return int(torch.load(checkpoint, weights_only=True)["iteration"])


def test_with_stop_a_disk_that_fills_up_ends_the_training_in_one_line(small_disk: Path) -> None:
    options = ("--checkpoints.keep", "100", "--checkpoints.on_error", "stop", "--log_root", str(small_disk))
    finished = lockstep("train", TASK, *OFTEN, *options)
    assert finished.returncode == 1
    (line,) = [line for line in finished.stderr.splitlines() if line]
    assert line.startswith("lockstep: error: can't write")
    assert "no space left" in line.lower()
    run = only_run(TASK, small_disk)
    assert not list(run.rglob(".tmp-*"))
    saved = iteration_of(run / "checkpoints" / "latest")
    for path in sorted((run / "checkpoints").glob("model_?.pt"))[:3]:
        path.unlink()  # some space is free again
    resumed = lockstep("train", "--resume", str(run), "--max_iterations", str(saved + 1))
    assert resumed.returncode == 0, resumed.stderr


def test_a_training_goes_on_beside_a_full_disk_and_catches_up_when_there_is_room(small_disk: Path) -> None:
    ballast = small_disk / "ballast"
    with started("train", TASK, *OFTEN, "--checkpoints.keep", "2", "--log_root", str(small_disk)) as training:
        training.wait_for(lambda: any(small_disk.glob(f"{TASK}/*/checkpoints/model_*.pt")))
        run = only_run(TASK, small_disk)

        def is_told(kind: str) -> bool:
            fill(ballast)  # again and again: the training gives back what its last file took
            return re.search(f"can't write .*{kind}.*: no space left on device", training.output) is not None

        training.wait_for(lambda: is_told("metrics.jsonl") and is_told("model_"))
        assert iteration_of(run / "checkpoints" / "latest") >= 1  # whole, as the one before the refusal
        ballast.unlink()
        training.wait_for_output("metrics can be written again")
        training.wait_for_output("checkpoints can be written again")
        assert training.preempt() == 75
        output, errors = training.output, training.errors
    assert errors == []
    assert output.count("can't write") <= 12, output  # of many more attempts
    assert "preempted and saved" in output
    progress = progress_of(run)
    assert progress["status"] == "preempted"
    assert progress["iteration"] == iteration_of(run / progress["checkpoint"])
    recorded = [record["iteration"] for record in metrics_of(run)]
    assert recorded == list(range(1, progress["iteration"] + 1))  # those of the full disk included
    assert not list(run.rglob(".tmp-*"))


def test_two_ranks_go_on_beside_a_read_only_folder_and_say_that_they_could_not_save(small_disk: Path) -> None:
    arguments = ("train_multigpu", TASK, *OFTEN, "--checkpoints.keep", "2", "--num_gpus", "2")
    with started(*arguments, "--log_root", str(small_disk)) as job:
        job.wait_for(lambda: any(small_disk.glob(f"{TASK}/*/checkpoints/model_*.pt")))
        run = only_run(TASK, small_disk)
        with read_only(run / "checkpoints"):
            job.wait_for_output("read-only file system; make it writable; the training goes on")
            before = iteration_of(run / "checkpoints" / "latest")
            reached = progress_of(run)["iteration"]
            job.wait_for(lambda: progress_of(run)["iteration"] > reached + 5)
            assert job.preempt() == 1  # not 75, which would say that all is saved
            output, errors = job.output, "\n".join(job.errors)
        assert output.count("read-only file system") == 1
        assert f"is not saved, the newest on the disk is model_{before}.pt: can't write" in errors
        assert f"continue with lockstep train_multigpu --resume {run}" in errors
    progress = progress_of(run)
    assert (progress["status"], progress["checkpoint"]) == ("failed", f"checkpoints/model_{before}.pt")
    assert progress["reason"].startswith("the checkpoint of iteration")
    assert iteration_of(run / "checkpoints" / "latest") == before


def test_a_full_disk_at_the_start_is_refused_before_training(small_disk: Path) -> None:
    fill(small_disk / "filler")
    finished = lockstep("train", TASK, *SMALL, "--log_root", str(small_disk))
    assert finished.returncode == 2
    assert finished.stderr.count("\n") == 1
    assert [path.name for path in small_disk.iterdir()] == ["filler"]


def test_rank_0s_clock_says_when_all_save(ranks_2: RankPool, tmp_path: Path) -> None:
    # A clock that is a hundred times as fast changes nothing on rank 1. Rank 0's is looked at in the fourth iteration
    # when three are over, which is 3 s; the next time 3 s after the fourth.
    for fast in (100.0, 0.001):
        folder = tmp_path / str(fast)
        (first, files), (second, none) = ranks_2.run(
            "tests.multiproc.jobs_saving:save_by_clock", PerRank([1.0, fast]), folder
        )
        assert first == second == [4, 8, 10]
        assert files == ["model_10.pt", "model_4.pt", "model_8.pt"]
        assert none == []
