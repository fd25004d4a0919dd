"""What a training says last: a command that can be typed as it is, and none that a job needs no person for."""

from pathlib import Path

import pytest

from lockstep.cli.train_request import read
from lockstep.core.interrupts import StopRequest
from lockstep.core.metrics import Metrics
from lockstep.core.progress import Progress
from lockstep.core.run_directory import RunDirectory
from lockstep.learn.config import TrainConfig
from lockstep.session.attempts import RUN_KEY
from lockstep.session.observer import RunObserver

TWO_RANKS = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}  # on each of two nodes


def last_words(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    status: str,
    command: str = "train_multigpu",
    device: str = "cpu",
) -> tuple[Path, str]:
    """Return the directory of a run that ends so, and the last line about it."""
    config = TrainConfig(task="cartpole_classic", device=device, logger="none", max_iterations=3)
    run = RunDirectory.create(folder, config.task, "", "task: cartpole_classic\ndevice: cpu\n", {}, 3)
    so_far: Metrics = {"iteration": 3, "env_steps": 0, "wall_s": 0.0}
    progress = Progress("t", run.path)
    with RunObserver(config, run, progress, StopRequest(), so_far, command) as observer:
        observer.finish(status, {})  # type: ignore[arg-type]
    run.close()
    return run.path, capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize(
    ("command", "device", "more"),
    [("train_multigpu", "cpu", " --num_gpus 2"), ("train_multigpu", "auto", ""), ("train", "cpu", "")],
)
def test_the_command_that_goes_on_counts_ranks_where_no_gpus_do(
    command: str,
    device: str,
    more: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in TWO_RANKS.items():
        monkeypatch.setenv(name, value)
    path, line = last_words(tmp_path, capsys, "preempted", command, device)
    assert line == f"preempted and saved: continue with lockstep {command} --resume {path}{more}"
    path, line = last_words(tmp_path, capsys, "finished", command, device)
    assert line.endswith(f"go on with lockstep {command} --resume {path}{more} --max_iterations 6")


def test_a_job_that_goes_on_by_itself_asks_nobody_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(RUN_KEY, "slurm-7")
    path, line = last_words(tmp_path, capsys, "preempted", "train")
    assert line == f"preempted and saved: {path} goes on when this job starts again"
    path, line = last_words(tmp_path, capsys, "interrupted", "train")  # by a person, who may go on by hand
    assert line == f"interrupted and saved: continue with lockstep train --resume {path}"
    assert read(["--resume", str(path)]).resume == path
