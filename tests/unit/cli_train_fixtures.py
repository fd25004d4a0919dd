"""A task that lives only in tests of ``lockstep train``, and what its command line is read as."""

import sys
import types
from pathlib import Path
from typing import Any

import pytest
from pydantic import Field

from lockstep.cli.train_request import read
from lockstep.core.config import to_yaml
from lockstep.core.errors import UsageError
from lockstep.envs.config import EnvConfig
from lockstep.learn.config import TrainConfig
from lockstep.recipes.catalog import TASKS, TaskEntry


class PendulumConfig(EnvConfig):
    """Settings only this task has."""

    length: float = Field(0.5, description="of the rod in m")
    start: tuple[float, ...] = Field((0.0,), description="angles in rad")
    wind: bool = Field(False, description="blow")
    seed_of_wind: int | None = Field(None, description="repeat the same wind")


class Pendulum:
    """The task itself, of which the command line needs no more than whether it can be distributed."""


RECIPE = TrainConfig(task="pendulum", num_envs=256, env=PendulumConfig(length=1.0))


def add_pendulum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let there be the task ``pendulum`` for the length of a test."""
    module = types.ModuleType("pendulum_recipe")
    vars(module)["pendulum"] = lambda: RECIPE
    monkeypatch.setitem(sys.modules, "pendulum_recipe", module)
    task = types.ModuleType("pendulum_task")
    vars(task)["Pendulum"] = Pendulum
    monkeypatch.setitem(sys.modules, "pendulum_task", task)
    entry = TaskEntry("pendulum", "swing", "pendulum_task:Pendulum", "pendulum_recipe:pendulum", ("analytic", "mujoco"))
    monkeypatch.setitem(TASKS._entries, "pendulum", entry)


def config_of(*argv: str) -> TrainConfig:
    return read(["pendulum", *argv]).config


def settings_of(config: TrainConfig) -> dict[str, Any]:
    return config.env.model_dump()


def refused(*argv: str) -> str:
    with pytest.raises(UsageError) as error:
        read(argv)
    message = str(error.value)
    assert len(message.splitlines()) == 1
    return message


def write_run(parent: Path, name: str, config: TrainConfig) -> Path:
    run = parent / config.task / name
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(to_yaml(config) + "world_size: 1\n", encoding="utf-8")
    (run / "run.json").write_text("{}", encoding="utf-8")
    return run
