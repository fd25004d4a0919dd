"""A learner of another library of JAX as one of ours: the same loop, checkpoints, checks between ranks, and words.

What a library brings stands in an adapter: a ``GuestLearner``, how it collects, updates and is saved, and a
``GuestActor``, its policy as pure functions. All else is here. A rank is a process with one device.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy

from lockstep.core import beats
from lockstep.core.interrupts import StopReason
from lockstep.core.registry import load
from lockstep.core.types import Array, Observations, Task
from lockstep.distributed.jax_comm import JaxComm
from lockstep.distributed.jax_guests import Exchange, guest_imports
from lockstep.distributed.jax_mesh import REPLICATED, SHARDED, RankMesh
from lockstep.envs.jax_env import JaxEnv
from lockstep.learn.config import TrainConfig, split_evenly
from lockstep.learn.guest_settings import breakdown_in_words, refused_in_words
from lockstep.learn.jax import checkpoint, evaluation, fitting
from lockstep.learn.jax.algorithm import PyTree, TrainState
from lockstep.learn.jax.guest_reporting import OwnIteration, first_nonfinite, own_row, share
from lockstep.learn.jax.nests import from_nest, plain_shapes, to_nest, with_keys
from lockstep.learn.jax.reporting import Packer
from lockstep.learn.jax.stepped_env import SteppedEnv
from lockstep.learn.jax.training import pad_ids
from lockstep.learn.observer import Metrics, NonFiniteError, OwnTimes, no_clock, nobody_asks


class GuestActor(Protocol):
    """The policy of another library as pure functions; the session calls them as it calls those of an ``Algorithm``."""

    def __init__(self, config: TrainConfig, task: Task) -> None:
        """Build the network, which holds no number."""

    def shapes(self) -> PyTree:
        """Return what ``act`` needs of the learner's state, as shapes and dtypes: a nest of dicts."""

    def act(self, replicated: PyTree, observations: Observations, memory: Array) -> tuple[Array, Array]:
        """Return the most likely actions and the next memory for raw observations, given ``shapes`` or more."""

    def initial_memory(self, num_envs: int) -> Array:
        """Return the memory at the start of an episode."""

    def parts(self, replicated: PyTree) -> Any:
        """Return the ``PolicyParts`` of torch that compute the same, for the export."""


class GuestLearner(Protocol):
    """A learner of another library on one rank. Every rank calls the same methods in the same order.

    It is built, and its methods run, with the rank's device as JAX's default one.
    """

    actor_of: type[GuestActor]
    """What its policies are."""
    actor: GuestActor
    """This one's."""

    def __init__(self, config: TrainConfig, env: SteppedEnv, exchange: Exchange, total_envs: int) -> None:
        """Build networks, optimizers and buffers, in the library's own way, the same on all ranks.

        Args:
            config: of the run: ``agent`` in our words, over which ``library`` is laid in the library's.
            env: this rank's envs, reset.
            exchange: between the ranks; gradients and moments go through it.
            total_envs: of all ranks.

        Raises:
            UsageError: what is asked for can't be, on so many ranks perhaps.
        """

    def collect(self, iteration: int) -> None:
        """Step every env ``config.agent.num_steps_per_env`` times and keep what is learned from.

        Args:
            iteration: that begins, counted from 0; with the seed and the rank it decides on all that is random, so that
                a run that goes on draws what it would have drawn.
        """

    def update(self) -> Mapping[str, float]:
        """Learn from it; return the losses and the like of this rank by name, the same names on every rank.

        A loss that is not finite ends the training. What has a "/" in its name may be NaN where there is nothing.
        """

    def state(self) -> PyTree:
        """Return what is the same on every rank and goes on from iteration to iteration: a tree of arrays."""

    def rows(self) -> PyTree:
        """Return what is this rank's own and goes on: a tree of arrays ``(num_envs, ...)``, in numpy."""

    def row_shapes(self) -> PyTree:
        """Return the shapes and dtypes of ``rows``, without a copy of what may be large."""

    def put(self, state: PyTree, rows: PyTree | None = None) -> None:
        """Go on from such a state and such rows, in numpy; None leaves the rows as they are."""

    def retune(self, learning_rate: float) -> None:
        """Begin anew with a learning rate, where the one that was put has come to after another start.

        Args:
            learning_rate: that of ``config.agent``, which is not the one that the training began with.
        """

    def weights(self, state: PyTree) -> PyTree:
        """Return what a new run takes over from a state: networks and normalisers."""

    def with_weights(self, state: PyTree, weights: PyTree) -> PyTree:
        """Return the state with other weights in it."""


