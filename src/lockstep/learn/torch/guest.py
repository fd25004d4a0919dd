"""A learner of another library as one of ours: the same loop, run directory, checks between ranks, and words.

What a library brings stands in an adapter, a ``GuestLearner``: how it collects, updates and is saved. All else is here.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import nn
from torch.distributions import Distribution

from lockstep.core import beats
from lockstep.core.errors import UsageError
from lockstep.core.interrupts import StopReason
from lockstep.core.registry import load
from lockstep.core.rng import stream_seed
from lockstep.core.types import Comm, Observations, Task
from lockstep.distributed.torch_guests import guest_group
from lockstep.distributed.torch_state import Replicated, broadcast_named, broadcast_value, require_plain, tensors_of
from lockstep.distributed.torch_statistics import Number
from lockstep.envs.batch_env import BatchEnv
from lockstep.learn.config import TrainConfig
from lockstep.learn.guest_settings import breakdown_in_words, refused_in_words
from lockstep.learn.observer import Metrics, NonFiniteError, Observer, OwnTimes, Status, no_clock, nobody_asks
from lockstep.learn.resuming import (
    incomplete_in_words,
    require_iterations,
    require_like,
    require_num_envs,
    require_num_models,
    require_parts,
    require_settings,
    require_task,
)
from lockstep.learn.torch import checkpoint, loop, sharding
from lockstep.learn.torch.guest_reporting import first_nonfinite, gather, own_row, share
from lockstep.learn.torch.networks import Memory
from lockstep.learn.torch.reporting import OwnIteration, steps_since
from lockstep.learn.torch.training import place_among_envs


class PolicyParts(NamedTuple):
    """A policy taken apart, for its export: what it is made of in the order in which an observation passes through."""

    normalizer: nn.Module
    """Raw observations ``(num_envs, num_observations)`` to inputs of the same shape."""
    memory: Memory | None
    layers: nn.Sequential
    """The last is linear."""
    head: Literal["mean", "choice", "squashed"]
    """What makes an action of the last layer: nothing, the largest entry's index, or tanh of the first half."""


