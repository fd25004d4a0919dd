"""The training loop: iterate, log, evaluate, save, stop."""

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from lockstep.core import beats
from lockstep.core.errors import RunError
from lockstep.core.interrupts import StopReason
from lockstep.core.saves import saving
from lockstep.core.types import Comm
from lockstep.distributed.torch_sentinel import Sentinel
from lockstep.envs.batch_env import BatchEnv
from lockstep.learn.config import TrainConfig
from lockstep.learn.observer import Metrics, NonFiniteError, nonfinite_in_words
from lockstep.learn.observer import Observer as Observer  # where runners of the user's look for it
from lockstep.learn.observer import Status as Status
from lockstep.learn.torch.evaluation import DecidesAlone, evaluate, summarise
from lockstep.learn.torch.training import Training


class Iterates(Protocol):
    """What the loop needs of a training: ours, or one by a learner of another library."""

    config: TrainConfig
    comm: Comm
    iteration: int
    wall_s: float
    stop_agreed: StopReason | None
    save_agreed: bool

    @property
    def policy(self) -> DecidesAlone:
        """That is evaluated."""

    def iterate(self, stop_requested: Callable[[], StopReason | None], save_due: Callable[[], bool]) -> Metrics:
        """Run one iteration and return its metrics."""

    def replicated_state(self) -> dict[str, torch.Tensor]:
        """Return everything that must be the same on every rank, by name."""

    def state_dict(self) -> dict[str, Any]:
        """Return the content of a checkpoint."""

    def failure_dict(self) -> dict[str, Any]:
        """Return the content of a checkpoint of a training that can't go on."""


def train(training: Iterates, observer: Observer, evaluation_env: BatchEnv | None = None) -> Status:
    """Go on training up to ``max_iterations`` of its config, or until the observer asks to stop.

    Args:
        training: new, or taken up from a checkpoint.
        observer: is told everything.
        evaluation_env: envs of its own for evaluations; None: no evaluation.

    Raises:
        RunError: a tensor was not finite; it is named and the state is saved.
    """
    config = training.config
    sentinel = Sentinel(training.comm, config.sentinel_interval)
    began = time.perf_counter() - training.wall_s
    while training.iteration < config.max_iterations:
        metrics = _iterate(training, observer)
        last = training.iteration == config.max_iterations
        stop = training.stop_agreed
        is_kept = bool(stop) or last or training.save_agreed or training.iteration % config.checkpoints.interval == 0
        sentinel.check(training.iteration, training.replicated_state(), is_kept)
        if evaluation_env is not None and (last or training.iteration % config.evaluation.interval == 0):
            metrics |= summarise(evaluate(training.policy, evaluation_env), training.comm)
        training.wall_s = time.perf_counter() - began
        observer.record(metrics | {"wall_s": training.wall_s})
        if is_kept:
            # Every rank says so: if one were ended meanwhile, for having been told to, the others' save would be lost.
            with saving(), beats.within("save"):
                observer.save(training.iteration, training.state_dict())
        if stop and not last:
            return stop
    return "finished"


class PpoRunner(Training):
    """The learner as the session runs it; ``train`` is the function above."""

    def train(self, observer: Observer, evaluation_env: BatchEnv | None) -> Status:
        """Go on training up to ``max_iterations``, or until the observer asks to stop."""
        return train(self, observer, evaluation_env)


def _iterate(training: Iterates, observer: Observer) -> Metrics:
    try:
        return training.iterate(lambda: observer.stop_requested, lambda: observer.save_due)
    except NonFiniteError as error:
        with saving(), beats.within("save"):
            content = training.failure_dict()
            path = training.comm.on_main(
                lambda: str(observer.save_failure(training.iteration, content) or ""), "failure"
            )
        raise RunError(nonfinite_in_words(training.iteration + 1, error, path), shared=True) from None
