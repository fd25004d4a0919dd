"""A runner of the user's own, made to look like lockstep's own learner to the rest of the session."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import torch

from lockstep.core import beats
from lockstep.core.errors import RunError, UsageError
from lockstep.core.interrupts import StopReason
from lockstep.core.saves import saving
from lockstep.core.types import Comm
from lockstep.distributed.torch_mixin import DistributedMixin
from lockstep.distributed.torch_sentinel import Sentinel
from lockstep.distributed.torch_state import broadcast_value, require_plain, tensors_of
from lockstep.envs.batch_env import BatchEnv
from lockstep.learn.config import TrainConfig
from lockstep.learn.observer import OwnTimes
from lockstep.learn.torch import checkpoint
from lockstep.learn.torch.loop import Observer, Status
from lockstep.learn.torch.reporting import Metrics, steps_since

_COUNTERS = ("iteration", "env_steps", "wall_s")
_STATUSES = ("finished", *get_args(StopReason))


class UserRunner:
    """Makes a user's runner, keeps its ranks in step, and fills in what every run has.

    Args:
        kind: the user's class, checked by ``check_runner``.
        config: of the run.
        env: this rank's envs.
        comm: the ranks.

    Attributes:
        iteration: the last that was recorded.
        env_steps: of all ranks, so far.
        wall_s: seconds of training so far, earlier attempts included.
        own_times: None: a runner does not tell.
    """

    own_times: OwnTimes | None = None

    def __init__(self, kind: type, config: TrainConfig, env: BatchEnv, comm: Comm) -> None:
        self.iteration, self.env_steps, self.wall_s = 0, 0, 0.0
        self.config, self.env, self.comm = config, env, comm
        self._runner = kind(config, env, comm)
        self._broadcast()

    @property
    def so_far(self) -> Metrics:
        """The counters: iteration, env_steps and wall_s."""
        return {name: getattr(self, name) for name in _COUNTERS}

    def train(self, observer: Observer, evaluation_env: BatchEnv | None) -> Status:
        """Let the runner train; return how it ended.

        Raises:
            RunError: its ``train`` returns something else.
        """
        status: Status = self._runner.train(_RunnerObserver(self, observer), evaluation_env)
        if status not in _STATUSES:
            raise RunError(
                f"train() of runner {self.config.runner} returned {status!r}; it must return one of "
                f"{', '.join(_STATUSES)}, and the reason of a stop that was asked for"
            )
        return status

    # --- saving and continuing -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the content of a checkpoint with the runner's own state in it."""
        return self.content(self.iteration, self._runner.state_dict())

    def content(self, iteration: int, state: Any) -> dict[str, Any]:
        """Return the content of a checkpoint.

        Raises:
            UsageError: the runner's state has something in it that can't be read back; it is named.
        """
        require_plain(state, "state")
        return {
            "format": checkpoint.FORMAT,
            "ml_framework": "torch",
            "task": self.config.task,
            "config": self.config.model_dump(mode="json"),
            "policy": {},  # where lockstep's own learner has its network
            "state": state,
            **self.so_far,
            "iteration": iteration,
        }

    def load_state_dict(self, saved: Mapping[str, Any] | None, path: object) -> None:
        """Continue where a checkpoint of this runner was taken; only rank 0 has its content."""
        content = self._share(saved, path, self.config.max_iterations)
        self._runner.load_state_dict(content["state"])
        self._broadcast()
        self.iteration, self.env_steps, self.wall_s = (content[name] for name in _COUNTERS)

    def require_ready(self) -> None:
        """Do nothing: a runner is ready when it is made."""

    def load_weights(self, saved: Mapping[str, Any] | None, path: object) -> None:
        """Begin with the weights of a checkpoint of this runner; only rank 0 has its content."""
        self._runner.load_weights(self._share(saved, path)["state"])
        self._broadcast()

    def _share(self, saved: Mapping[str, Any] | None, path: object, last: float = math.inf) -> dict[str, Any]:
        """Return on every rank what rank 0 has read, if it fits and is of iteration ``last`` at most."""
        needed: dict[str, Any] = {}

        def check() -> str:
            assert saved is not None
            self._require_fit(saved, path, last)
            needed.update({name: saved[name] for name in ("state", *_COUNTERS)})
            return ""

        self.comm.on_main(check, "checkpoint")
        shared: dict[str, Any] = broadcast_value(needed, comm=self.comm)
        return shared

    def _require_fit(self, saved: Mapping[str, Any], path: object, last: float) -> None:
        if saved["task"] != self.config.task:
            raise UsageError(f"checkpoint {path} is of task {saved['task']!r}, not {self.config.task!r}; use its own")
        missing = [name for name in ("state", *_COUNTERS) if name not in saved]
        if missing:
            raise UsageError(f"checkpoint {path} is incomplete: it has no {missing[0]}; use another one")
        if saved["iteration"] > last:
            raise UsageError(
                f"checkpoint {path} is of iteration {saved['iteration']}, past max_iterations {last}, which is the "
                "total; use a larger --max_iterations"
            )

    # --- several ranks -------------------------------------------------------------------------------------------

    def _broadcast(self) -> None:
        if isinstance(self._runner, DistributedMixin):
            self._runner.broadcast()

    def replicated(self) -> dict[str, torch.Tensor]:
        """Return by name what must be the same on every rank; nothing for a runner that knows no ranks."""
        return tensors_of(self._runner.replicated()) if isinstance(self._runner, DistributedMixin) else {}


