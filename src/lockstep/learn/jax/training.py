"""One training of any JAX algorithm: compiled over the mesh, called once per iteration, saved and taken up again."""

import json
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy

from lockstep.core import beats
from lockstep.core.errors import RunError, UsageError
from lockstep.core.interrupts import StopReason
from lockstep.core.rng import stream_seed
from lockstep.distributed.jax_comm import JaxComm
from lockstep.distributed.jax_mesh import REPLICATED, SHARDED, RankMesh
from lockstep.distributed.jax_placement import name_of
from lockstep.envs.jax_env import JaxEnv
from lockstep.learn.config import TrainConfig, split_evenly
from lockstep.learn.jax import checkpoint, fitting
from lockstep.learn.jax.algorithm import Algorithm, HasWeights, PyTree, TrainState
from lockstep.learn.jax.nests import from_nest, plain_shapes, to_nest, with_keys
from lockstep.learn.jax.reporting import SIGNALS, Packer, agree, own_signals, step_times
from lockstep.learn.jax.tracing import require_pair, require_same, require_state
from lockstep.learn.observer import Metrics, NonFiniteError, OwnTimes, no_clock, nobody_asks

STATE = TrainState(REPLICATED, SHARDED)
"""How the state of an algorithm lies on the mesh."""


class Training:
    """An algorithm, its state and the counters of a run, on all ranks of this process's mesh.

    Everything is to happen inside ``jax.enable_x64(True)``: counts and sums of episodes are float64.

    Args:
        config: of the run.
        algorithm_class: made as ``algorithm_class(config, env, evaluation_env)``; see ``learn/jax/algorithm.py``.
        env: makes and steps envs.
        evaluation_env: the same for evaluations; None: there are none.
        ranks: the mesh.
        comm: the processes.

    Attributes:
        algorithm: that trains.
        state: of the algorithm, global arrays. The next iteration takes their memory.
        stop_agreed: why all ranks stop after this iteration, or None.
        save_agreed: whether rank 0's clock asked for a checkpoint of this iteration.
        own_times: what this process did in this iteration; None before the first.

    Raises:
        UsageError: the algorithm breaks its protocol; it is told how.
    """

    def __init__(
        self,
        config: TrainConfig,
        algorithm_class: Callable[..., Algorithm],
        env: JaxEnv,
        evaluation_env: JaxEnv | None,
        ranks: RankMesh,
        comm: JaxComm,
    ) -> None:
        if jax.dtypes.canonicalize_dtype(jnp.float64) != jnp.float64:
            raise ValueError("counts are float64, which JAX has switched off; enter jax.enable_x64(True)")
        self.config, self.ranks, self.comm = config, ranks, comm
        self.name = getattr(algorithm_class, "__name__", "the algorithm")
        self.algorithm = algorithm_class(config, env, evaluation_env)
        shares = config.envs_by_rank(ranks.num_ranks)
        self.total_envs = sum(shares)
        self._num_models = env.task.num_models
        self.env_ids = pad_ids(shares)
        self.iteration = 0
        self.env_steps = 0
        self.wall_s = 0.0  # seconds of training so far, earlier attempts included
        self.stop_agreed: StopReason | None = None
        self.save_agreed = False
        self.own_times: OwnTimes | None = None
        self._step_s = 0.0  # of the last iteration of this process
        self._compile_all(evaluation_env is not None)

    def _compile_all(self, evaluates: bool) -> None:
        compile_ = partial(self.ranks.compile, enable_jit=self.config.enable_jit)
        self.state: TrainState = compile_(self._traced_setup, (SHARDED,), STATE)(self.ranks.shard(self.env_ids))
        self._check_rows(self.state.sharded)
        self._shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), self.state)
        checks = getattr(self.algorithm, "CHECKS", ())
        self._numbers = Packer(f"{self.name}.step", checks, self.ranks.num_ranks)
        self._step = compile_(self._traced_step, (STATE, SHARDED), (STATE, REPLICATED), donate=0)
        self._is_compiled = not self.config.enable_jit
        if self.config.enable_jit:
            # Traced now, so that what is wrong with an algorithm is told before anything is written.
            signals = numpy.zeros((self.ranks.num_ranks, len(SIGNALS)))
            self._traced = cast(Any, self._step).trace(self.state, self.ranks.shard(signals))
        if evaluates:
            shares = split_evenly(self.config.evaluation.num_episodes, self.ranks.num_ranks)
            self._evaluation_ids = self.ranks.shard(pad_ids(shares))
            self._evaluation_numbers = Packer(f"{self.name}.evaluate", (), self.ranks.num_ranks)
            self._evaluate = compile_(self._traced_evaluate, (STATE, SHARDED), REPLICATED)
            if self.config.enable_jit:
                cast(Any, self._evaluate).trace(self.state, self._evaluation_ids)  # for the same reason

    @property
    def evaluates(self) -> bool:
        """Whether there are envs for evaluations."""
        return hasattr(self, "_evaluate")

    @property
    def replicated(self) -> PyTree:
        """The part of the state that must be the same on every rank."""
        return self.state.replicated

    @property
    def so_far(self) -> Metrics:
        """The counters: iteration, env_steps and wall_s."""
        return {"iteration": self.iteration, "env_steps": self.env_steps, "wall_s": self.wall_s}

    # --- what is compiled: this rank's part of the mesh ------------------------------------------------------------

    def _traced_setup(self, env_ids: jax.Array) -> TrainState:
        key = jax.random.key(stream_seed(self.config.seed, "policy"), impl="threefry2x32")
        state = self.algorithm.setup(key, env_ids)
        require_state(state, f"{self.name}.setup")
        return state

    def _traced_step(self, state: TrainState, signals: jax.Array) -> tuple[TrainState, jax.Array]:
        after, metrics = require_pair(self.algorithm.step(state), f"{self.name}.step")
        require_state(after, f"{self.name}.step")
        require_same(state, after, f"{self.name}.step")
        if not metrics.keys() & {"num_steps", "env_steps"}:
            raise UsageError(
                f"{self.name}.step() gives no metric num_steps; give it the env steps of all ranks' real envs"
            )
        return after, self._numbers.pack(metrics, signals)

    def _traced_evaluate(self, state: TrainState, env_ids: jax.Array) -> jax.Array:
        return self._evaluation_numbers.pack(self.algorithm.evaluate(state, env_ids))

    # --- iterations ------------------------------------------------------------------------------------------------

    def iterate(
        self, stop_requested: Callable[[], StopReason | None] = nobody_asks, save_due: Callable[[], bool] = no_clock
    ) -> Metrics:
        """Run one iteration and return its metrics. The first one of a process compiles it, which is not its time.

        Args:
            stop_requested: why this process should stop, asked when the iteration begins; ``stop_agreed`` then says
                what all ranks do when it is over. A process that has all ranks is asked again at the end.
            save_due: whether a checkpoint is due by this process's clock; ``save_agreed`` then says what rank 0's said.

        Raises:
            NonFiniteError: a check of the algorithm failed.
        """
        beats.at_iteration(self.iteration)
        beats.enter("step")
        compiled = self._compile()
        num_local = len(self.ranks.local_ranks)
        signals = self.ranks.shard_local(own_signals(stop_requested(), save_due(), self._step_s, num_local))
        began = time.perf_counter()
        self.state, numbers = self._step(self.state, signals)
        with beats.exchange(beats.DEVICE):
            found = self._numbers.unpack(self.ranks.to_host(numbers))
        self._step_s = time.perf_counter() - began
        self.own_times = OwnTimes({"step": self._step_s}, ())
        self.stop_agreed, self.save_agreed = agree(found.signals)
        if num_local == self.ranks.num_ranks:
            self.stop_agreed = self.stop_agreed or stop_requested()
        if found.nonfinite.any():
            # The earliest check, as data flow, of all ranks; of several ranks the first.
            check, rank = min((int(check), int(rank)) for rank, check in zip(*found.nonfinite.nonzero(), strict=True))
            raise NonFiniteError(f"{self.algorithm.CHECKS[check]} on rank {rank}")  # type: ignore[attr-defined]
        return self._count(found.metrics) | step_times(found.signals, self._step_s) | compiled

    def _compile(self) -> Metrics:
        if self._is_compiled:
            return {}
        began = time.perf_counter()
        self._step = self._traced.lower().compile()
        del self._traced
        self._is_compiled = True
        return {"time/compile": time.perf_counter() - began}

    def _count(self, metrics: Metrics) -> Metrics:
        """Count an iteration, and return its metrics with the counters in front."""
        own = ("iteration", "env_steps", "num_steps", "steps_per_s")
        rest = {name: value for name, value in metrics.items() if name not in own}
        before = self.env_steps
        self.env_steps = self._env_steps_after(metrics)
        self.iteration += 1
        beats.at_iteration(self.iteration)
        # A rank has its result when all have theirs, so this time is the slowest one's.
        rate = (self.env_steps - before) / max(self._step_s, 1e-9)
        return {"iteration": self.iteration, "env_steps": self.env_steps, "steps_per_s": rate} | rest

    def _env_steps_after(self, metrics: Metrics) -> int:
        """Return the env steps of all iterations so far, as the algorithm has counted them."""
        name = "env_steps" if "env_steps" in metrics else "num_steps"
        value = metrics[name]
        if value is None or value < (self.env_steps if name == "env_steps" else 0):
            found = "nan" if value is None else f"{value:g}"
            least = f"at least the {self.env_steps} before" if name == "env_steps" else "0 or more"
            words = f"{self.name}.step() gives {name} {found} in iteration {self.iteration + 1}; it must be {least}"
            raise RunError(words, shared=True)
        return int(value) if name == "env_steps" else self.env_steps + int(value)

    def evaluate(self) -> Metrics:
        """Run the episodes of an evaluation; return its metrics, under ``eval/``."""
        beats.enter("evaluate")
        numbers = self._evaluate(self.state, self._evaluation_ids)
        with beats.exchange(beats.DEVICE):
            found = self._evaluation_numbers.unpack(self.ranks.to_host(numbers))
        return {f"eval/{name.removeprefix('eval/')}": value for name, value in found.metrics.items()}

    # --- saving and continuing -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return all of the training: nests of numpy arrays of their own, and plain values that JSON takes.

        All processes call it together, and all get the same; one row of ``sharded`` for each real env, in the order of
        global ids.
        """
        is_real = self.env_ids >= 0
        sharded = self.ranks.unshard(self.state.sharded)
        if not is_real.all():
            sharded = jax.tree.map(lambda rows: rows[is_real], sharded)
        return {
            "format": checkpoint.FORMAT,
            "ml_framework": "jax",
            "task": self.config.task,
            "config": self.config.model_dump(mode="json"),
            **self.so_far,
            "num_models": self._num_models,
            "weights": fitting.names_of_weights(self.algorithm, self._shapes.replicated),
            "replicated": to_nest(self.ranks.to_host(self.state.replicated)),
            "sharded": to_nest(sharded),
        }

    def require_ready(self) -> None:
        """Do nothing: an algorithm is ready when it is made."""

    def load_weights(self, saved: Mapping[str, Any] | None, path: object) -> None:
        """Take up the weights alone, from a checkpoint's content.

        Args:
            saved: what process 0 has read; other processes get it from there.
            path: where it was read.

        Raises:
            UsageError: of another task, made with other agent settings, or the algorithm can't start from weights.
        """
        algorithm = self.algorithm
        if not isinstance(algorithm, HasWeights):
            raise UsageError(
                f"{self.name} can't start from the weights of a checkpoint: it has no weights() and with_weights(); "
                "give it both, or start without --checkpoint"
            )
        expected = plain_shapes(self._shapes.replicated)
        found: dict[str, Any] = {}

        def check() -> str:
            found.update(fitting.require_fitting_weights(_content(saved), algorithm, expected, self.config, path))
            return ""

        self.comm.on_main(check, "checkpoint")
        by_name = self.comm.broadcast(found, "weights")
        weights = fitting.weights_from(by_name, algorithm, expected)
        replicated = algorithm.with_weights(self.ranks.to_host(self.state.replicated), weights)
        self.state = TrainState(self._place_replicated(replicated), self.state.sharded)

    def load_state_dict(self, saved: Mapping[str, Any] | None, path: object) -> None:
        """Continue where ``state_dict`` was taken, on any number of ranks and processes.

        Args:
            saved: what process 0 has read; other processes get it from there.
            path: where it was read.

        Raises:
            UsageError: of another task, number of envs or models, or agent settings, or not complete.
        """
        shapes = plain_shapes(self._shapes)

        def check() -> str:
            content = _content(saved)
            fitting.require_fitting(
                content, self.algorithm, shapes, self.total_envs, self._num_models, self.config, path
            )
            counters = {name: content[name] for name in ("iteration", "env_steps", "config")}
            return json.dumps(counters | {"wall_s": float(content["wall_s"])})

        counters = json.loads(self.comm.on_main(check, "checkpoint"))
        own = None if saved is None else {name: saved[name] for name in checkpoint.ARRAYS}
        arrays = self.comm.broadcast(own, "checkpoint")
        replicated = from_nest(arrays["replicated"], shapes.replicated)
        retuned = getattr(self.algorithm, "retuned", None)
        if retuned is not None:
            replicated = retuned(replicated, counters["config"])
        sharded = from_nest(arrays["sharded"], shapes.sharded)
        self.state = TrainState(self._place_replicated(replicated), self._place_rows(sharded))
        self.iteration, self.env_steps = counters["iteration"], counters["env_steps"]
        self.wall_s = counters["wall_s"]

    def _place_replicated(self, tree: PyTree) -> PyTree:
        return with_keys(self.ranks.replicate(tree), self.state.replicated)

    def _place_rows(self, rows: PyTree) -> PyTree:
        """Return global arrays with the rows ``(total_envs, ...)`` of real envs; padding stays as it is."""
        is_real = self.env_ids >= 0
        if is_real.all():
            return with_keys(self.ranks.shard(rows), self.state.sharded)

        def spread(real: numpy.ndarray) -> numpy.ndarray:
            whole = numpy.zeros((is_real.size, *real.shape[1:]), real.dtype)
            whole[is_real] = real
            return whole

        def fill(mask: jax.Array, loaded: PyTree, fresh: PyTree) -> PyTree:
            def choose(new: jax.Array, old: jax.Array) -> jax.Array:
                return jnp.where(mask.reshape(-1, *[1] * (new.ndim - 1)), new, old)

            return jax.tree.map(choose, with_keys(loaded, fresh), fresh)

        loaded = self.ranks.shard(jax.tree.map(spread, rows))
        filled = self.ranks.compile(fill, (SHARDED, SHARDED, SHARDED), SHARDED)
        return filled(self.ranks.shard(is_real), loaded, self.state.sharded)

    def _check_rows(self, sharded: PyTree) -> None:
        num_rows, num_ranks = self.env_ids.size, self.ranks.num_ranks
        for path, leaf in jax.tree_util.tree_leaves_with_path(TrainState((), sharded)):
            if leaf.shape[0] != num_rows:
                raise UsageError(
                    f"{self.name}.setup() gives {name_of(path)} of {leaf.shape[0] // num_ranks} rows on each rank; it "
                    f"must lead with the {num_rows // num_ranks} envs of env_ids"
                )


def pad_ids(shares: tuple[int, ...]) -> numpy.ndarray:
    """Return ``(num_ranks * largest share,)`` int32: the global ids of each rank's envs, then -1 up to the largest."""
    largest = max(shares)
    ids = numpy.full((len(shares), largest), -1, dtype=numpy.int32)
    first = 0
    for rank, share in enumerate(shares):
        ids[rank, :share] = numpy.arange(first, first + share)
        first += share
    return ids.reshape(-1)


def _content(saved: Mapping[str, Any] | None) -> Mapping[str, Any]:
    if saved is None:
        raise ValueError("process 0 must be given what it has read of the checkpoint")
    return saved
