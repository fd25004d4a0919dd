"""Ranks that are started again go on where they were: after a kill, on fewer or more nodes, and not for ever."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.multiproc.commands import (
    Command,
    assert_same_curve,
    attempts_of,
    free_port,
    metrics_of,
    num_recorded,
    progress_of,
    wait_for,
)

TASK = "cartpole_classic"
SMALL = (
    TASK, "--total_envs", "16", "--agent.num_steps_per_env", "8", "--agent.num_learning_epochs", "2",
    "--agent.actor_hidden_dims", "16", "--agent.critic_hidden_dims", "16", "--agent.schedule", "fixed",
    "--env.max_episode_steps", "50", "--evaluation.interval", "0", "--logger", "none", "--device", "cpu",
    "--dtype", "float64", "--checkpoints.interval", "5",
)  # fmt: skip
LAST = 40
TIMEOUT_S = 180.0
RUNS = Path("logs", TASK)
# A rank that a test holds does not move.
LAUNCH = ("train_multigpu", "--hang_timeout", "0")


pytestmark = pytest.mark.usefixtures("nothing_is_left")


def runs() -> list[Path]:
    return sorted(RUNS.glob("[!.]*"))


def only_run() -> Path:
    (run,) = runs()
    return run


def has_come_to(iteration: int) -> bool:
    return any(num_recorded(run) >= iteration for run in runs())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The curve of the same envs in one process that nobody disturbs."""
    folder = tmp_path_factory.mktemp("undisturbed")
    command = [sys.executable, "-m", "lockstep", "train", *SMALL, "--max_iterations", str(LAST)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    (run,) = (folder / RUNS).iterdir()
    return metrics_of(run)


def test_a_killed_rank_costs_no_more_than_the_way_from_the_last_checkpoint(
    hold: Callable[[int], None], undisturbed: list[dict[str, Any]]
) -> None:
    randomness = random.Random()
    instant, delay_s = randomness.randint(1, LAST - 15), randomness.uniform(0.0, 0.1)
    print(f"killed {delay_s:.3f} s after iteration {instant}")
    hold(instant)
    launch = Command(*LAUNCH, "--num_gpus", "2", "--max_restarts", "1", *SMALL, "--max_iterations", str(LAST))
    wait_for(lambda: has_come_to(instant))
    run = only_run()
    victim = json.loads((run / "run.json").read_text())["ranks"][1]["pid"]
    hold(LAST - 5)  # so that it is not over before the kill
    time.sleep(delay_s)
    os.kill(victim, signal.SIGKILL)
    hold(LAST)
    code, output, errors = launch.end()
    assert code == 0, errors
    assert_same_curve(run, undisturbed)
    assert progress_of(run)["status"] == "finished"
    first, second = attempts_of(run)
    assert first["launch_id"] == second["launch_id"]
    assert [(each["restart"], each["num_failures"], each["world_size"]) for each in (first, second)] == [
        (0, 0, 2),
        (1, 1, 2),
    ]
    # The line of an iteration is there before its checkpoint is.
    assert second["iteration"] in range(0, LAST, 5) and second["iteration"] >= (instant - 1) // 5 * 5
    said = (
        f"restart 1 after a failure (rank 1 was killed by SIGKILL): {run} goes on from iteration {second['iteration']}"
    )
    assert said in output.splitlines()


CRASHING = """
import torch
from lockstep.distributed import DistributedMixin

class Crashing(DistributedMixin):
    def __init__(self, config, env, comm):
        self.config, self.comm, self.model, self.iteration = config, comm, torch.nn.Linear(1, 1), 0

    def train(self, observer, evaluation_env):
        while self.iteration < self.config.max_iterations:
            self.iteration += 1
            if self.iteration == 4 and self.comm.rank == 1:
                raise LookupError("planted")
            observer.record({"iteration": self.iteration})
            self.reduce_metrics({"one": (1.0, 1)})
        return "finished"
"""


def test_a_crash_loop_ends_before_all_restarts_are_used_up(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("crashing.py").write_text(CRASHING)
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))
    runner = ("--runner", "crashing:Crashing", "--max_iterations", "10")
    code, _, errors = Command("train_multigpu", "--num_gpus", "2", "--max_restarts", "10", *SMALL, *runner).end()
    assert code == 1, errors
    run = only_run()
    assert [each["iteration"] for each in attempts_of(run)] == [0, 0, 0]
    said = (
        "lockstep: error: 3 attempts in a row failed before a new checkpoint after iteration 0; last reason: rank 1: "
        f"LookupError: planted; mend it, then --resume {run}"
    )
    assert errors.splitlines().count(said) == 1, errors
    assert progress_of(run)["status"] == "failed"