class GuestPolicy(Protocol):
    """The actor of another library, a ``torch.nn.Module``, as it is evaluated, played and exported."""

    num_observations: Mapping[str, int]
    """Sizes of the groups that it looks at; ``actor`` among them."""

    def initial_memory(self, num_envs: int) -> torch.Tensor:
        """Return the memory in which episodes start, ``(num_parts, num_envs, size)``; without one ``(0, ...)``."""

    def most_likely(self, observations: Observations, memory: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return actions and the new memory for raw observations; nothing that is trained or counted changes."""

    def parts(self) -> PolicyParts:
        """Return what it is made of.

        Raises:
            UsageError: it can't be taken apart so.
        """


class GuestLearner(Protocol):
    """A learner of another library on one rank. Every rank calls the same methods in the same order.

    All of it runs inside ``guest_group``: the library finds the job's process group. Beside its own exchanges it may
    use ``comm``, and should for what it must have in common: gradients, by ``average_gradients``, and moments.
    """

    policy: Any
    """A ``GuestPolicy``, up to date whenever an iteration is over."""

    def __init__(self, config: TrainConfig, env: BatchEnv, comm: Comm) -> None:
        """Build networks, optimizers and buffers, in the library's own way.

        torch's generator is the same on all ranks meanwhile; afterwards it is each rank's own.

        Args:
            config: of the run: ``agent`` in our words, over which ``library`` is laid in the library's.
            env: this rank's envs, reset.
            comm: the ranks, one or more.

        Raises:
            UsageError: what is asked for can't be, on so many ranks perhaps; every rank says the same, since it follows
                from the config. What this machine alone lacks has an ImportError or OSError as its cause.
        """

    def require_ready(self) -> None:
        """Raise UsageError if it can't start, once checkpoints are loaded and before anything is written."""

    def collect(self) -> None:
        """Step every env ``config.agent.num_steps_per_env`` times and keep what is learned from."""

    def update(self) -> Mapping[str, Number]:
        """Learn from it; return the losses and the like of this rank, means over its samples, by name.

        ``kl`` and ``learning_rate`` are names that the display knows. None where nothing was learned yet. A loss that
        is not finite ends the training; what has a "/" in its name is told beside the losses, and may be NaN where
        there is nothing. A rank without envs may tell anything.
        """

    def merge(self) -> None:
        """Make the same on all ranks what the update did not: normalisers, counters."""

    def replicated(self) -> Mapping[str, Replicated]:
        """Return by name what is the same on every rank, for rank 0's to be sent and for the sentinel to compare."""

    def state_dict(self) -> dict[str, Any]:
        """Return what goes on from iteration to iteration: tensors, numbers, texts, dicts, lists, tuples.

        What it remembers of single envs stands under ``memory``, and what was collected of them under ``replay``.
        """

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there, on every rank; tensors are on the CPU.

        The envs have been loaded by then. One whose ``episode_length`` is 0 is at the begin of an episode, which may be
        another than the one that it was in: nothing is to be remembered of it.
        """

    def retune(self, learning_rate: float) -> None:
        """Take up another learning rate than the state's, on every rank.

        Called after ``load_state_dict`` where ``config.agent.learning_rate`` is not that of the run that was saved.
        """

    def load_weights(self, state: Mapping[str, Any]) -> None:
        """Begin with the networks, and normalisers, of a state alone; ``memory`` and ``replay`` are not in it."""

    @staticmethod
    def load_policy(config: TrainConfig, state: Mapping[str, Any], task: Task) -> Any:
        """Return the ``GuestPolicy`` of a state, on the CPU, without envs and without ranks."""


_OF_ENVS = ("memory", "replay")
"""Parts of a learner's state that are rows of envs, and no use to other envs."""


class GuestTraining:
    """A training by a learner of another library, on this rank.

    Args:
        learner: import string of a ``GuestLearner``.
        config: of the run.
        env: this rank's envs; their global ids follow on those of the rank before.
        comm: the ranks.

    Attributes:
        stop_agreed: why all ranks stop after this iteration, or None.
        save_agreed: whether rank 0's clock asked for a checkpoint of this iteration.
        own_times: what this rank did in this iteration; None before the first.
    """

    def __init__(self, learner: str, config: TrainConfig, env: BatchEnv, comm: Comm) -> None:
        self.config, self.env, self.comm = config, env, comm
        self.total_envs, self._first_env = place_among_envs(env, comm)
        self.iteration, self.env_steps, self.wall_s = 0, 0, 0.0
        self.stop_agreed: StopReason | None = None
        self.save_agreed = False
        self.own_times: OwnTimes | None = None
        self._names: tuple[str, ...] = ()  # of losses that a rank has told of so far, the same on all
        with guest_group(comm):
            with _said_once(), torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(stream_seed(config.seed, "policy"))
                kind = load(learner)
                with refused_in_words(config):
                    self.learner: GuestLearner = kind(config, env, comm)
            self._broadcast()

    @property
    def policy(self) -> GuestPolicy:
        """The actor."""
        policy: GuestPolicy = self.learner.policy
        return policy

    def require_ready(self) -> None:
        """Raise UsageError if the learner lacks what only a file, or a checkpoint, can bring."""
        self.learner.require_ready()

    @property
    def so_far(self) -> Metrics:
        """The counters: iteration, env_steps and wall_s."""
        return {"iteration": self.iteration, "env_steps": self.env_steps, "wall_s": self.wall_s}

    def train(self, observer: Observer, evaluation_env: BatchEnv | None) -> Status:
        """Go on training up to ``max_iterations``, or until the observer asks to stop."""
        return loop.train(self, observer, evaluation_env)

    def replicated_state(self) -> dict[str, torch.Tensor]:
        """Return everything that must be the same on every rank, by name."""
        counters = torch.tensor([self.iteration, self.env_steps], device=self.env.device)
        return tensors_of(self.learner.replicated()) | {"counters": counters}

    def _broadcast(self) -> None:
        broadcast_named(self.learner.replicated(), self.comm)

    # --- iterations ------------------------------------------------------------------------------------------------

    def iterate(
        self, stop_requested: Callable[[], StopReason | None] = nobody_asks, save_due: Callable[[], bool] = no_clock
    ) -> Metrics:
        """Run one iteration: collect, update, make the same on all ranks; return its metrics.

        Args:
            stop_requested: why this rank should stop, asked at the end of the iteration.
            save_due: whether a checkpoint is due by this rank's clock.

        Raises:
            NonFiniteError: a loss or a parameter is not finite any more.
            RunError: the same, and the library broke down over it.
        """
        self.comm.take_waits()  # those of evaluations and checkpoints, which are no part of an iteration
        beats.at_iteration(self.iteration)
        beats.enter("rollout")
        steps_before = self.env.num_steps
        words = breakdown_in_words(self.iteration + 1, self._first_nonfinite, self.comm.rank)
        with guest_group(self.comm), words, _unchecked_distributions():
            rollout_s, waits = self._timed(self.learner.collect)
            beats.enter("update")
            losses: dict[str, float] = {}
            update_s, update_waits = self._timed(lambda: losses.update(_numbers(self.learner.update())))
            merge_s, merge_waits = self._timed(self.learner.merge)
        waits += update_waits + merge_waits
        update_s += merge_s
        own = OwnIteration(
            num_steps=self.env.num_envs * steps_since(steps_before, self.env),
            times_s=(rollout_s, update_s, sum(wait.seconds for wait in waits)),
            stop=stop_requested(),
            save_due=save_due(),
        )
        row = own_row(self.env, own, losses, self.replicated_state(), self._names)
        table, self._names = gather(row, losses, self._names, self.comm)
        metrics, self.stop_agreed, self.save_agreed, is_bad = share(self.env, table, self._names)
        waits += self.comm.take_waits()
        self.own_times = OwnTimes({"rollout": rollout_s, "update": update_s}, tuple(waits))
        if is_bad:
            raise NonFiniteError(self._first_cause(losses))
        self.iteration += 1
        self.env_steps += int(metrics.pop("num_steps") or 0)
        beats.at_iteration(self.iteration)
        return {"iteration": self.iteration, "env_steps": self.env_steps} | metrics

    def _timed(self, work: Callable[[], Any]) -> tuple[float, list[Any]]:
        """Do some work; return its seconds without waits, and the waits."""
        began = time.perf_counter()
        work()
        if self.env.device.type == "cuda":
            with beats.exchange("device"):
                torch.cuda.synchronize(self.env.device)
        waits = self.comm.take_waits()
        return time.perf_counter() - began - sum(wait.seconds for wait in waits), waits

    def _first_nonfinite(self) -> str:
        return first_nonfinite({}, self.env.num_envs, self.replicated_state())

    def _first_cause(self, losses: Mapping[str, float]) -> str:
        """Return what is not finite on the first rank where something is not, and that rank."""
        bad = first_nonfinite(losses, self.env.num_envs, self.replicated_state())
        causes = [json.loads(text) for text in self.comm.gather_text(json.dumps(bad), "diagnosis")]
        return next(f"{text} on rank {rank}" for rank, text in enumerate(causes) if text)

    # --- saving and continuing -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return all of the training; rank 0's has the envs of all ranks, in the order of their global ids."""
        state = self.learner.state_dict()
        require_plain(state, "state")
        envs = sharding.gather(self._env_rows(), self.comm, self.env.device)
        return {
            "format": checkpoint.FORMAT,
            "ml_framework": "torch",
            "task": self.config.task,
            "config": self.config.model_dump(mode="json"),
            "num_models": self.env.task.num_models,
            "policy": {},  # where lockstep's own learner has its network
            "state": state,
            "env": envs | {"num_steps": self.env.num_steps},
            **self.so_far,
        }

    def failure_dict(self) -> dict[str, Any]:
        """Return ``state_dict``."""
        return self.state_dict()

    def _env_rows(self) -> sharding.Nest:
        return {name: value for name, value in self.env.state_dict().items() if name != "num_steps"}

    def load_weights(self, saved: Mapping[str, Any] | None, path: object) -> None:
        """Begin with the networks and normalisers of a checkpoint; only rank 0 has its content."""
        self.comm.on_main(lambda: self._require_fit(saved, path), "checkpoint")
        state = {} if saved is None else {name: part for name, part in saved["state"].items() if name not in _OF_ENVS}
        state = broadcast_value(state, comm=self.comm)
        with guest_group(self.comm):
            with checkpoint.misfits_in_words(path):
                self.learner.load_weights(state)
            self._broadcast()

    def load_state_dict(self, saved: Mapping[str, Any] | None, path: object) -> None:
        """Continue where ``state_dict`` was taken, on any number of ranks; only rank 0 has its content.

        Raises:
            UsageError: of another task, library, seed, dtype, or number of envs or models, or not complete.
        """
        self.comm.on_main(lambda: self._require_whole(saved, path), "checkpoint")
        names = ("state", *self.so_far)
        given = None
        if saved is not None:
            then = saved["config"]["agent"]["learning_rate"]
            given = {name: saved[name] for name in names} | {"steps": saved["env"]["num_steps"], "learning_rate": then}
        shared = broadcast_value(given, comm=self.comm)
        rows = None if saved is None else {name: saved["env"][name] for name in self._env_rows()}
        envs = sharding.deal(rows, self._env_rows(), self.total_envs, self._first_env, self.comm, self.env.device)
        self.env.load_state_dict(envs | {"num_steps": shared["steps"]})
        with guest_group(self.comm):
            with checkpoint.misfits_in_words(path):
                self.learner.load_state_dict(shared["state"])
            # A rate that the user has changed is the new one to start from; otherwise the schedule goes on.
            if shared["learning_rate"] != self.config.agent.learning_rate:
                self.learner.retune(self.config.agent.learning_rate)
            self._broadcast()
        self.iteration, self.env_steps, self.wall_s = (shared[name] for name in self.so_far)

    def _require_fit(self, saved: Mapping[str, Any] | None, path: object) -> str:
        assert saved is not None
        require_task(saved, self.config.task, path)
        require_parts(saved, ("state",), path)
        return ""

    def _require_whole(self, saved: Mapping[str, Any] | None, path: object) -> str:
        assert saved is not None
        with incomplete_in_words(path):
            self._require_fit(saved, path)
            require_parts(saved, ("env", "num_models", *self.so_far), path)
            require_settings(saved["config"], self.config.model_dump(mode="json"), ("seed", "dtype"), path)
            require_num_models(saved, self.env.task.num_models, path)
            num_envs = saved["env"]["episode_length"].shape[0]
            require_num_envs(num_envs, self.total_envs, path)
            require_like(saved["env"], sharding.with_rows(self._env_rows(), num_envs), path, "env")
            require_iterations(saved["iteration"], self.config.max_iterations, path)
        return ""


@contextmanager
def _unchecked_distributions() -> Iterator[None]:
    """Keep torch from looking at the parameters of each distribution.

    What is wrong with them shows in a loss or in the state when the iteration is over, which is said in words then.
    """
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)


@contextmanager
def _said_once() -> Iterator[None]:
    """Mark what a learner refuses as raised on every rank alike, so that one of them says it for all.

    What is missing on this machine may be there on another.
    """
    try:
        yield
    except UsageError as error:
        error.shared = error.shared or not isinstance(error.__cause__, ImportError | OSError)
        raise


def _numbers(values: Mapping[str, Number]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items()}