class _RunnerObserver:
    """What the user's runner tells of itself, made complete, compared over ranks, and passed on."""

    def __init__(self, runner: UserRunner, observer: Observer) -> None:
        self._runner, self._observer = runner, observer
        config = runner.config
        self._sentinel = Sentinel(runner.comm, config.sentinel_interval)
        self._total_envs = sum(config.envs_by_rank(runner.comm.world_size))
        self._began = time.perf_counter() - runner.wall_s
        self._num_steps = runner.env.num_steps

    @property
    def stop_requested(self) -> StopReason | None:
        """Why this rank's training should save and stop, or None."""
        return self._observer.stop_requested

    @property
    def save_due(self) -> bool:
        """Whether it is time for a checkpoint on this rank's clock."""
        return self._observer.save_due

    def record(self, metrics: Mapping[str, Any]) -> None:
        """Take one iteration's metrics: numbers, tensors ``()`` or None by name."""
        runner = self._runner
        own = {name: value.item() if isinstance(value, torch.Tensor) else value for name, value in metrics.items()}
        wall_s = time.perf_counter() - self._began
        new_steps = steps_since(self._num_steps, runner.env)
        self._num_steps = runner.env.num_steps
        env_steps = int(own.get("env_steps", runner.env_steps + new_steps * self._total_envs))
        rate = (env_steps - runner.env_steps) / max(wall_s - runner.wall_s, 1e-9)
        runner.iteration = int(own.get("iteration", runner.iteration + 1))
        runner.env_steps, runner.wall_s = env_steps, wall_s
        if self._sentinel.is_due(runner.iteration):
            self._sentinel.check(runner.iteration, runner.replicated())
        self._observer.record({"steps_per_s": rate, **own, **runner.so_far})

    def save(self, iteration: int, content: dict[str, Any]) -> None:
        """Keep a checkpoint with the runner's state, if it is the same on all ranks."""
        if self._sentinel.is_due(iteration, is_kept=True):
            self._sentinel.check(iteration, self._runner.replicated(), is_kept=True)
        with saving(), beats.within("save"):
            self._observer.save(iteration, self._runner.content(iteration, content))

    def save_failure(self, iteration: int, content: dict[str, Any]) -> Path | None:
        """Keep the state of a training that can't go on."""
        return self._observer.save_failure(iteration, self._runner.content(iteration, content))
