"""One command, several ranks: a job as a user starts it, ends it and goes on with it."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.multiproc.commands import LOGS, SMALL, Command, lockstep, metrics_of, num_recorded, only_run, progress_of

TASK = "cartpole_classic"
FLAGS = [*SMALL[2:], "--dtype", "float64", "--num_envs", "24,8", "--sentinel_interval", "1"]


@pytest.fixture(autouse=True)
def _caches_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def untimed(run: Path) -> list[dict[str, Any]]:
    timed = ("time/", "wall_s", "steps_per_s")
    return [{name: value for name, value in record.items() if not name.startswith(timed)} for record in metrics_of(run)]


def test_a_job_ends_well_and_one_process_goes_on_with_it() -> None:
    ours = lockstep("train_multigpu", TASK, *FLAGS, "--num_gpus", "2", "--max_iterations", "3")
    assert ours.returncode == 0, ours.stderr
    run = only_run(TASK)
    assert "iteration 3/3" in ours.stdout
    assert ours.stdout.count("finished: play it with") == 1
    records = metrics_of(run)
    assert [record["env_steps"] for record in records] == [8 * 32, 16 * 32, 24 * 32]
    for name in ("rollout", "update", "wait"):
        for record in records:
            assert record[f"time/{name}_min"] <= record[f"time/{name}_mean"] <= record[f"time/{name}_max"]
    ranks = json.loads((run / "run.json").read_text())["ranks"]
    assert [(rank["rank"], rank["device"]) for rank in ranks] == [(0, "cpu"), (1, "cpu")]
    assert "iteration 3/3" in (run / "ranks" / "rank_0.log").read_text()
    assert (run / "ranks" / "rank_1.log").exists()

    # The same job by hand: no launcher of ours, the same numbers, bit for bit.
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [*torchrun, "-m", "lockstep", "train", TASK, *FLAGS, "--max_iterations", "3", "--log_root", "by_hand"]
    by_hand = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert by_hand.returncode == 0, by_hand.stderr
    assert untimed(only_run(TASK, Path("by_hand"))) == untimed(run)

    resumed = lockstep("train", TASK, "--resume", "--max_iterations", "4")
    assert resumed.returncode == 0, resumed.stderr
    assert [record["iteration"] for record in metrics_of(run)] == [1, 2, 3, 4]
    assert metrics_of(run)[-1]["env_steps"] == 32 * 32
    assert "num_envs: 32" in (run / "config.yaml").read_text()


class Job(Command):
    """A job under way."""

    def __init__(self, *arguments: str) -> None:
        super().__init__("train_multigpu", TASK, *arguments, "--num_gpus", "2", stderr=subprocess.STDOUT)

    def wait_for_iterations(self, number: int) -> Path:
        """Return the run directory once as many iterations are recorded."""
        runs = (LOGS / TASK).glob
        return self.wait_for(lambda: next((run for run in runs("[!.]*") if num_recorded(run) >= number), None))


@pytest.fixture
def jobs() -> Iterator[list[Job]]:
    started: list[Job] = []
    yield started
    for job in started:
        job.kill()


def test_a_job_that_is_asked_to_stop_saves_and_can_go_on(jobs: list[Job]) -> None:
    jobs.append(Job(*FLAGS, "--max_iterations", "100000"))
    run = jobs[-1].wait_for_iterations(2)
    jobs[-1].send(signal.SIGTERM)
    code, said, _ = jobs[-1].end()
    assert code == 75, said
    progress = progress_of(run)
    before = progress["iteration"]
    assert (progress["status"], progress["checkpoint"]) == ("preempted", f"checkpoints/model_{before}.pt")
    assert "Traceback" not in said
    assert "preempted and saved" in said

    jobs.append(Job("--resume"))
    jobs[-1].wait_for_iterations(before + 2)
    jobs[-1].send(signal.SIGINT)
    code, said, _ = jobs[-1].end()
    assert code == 130, said
    assert progress_of(run)["status"] == "interrupted"
    assert "Traceback" not in said
    numbers = [record["iteration"] for record in metrics_of(run)]
    assert numbers == list(range(1, progress_of(run)["iteration"] + 1))
    assert len(json.loads((run / "run.json").read_text())["attempts"]) == 2


def test_a_rank_that_dies_ends_the_job_and_is_named(jobs: list[Job]) -> None:
    jobs.append(Job(*FLAGS, "--max_iterations", "100000"))
    run = jobs[-1].wait_for_iterations(1)
    pid = json.loads((run / "run.json").read_text())["ranks"][1]["pid"]
    began = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    code, said, _ = jobs[-1].end()
    assert time.monotonic() - began < 30
    assert code not in (0, 75, 130)
    assert "rank 1" in said
    assert "SIGKILL" in said


def test_what_only_the_ranks_can_see_is_refused_in_one_line() -> None:
    Path("weights.pt").write_bytes(b"no checkpoint")
    refused = lockstep("train_multigpu", TASK, *FLAGS, "--num_gpus", "2", "--checkpoint", "weights.pt")
    assert refused.returncode == 2
    errors = [line for line in (refused.stdout + refused.stderr).splitlines() if "error" in line]
    assert errors == [line for line in errors if line.startswith("lockstep: error: checkpoint weights.pt")]
    assert len(errors) == 1
    assert "Traceback" not in refused.stderr
    assert not Path("logs").exists()
