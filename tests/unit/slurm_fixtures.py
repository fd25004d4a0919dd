"""``lockstep slurm`` as a user types it, and a run that a job has trained."""

import json
from pathlib import Path

import pytest

from lockstep.cli.main import main

TRAIN = ["--", "train", "cartpole_swingup"]


def written() -> list[str]:
    return sorted(str(path) for path in Path().rglob("*"))


def call(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = main(["slurm", *argv])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def make_run(status: str, **run: object) -> Path:
    path = Path("logs/cartpole_swingup/2026-05-01_09-00-00")
    path.mkdir(parents=True)
    (path / "config.yaml").write_text("task: cartpole_swingup\n")
    attempt = {"start_time": "2026-05-01T09:00:00.123+02:00", "host": "node0", "world_size": 8}
    (path / "run.json").write_text(json.dumps({"attempts": [attempt, attempt | {"host": "node1"}], **run}))
    progress = {"iteration": 120, "max_iterations": 500, "env_steps": 3932160, "wall_s": 210.4, "status": status}
    (path / "progress.json").write_text(json.dumps(progress | {"checkpoint": "checkpoints/model_100.pt"}))
    return path
