"""Runs for the tests of which run a training goes on with: made by a launch, and left."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.core.config import to_yaml
from lockstep.core.run_directory import RunDirectory
from lockstep.distributed.topology import START, Start
from lockstep.learn.config import TrainConfig
from lockstep.session.attempts import RUN_KEY, attempt_info

CONFIG = TrainConfig(task="cartpole_classic", num_envs=16, max_iterations=100)
LAUNCH = "launch 1"


def create(config: TrainConfig = CONFIG, start: Start | None = None, world_size: int = 1, key: str = "") -> Path:
    """Make a run of a launch, and leave it."""
    start = start or Start(LAUNCH)
    run = RunDirectory.create(
        config.log_root,
        config.task,
        config.run_name,
        to_yaml(config) + f"world_size: {world_size}\n",
        {"seed": 1, "launch_id": start.launch_id or None, "run_key": key or None},
        config.max_iterations,
        attempt_info(start, 0, {}),
    )
    run.close()
    return run.path


def go_on(path: Path, start: Start, iteration: int, variables: Mapping[str, str] | None = None) -> None:
    """Note that another start of the ranks went on in a run."""
    run = RunDirectory.open(path)
    run.begin_attempt((path / "config.yaml").read_text(), None, attempt_info(start, iteration, variables or {}))
    run.close()


def save(path: Path, iteration: int) -> None:
    (path / "checkpoints" / f"model_{iteration}.pt").touch()


def end(path: Path, status: Any, reason: str | None = None, max_iterations: int = 100) -> None:
    run = RunDirectory.open(path)
    run.write_progress(max_iterations, max_iterations, 0, 0.0, status, reason)
    run.close()


def environment(number: int = 0, num_failures: int = 0, launch: str = LAUNCH, last_failure: str = "") -> dict[str, str]:
    start = {"launch_id": launch, "number": number, "num_failures": num_failures, "last_failure": last_failure}
    return {"RANK": "0", START: json.dumps(start)}


def requeued(times: int, key: str = "k") -> dict[str, str]:
    """The variables of a job of SLURM's that has been put back into the queue so often."""
    variables = {RUN_KEY: key, "SLURM_JOB_ID": "7"}
    return variables | ({"SLURM_RESTART_COUNT": str(times)} if times else {})
