"""A rank of a training by another library's learner dies: the job ends soon, with its name, and not with 0."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.multiproc.commands import (
    LOGS,
    SMALL_WITHOUT_MEMORY,
    Command,
    metrics_of,
    num_recorded,
    only_run,
    progress_of,
)

TASK = "cartpole_balance"
BOUND_S = 30.0

pytestmark = pytest.mark.usefixtures("nothing_is_left")


@pytest.mark.parametrize(
    "library", [("rsl_rl",), ("rl_games",), ("skrl",), ("skrl", "--ml_framework", "jax")], ids=" ".join
)
def test_a_killed_rank_ends_the_job_with_its_name(library: tuple[str, ...]) -> None:
    job = Command(
        *("train_multigpu", TASK, *SMALL_WITHOUT_MEMORY, "--num_gpus", "2", "--max_iterations", "1000000"),
        *("--rl_library", *library),
        stdout=subprocess.DEVNULL,
        environment={"XDG_CACHE_HOME": str(Path("cache").absolute()), "COLUMNS": "120"},
    )
    run = job.wait_for(_run_with_three_iterations)
    killed = json.loads((run / "run.json").read_text())["ranks"][1]["pid"]
    os.kill(killed, signal.SIGKILL)
    began = time.monotonic()
    code, _, said = job.end()
    assert time.monotonic() - began < BOUND_S
    assert code == 128 + signal.SIGKILL, said
    last = [line for line in said.splitlines() if line.startswith("lockstep: error: rank ")][-1]
    assert last.startswith("lockstep: error: rank 1 (local rank 1 on ")
    assert f"pid {killed}) was killed by SIGKILL" in last
    assert progress_of(run)["status"] == "failed"
    assert {"mean_return", "steps_per_s", "time/wait_mean"} <= metrics_of(run)[-1].keys()


def _run_with_three_iterations() -> Path | None:
    if not list((LOGS / TASK).glob("2*")):
        return None
    run = only_run(TASK)
    return run if num_recorded(run) >= 3 else None
