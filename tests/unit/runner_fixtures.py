"""Runners that the tests of ``--runner`` name by import string."""

import os
import signal
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from lockstep.core.types import Comm
from lockstep.distributed import DistributedMixin
from lockstep.envs.torch_env import TorchEnv
from lockstep.learn.config import TrainConfig
from lockstep.learn.torch.loop import Observer, Status

HERE = "tests.unit.runner_fixtures"


class Fitting(DistributedMixin):
    """Steps the envs with the action 0 and fits the mean of what it sees; two env steps per iteration."""

    def __init__(self, config: TrainConfig, env: TorchEnv, comm: Comm) -> None:
        self.config, self.env, self.comm = config, env, comm
        torch.manual_seed(comm.rank)
        self.model = nn.Linear(1, env.task.num_observations["actor"])
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.iteration = 0

    def train(self, observer: Observer, evaluation_env: TorchEnv | None) -> Status:
        while self.iteration < self.config.max_iterations:
            error = self.update()
            self.iteration += 1
            observer.record({**self.reduce_metrics({"mean_return": error})})
            stop = self.agree_on_stop(observer.stop_requested)
            observer.save(self.iteration, self.state_dict())
            if stop:
                return stop
        return "finished"

    def update(self) -> torch.Tensor:
        for _ in range(2):
            observations = self.env.step(torch.zeros(self.env.num_envs, 1)).observations["actor"]
        error: torch.Tensor = (self.model(torch.ones(self.env.num_envs, 1)) - observations).square().mean()
        self.optimizer.zero_grad()
        error.backward()
        self.average_gradients(self.model, self.env.num_envs).require_finite()
        self.optimizer.step()
        return error.detach()

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "iteration": self.iteration,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.iteration = state["iteration"]

    def load_weights(self, state: Mapping[str, Any]) -> None:
        self.model.load_state_dict(state["model"])


class Preempted(Fitting):
    """Is told to stop in its second iteration."""

    def update(self) -> torch.Tensor:
        if self.iteration == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        return super().update()


class Drifting(Fitting):
    """Forgets to average the gradients."""

    def average_gradients(self, *arguments: Any) -> Any:
        class Anything:
            def require_finite(self) -> None:
                pass

        return Anything()


class OneArmed(Fitting):
    distributed_unsupported = "it drives the one arm in the laboratory"


class Alone:
    """Knows nothing of ranks, and keeps no state."""

    def __init__(self, config: TrainConfig, env: TorchEnv, comm: Comm) -> None:
        self.max_iterations = config.max_iterations
        self.env = env

    def train(self, observer: Observer, evaluation_env: TorchEnv | None) -> Status:
        for _ in range(self.max_iterations):
            self.env.step(torch.zeros(self.env.num_envs, 1))
            observer.record({"mean_return": torch.tensor(1.5)})  # type: ignore[dict-item]
        return "finished"


class Silent(Alone):
    """Its train returns nothing."""

    def train(self, observer: Observer, evaluation_env: TorchEnv | None) -> Any:
        super().train(observer, evaluation_env)


class Pickled(Fitting):
    """Its state can't be read back safely."""

    def state_dict(self) -> dict[str, Any]:
        return {"inner": [self.config]}


class Idle:
    def __init__(self, config: TrainConfig, env: TorchEnv, comm: Comm) -> None:
        pass


class Bare(Alone):
    def __init__(self, config: TrainConfig) -> None:
        pass


class Deaf(Alone):
    def train(self) -> Any:  # type: ignore[override]
        pass


def function(config: TrainConfig, env: TorchEnv, comm: Comm) -> None:
    """No class."""