def load_actor(learner: str, config: TrainConfig, task: Task) -> GuestActor:
    """Return the policy that a learner, named by its import string, trains; it holds no number."""
    with guest_imports():
        kind = load(learner)
    actor: GuestActor = kind.actor_of(config, task)
    return actor


class GuestTraining:
    """A training by a learner of another library, on this rank.

    Everything is to happen inside ``jax.enable_x64(True)``; the library's own code sees JAX without types of 64 bits,
    as it is written for.

    Args:
        learner: import string of a ``GuestLearner``.
        config: of the run.
        env: makes and steps envs.
        evaluation_env: the same for evaluations; None: there are none.
        ranks: the mesh, of one device of each process.
        comm: the processes.

    Attributes:
        env_ids: global ids of all ranks' envs, each rank's filled up with -1 to as many as the largest has.
        stop_agreed: why all ranks stop after this iteration, or None.
        save_agreed: whether rank 0's clock asked for a checkpoint of this iteration.
        own_times: what this rank did in this iteration; None before the first.
    """

    def __init__(
        self,
        learner: str,
        config: TrainConfig,
        env: JaxEnv,
        evaluation_env: JaxEnv | None,
        ranks: RankMesh,
        comm: JaxComm,
    ) -> None:
        self.config, self.ranks, self.comm = config, ranks, comm
        shares = config.envs_by_rank(ranks.num_ranks)
        self.total_envs = sum(shares)
        self.env_ids = pad_ids(shares)
        self._first_env = sum(shares[: comm.rank])
        self.exchange = Exchange(ranks, shares[comm.rank] / self.total_envs)
        own_ids = numpy.arange(self._first_env, self._first_env + shares[comm.rank], dtype=numpy.int32)
        self.env = SteppedEnv(env, own_ids, self.exchange.device)
        self.iteration, self.env_steps, self.wall_s = 0, 0, 0.0
        self.stop_agreed: StopReason | None = None
        self.save_agreed = False
        self.own_times: OwnTimes | None = None
        with guest_imports():
            kind = load(learner)
        with self._as_library(), refused_in_words(config):
            self.learner: GuestLearner = kind(config, self.env, self.exchange, self.total_envs)
        self._share_state(self.learner.state())
        self._evaluation_env = evaluation_env
        self._prepare_evaluation(evaluation_env)

    @contextmanager
    def _as_library(self) -> Iterator[None]:
        """Return the context of a library's code: types as it knows them, and everything on this rank's device."""
        with jax.enable_x64(False), jax.default_device(self.exchange.device):
            yield

    @property
    def so_far(self) -> Metrics:
        """The counters: iteration, env_steps and wall_s."""
        return {"iteration": self.iteration, "env_steps": self.env_steps, "wall_s": self.wall_s}

    @property
    def evaluates(self) -> bool:
        """Whether there are envs for evaluations."""
        return self._evaluation_env is not None

    @property
    def replicated(self) -> PyTree:
        """What must be the same on every rank, as global arrays."""
        counters = {"iteration": numpy.int64(self.iteration), "env_steps": numpy.int64(self.env_steps)}
        return self.ranks.replicate({"learner": self.learner.state(), "counters": counters})

    # --- evaluations -----------------------------------------------------------------------------------------------

    def _prepare_evaluation(self, env: JaxEnv | None) -> None:
        if env is None:
            return
        shares = split_evenly(self.config.evaluation.num_episodes, self.ranks.num_ranks)
        self._evaluation_ids = self.ranks.shard(pad_ids(shares))
        self._numbers = Packer("evaluate", (), self.ranks.num_ranks)

        def evaluate(state: PyTree, env_ids: jax.Array) -> jax.Array:
            return self._numbers.pack(evaluation.evaluate(self.learner.actor, state, env_ids, env))

        self._evaluate = self.ranks.compile(evaluate, (REPLICATED, SHARDED), REPLICATED)

    def evaluate(self) -> Metrics:
        """Run the episodes of an evaluation; return its metrics, under ``eval/``."""
        beats.enter("evaluate")
        needed = _part(self.learner.state(), self.learner.actor.shapes())
        numbers = self._evaluate(self.ranks.replicate(needed), self._evaluation_ids)
        with beats.exchange(beats.DEVICE):
            found = self._numbers.unpack(self.ranks.to_host(numbers))
        return {f"eval/{name}": value for name, value in found.metrics.items()}

    # --- iterations ------------------------------------------------------------------------------------------------

    def iterate(
        self, stop_requested: Callable[[], StopReason | None] = nobody_asks, save_due: Callable[[], bool] = no_clock
    ) -> Metrics:
        """Run one iteration: collect, update; return its metrics.

        Args:
            stop_requested: why this rank should stop, asked at the end of the iteration.
            save_due: whether a checkpoint is due by this rank's clock.

        Raises:
            NonFiniteError: a loss or an array of the state is not finite any more.
            RunError: the same, and the library broke down over it.
        """
        self.exchange.take_waits()
        self.exchange.take_nonfinite()
        beats.at_iteration(self.iteration)
        beats.enter("rollout")
        steps_before = self.env.num_steps
        rollout_s, waits = self._timed(lambda: self.learner.collect(self.iteration))
        if self.iteration >= self.config.agent.iterations_before_learning(self.total_envs):
            beats.enter("update")  # the first of them compiles, and those before it were no updates
        losses: dict[str, float] = {}
        update_s, update_waits = self._timed(lambda: losses.update(self.learner.update()))
        waits += update_waits
        bad, first_sent = first_nonfinite(losses, self.learner.state()), self.exchange.take_nonfinite()
        own = OwnIteration(
            num_steps=self.env.num_envs * (self.env.num_steps - steps_before),
            times_s=(rollout_s, update_s, sum(wait.seconds for wait in waits)),
            stop=stop_requested(),
            save_due=save_due(),
            is_bad=bool(bad),
        )
        table = self.exchange.gather(own_row(self.env.take_sums(), own, losses), "metrics")
        shared = share(self.env.env, table, tuple(losses), self.config.envs_by_rank(self.ranks.num_ranks))
        self.stop_agreed, self.save_agreed = shared.stop, shared.save_due
        waits += self.exchange.take_waits()
        self.own_times = OwnTimes({"rollout": rollout_s, "update": update_s}, tuple(waits))
        if shared.is_bad:
            # What one rank has sent that is not finite makes everybody's state so.
            raise NonFiniteError(first_sent or self._first_cause(bad))
        self.iteration += 1
        self.env_steps += int(shared.metrics.pop("num_steps") or 0)
        beats.at_iteration(self.iteration)
        return {"iteration": self.iteration, "env_steps": self.env_steps} | shared.metrics

    def _timed(self, work: Callable[[], Any]) -> tuple[float, list[Any]]:
        """Do some work of the library; return its seconds without waits, and the waits."""
        began = time.perf_counter()
        words = breakdown_in_words(
            self.iteration + 1, lambda: first_nonfinite({}, self.learner.state()), self.comm.rank
        )
        with self._as_library(), words:
            work()
        with beats.exchange(beats.DEVICE):
            jax.block_until_ready((self.env.state, self.learner.state()))
        waits = self.exchange.take_waits()
        return time.perf_counter() - began - sum(wait.seconds for wait in waits), waits

    def _first_cause(self, bad: str) -> str:
        causes = [json.loads(text) for text in self.comm.gather_text(json.dumps(bad), "diagnosis")]
        return next(f"{text} on rank {rank}" for rank, text in enumerate(causes) if text)

    # --- saving and continuing -------------------------------------------------------------------------------------

    def _gathered(self) -> PyTree:
        """Return the rows of all ranks' envs in numpy, in the order of their global ids, on every process."""
        missing = self.env_ids.size // self.ranks.num_ranks - self.env.num_envs
        own_rows = {"env": self.env.state, "learner": self.learner.rows()}

        def padded(leaf: Any) -> numpy.ndarray:
            own = numpy.asarray(leaf)
            return numpy.pad(own, [(0, missing)] + [(0, 0)] * (own.ndim - 1))

        whole = self.ranks.unshard(self.ranks.shard_local(jax.tree.map(padded, self._plain(own_rows))))
        return jax.tree.map(lambda rows: rows[self.env_ids >= 0], whole)

    def _plain(self, tree: PyTree) -> PyTree:
        """Return a tree without keys of ``jax.random``, whose data are there instead."""
        return jax.tree.map(numpy.asarray, self.ranks.to_host(jax.tree.map(_data_of, tree)))

    def state_dict(self) -> dict[str, Any]:
        """Return all of the training, as ``Training.state_dict`` does; rows of envs in the order of global ids."""
        state = self.learner.state()
        return {
            "format": checkpoint.FORMAT,
            "ml_framework": "jax",
            "task": self.config.task,
            "config": self.config.model_dump(mode="json"),
            **self.so_far,
            "num_models": self.env.task.num_models,
            "num_steps": self.env.num_steps,
            "weights": fitting.names_of_weights(self.learner, state),  # type: ignore[arg-type]  # the part it needs
            "replicated": to_nest(self._plain(state)),
            "sharded": to_nest(self._gathered()),
        }

    def require_ready(self) -> None:
        """Do nothing: a learner is ready when it is made."""

    def load_weights(self, saved: Mapping[str, Any] | None, path: object) -> None:
        """Begin with the networks and normalisers of a checkpoint; only rank 0 has its content.

        Raises:
            UsageError: of another task, or made with other settings.
        """
        state = self.learner.state()
        expected = plain_shapes(state)
        found: dict[str, Any] = {}

        def check() -> str:
            assert saved is not None
            found.update(fitting.require_fitting_weights(saved, self.learner, expected, self.config, path))
            return ""

        self.comm.on_main(check, "checkpoint")
        weights = fitting.weights_from(self.comm.broadcast(found, "weights"), self.learner, expected)
        self._put(self.learner.with_weights(self._plain(state), weights))

    def load_state_dict(self, saved: Mapping[str, Any] | None, path: object) -> None:
        """Continue where ``state_dict`` was taken, on any number of ranks; only rank 0 has its content.

        Raises:
            UsageError: of another task, number of envs or models, or agent settings, or not complete.
        """
        own_rows = {"env": self.env.state, "learner": self.learner.row_shapes()}
        shapes = plain_shapes(TrainState(self.learner.state(), own_rows))
        names = ("iteration", "env_steps", "wall_s", "num_steps")

        def check() -> str:
            assert saved is not None
            num_models = self.env.task.num_models
            learner: Any = self.learner
            fitting.require_fitting(saved, learner, shapes, self.total_envs, num_models, self.config, path)
            return json.dumps([saved[name] for name in names] + [saved["config"]["agent"]["learning_rate"]])

        counters = json.loads(self.comm.on_main(check, "checkpoint"))
        given = None if saved is None else {name: saved[name] for name in checkpoint.ARRAYS}
        arrays = self.comm.broadcast(given, "checkpoint")
        own = slice(self._first_env, self._first_env + self.env.num_envs)
        rows = jax.tree.map(lambda whole: whole[own], from_nest(arrays["sharded"], shapes.sharded))
        self._put(from_nest(arrays["replicated"], shapes.replicated), rows["learner"])
        self.iteration, self.env_steps, self.wall_s, num_steps, learning_rate = counters
        if learning_rate != self.config.agent.learning_rate:
            with self._as_library():
                self.learner.retune(self.config.agent.learning_rate)
        self.env.put(with_keys(rows["env"], self.env.state), num_steps)

    def _share_state(self, state: PyTree) -> None:
        """Give all ranks the state of rank 0."""
        told = self.comm.broadcast(to_nest(self._plain(state)), "state")
        self._put(from_nest(told, state))

    def _put(self, state: PyTree, rows: PyTree | None = None) -> None:
        with self._as_library():
            self.learner.put(state, rows)


def _data_of(leaf: Any) -> Any:
    is_key = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if is_key else leaf


def _part(tree: PyTree, shapes: PyTree) -> PyTree:
    """Return those arrays of a nest of dicts that ``shapes`` names."""
    if not isinstance(shapes, Mapping):
        return tree
    return {name: _part(tree[name], inner) for name, inner in shapes.items()}
