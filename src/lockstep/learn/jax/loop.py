"""The training loop of JAX: iterate, log, evaluate, save, stop."""

import time
from collections.abc import Callable
from typing import Any, Protocol

from lockstep.core import beats
from lockstep.core.errors import RunError
from lockstep.core.interrupts import StopReason
from lockstep.core.saves import saving
from lockstep.distributed.jax_comm import JaxComm, lost_processes_in_words
from lockstep.distributed.jax_mesh import RankMesh
from lockstep.distributed.jax_sentinel import Sentinel
from lockstep.learn.config import TrainConfig
from lockstep.learn.jax.guest import GuestTraining
from lockstep.learn.jax.training import Training
from lockstep.learn.observer import Metrics, NonFiniteError, Observer, Status, nonfinite_in_words


class Iterates(Protocol):
    """What the loop needs of a training: of an algorithm, or by a learner of another library."""

    config: TrainConfig
    ranks: RankMesh
    comm: JaxComm
    iteration: int
    wall_s: float
    stop_agreed: StopReason | None
    save_agreed: bool

    @property
    def evaluates(self) -> bool:
        """Whether there are envs for evaluations."""

    @property
    def replicated(self) -> Any:
        """What must be the same on every rank: a tree of global arrays."""

    def iterate(self, stop_requested: Callable[[], StopReason | None], save_due: Callable[[], bool]) -> Metrics:
        """Run one iteration and return its metrics."""

    def evaluate(self) -> Metrics:
        """Run the episodes of an evaluation; return its metrics."""

    def state_dict(self) -> dict[str, Any]:
        """Return the content of a checkpoint."""


def train(training: Iterates, observer: Observer) -> Status:
    """Go on training up to ``max_iterations`` of its config, or until the observer asks to stop.

    Args:
        training: new, or taken up from a checkpoint.
        observer: is told everything, on each process.

    Raises:
        RunError: a check of the algorithm failed; it is named and the state is saved.
    """
    config = training.config
    sentinel = Sentinel(training.ranks, config.sentinel_interval, training.comm.gather_text)
    began = time.perf_counter() - training.wall_s
    first = training.iteration + 1  # whose comparison compiles, as all of it does, so that no later iteration has to
    while training.iteration < config.max_iterations:
        metrics = _iterate(training, observer)
        last = training.iteration == config.max_iterations
        stop = training.stop_agreed
        is_kept = bool(stop) or last or training.save_agreed or training.iteration % config.checkpoints.interval == 0
        is_forced = is_kept or training.iteration == first
        if sentinel.is_due(training.iteration, is_forced):
            sentinel.check(training.iteration, training.replicated, is_forced)
        if training.evaluates and (last or training.iteration % config.evaluation.interval == 0):
            metrics |= training.evaluate()
        training.wall_s = time.perf_counter() - began
        observer.record(metrics | {"wall_s": training.wall_s})
        if is_kept:
            # Every process says so: if one were ended meanwhile, since it was told to, the others' save would be lost.
            with saving(), beats.within("save"):
                observer.save(training.iteration, training.state_dict())
        if stop and not last:
            return stop
    return "finished"


class _Runs:
    """Gives a training the method by which the session runs it."""

    def train(self: Iterates, observer: Observer, evaluation_env: object = None) -> Status:
        """Go on training up to ``max_iterations``, or until the observer asks to stop.

        ``evaluation_env`` is left alone: the training was given its own.

        Raises:
            RunError: a check of the algorithm failed, or another process has ended.
        """
        with lost_processes_in_words("an iteration"):
            return train(self, observer)


class JaxRunner(_Runs, Training):
    """Any algorithm as the session runs it."""


class GuestRunner(_Runs, GuestTraining):
    """A learner of another library as the session runs it."""


def _iterate(training: Iterates, observer: Observer) -> Metrics:
    try:
        return training.iterate(lambda: observer.stop_requested, lambda: observer.save_due)
    except NonFiniteError as error:
        with saving(), beats.within("save"):
            content = training.state_dict()
            path = training.comm.on_main(
                lambda: str(observer.save_failure(training.iteration, content) or ""), "failure"
            )
        raise RunError(nonfinite_in_words(training.iteration + 1, error, path), shared=True) from None