def test_what_is_refused_is_not_tried_again() -> None:
    code, _, errors = Command(
        "train_multigpu", "--num_gpus", "2", "--max_restarts", "3", *SMALL, "--checkpoint", "nothing.pt"
    ).end()
    assert code == 2
    assert errors.count("nothing.pt") == 1, errors
    assert "start again" not in errors
    assert not RUNS.exists()


def test_nodes_come_and_go_and_the_curve_stays(hold: Callable[[int], None], undisturbed: list[dict[str, Any]]) -> None:
    # An agent on a busy machine may be late, but not by ten seconds.
    conf = "last_call_timeout=1,keep_alive_interval=2,keep_alive_max_attempt=5"
    node = (
        *LAUNCH, "--nnodes", "1:2", "--num_gpus", "1", "--rdzv_endpoint", f"127.0.0.1:{free_port()}", "--rdzv_id",
        "job7", "--rdzv_conf", conf, "--local_addr", "127.0.0.1", "--max_restarts", "1", *SMALL,
        "--max_iterations", str(LAST),
    )  # fmt: skip
    hold(12)
    first = Command(*node)
    wait_for(lambda: has_come_to(12))
    run = only_run()
    hold(23)
    second = Command(*node)
    wait_for(lambda: len(attempts_of(run)) == 2 and has_come_to(23))
    second.kill()
    hold(LAST)
    code, _, errors = first.end()
    assert code == 0, errors
    assert "1 to 2 nodes meet at" in errors
    assert_same_curve(run, undisturbed)
    found = attempts_of(run)
    assert len({each["launch_id"] for each in found}) == 1
    # What a node that comes later costs is nothing: the ranks save and stop before they start again.
    assert found[1]["iteration"] >= 12
    assert [(each["world_size"], each["restart"], each["num_failures"]) for each in found] == [
        (1, 0, 0),
        (2, 1, 0),
        (1, 2, 1),
    ]


def test_jobs_of_one_second_find_each_its_own_run_again(hold: Callable[[int], None]) -> None:
    def both(*flags_of_first: str) -> list[tuple[int, str, str]]:
        common = ("train", *SMALL, "--max_iterations", "6", "--resume", "auto")
        jobs = [
            Command(*common, *flags_of_first, environment={"LOCKSTEP_RUN_KEY": "one"}),
            Command(*common, environment={"LOCKSTEP_RUN_KEY": "other"}),
        ]
        if not Path("logs").exists():
            wait_for(lambda: [num_recorded(run) for run in runs()] == [3, 3])
            for job in jobs:
                job.process.send_signal(signal.SIGTERM)
        return [job.end() for job in jobs]

    hold(3)
    assert [code for code, _, _ in both()] == [75, 75]
    hold(6)
    (code, output, errors), (other_code, other_output, _) = both("--agent.learning_rate", "1e-4")
    assert (code, other_code) == (0, 0), errors
    by_key = {json.loads((run / "run.json").read_text())["run_key"]: run for run in runs()}
    assert sorted(by_key) == ["one", "other"]
    assert f"{by_key['one']} goes on from iteration 4, now with agent.learning_rate 0.0001 (was 0.001)\n" in output
    assert f"{by_key['other']} goes on from iteration 4\n" in other_output
    before = {path: path.read_bytes() for run in runs() for path in (run / "run.json", run / "progress.json")}
    assert [(code, output) for code, output, _ in both()] == [
        (0, f"nothing to do: {by_key[key]} is finished\n") for key in ("one", "other")
    ]
    assert {path: path.read_bytes() for path in before} == before
    assert [len(attempts_of(run)) for run in runs()] == [2, 2]
