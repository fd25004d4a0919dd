"""A script of the user's own that is asked to stop: what it saves is waited for, and it is not started again."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

TIMEOUT_S = 60.0
SAVE_S = 5.0  # longer than ranks may otherwise take once another has failed

SCRIPT = f"""
import os, signal, sys, time
from pathlib import Path
rank = os.environ["RANK"]
stop = []
signal.signal(signal.SIGUSR1, lambda *_: stop.append(1))
with Path("starts").open("a") as file:
    file.write(rank)
while not stop:
    time.sleep(0.05)
if rank == "0":
    time.sleep({SAVE_S})
    Path("saved").touch()
sys.exit(75)
"""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> "subprocess.Popen[str]":
    """Two ranks that save for a while and leave when they get SIGUSR1, under a launcher that may restart them."""
    monkeypatch.chdir(tmp_path)
    Path("script.py").write_text(SCRIPT)
    words = ["--num_gpus", "2", "--device", "cpu", "--max_restarts", "1", "--script", "script.py"]
    return subprocess.Popen(
        [sys.executable, "-m", "lockstep", "train_multigpu", *words],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )


def test_ranks_that_save_are_waited_for_and_not_started_again(job: "subprocess.Popen[str]") -> None:
    try:
        deadline = time.monotonic() + TIMEOUT_S
        while not Path("starts").exists() or len(Path("starts").read_text()) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        job.send_signal(signal.SIGUSR1)
        _, errors = job.communicate(timeout=TIMEOUT_S)
    finally:
        job.kill()
    assert Path("saved").exists(), errors
    assert job.returncode == 75, errors
    assert sorted(Path("starts").read_text()) == ["0", "1"]
