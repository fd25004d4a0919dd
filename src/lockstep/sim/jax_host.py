"""Any engine of numpy arrays (the engine ``mujoco``, say) inside compiled JAX programs, as pure functions.

The engine's whole state travels through the program as bits, so a call into the host is a function of its arguments:
it needs no order, JAX may repeat it, and the state is sharded, saved and resumed like any other array.
"""

import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from numpy.typing import NDArray

from lockstep.core.errors import UsageError
from lockstep.core.types import Array, Engine, Physics, StepInfo, Task

Bits = NDArray[np.uint32]
LAST_SENSORDATA = "last_sensordata"


def make_pure_engine(
    task: Task,
    *,
    decimation: int,
    num_threads: int,
    seed: int,
    dtype: Any,
    host_engine: Callable[..., Engine],
    **_: Any,
) -> "HostEngine":
    """Return an engine that steps the task by one of numpy arrays.

    Args:
        task: to simulate.
        decimation: physics steps per env step.
        num_threads: of this process; engines that step at the same time, one per device, share them.
        seed: of the run, by which models are varied.
        dtype: of the floats that come back: float32 or float64.
        host_engine: maker ``(task, *, num_envs, first_env_id, decimation, num_threads, seed) -> Engine``.

    Raises:
        UsageError: what ``host_engine`` raises.
    """

    def make(num_envs: int, num_threads_each: int) -> Engine:
        # Whose rows an engine object steps, and by which variants, it is told with their state.
        sizes = {"num_envs": num_envs, "first_env_id": 0, "decimation": decimation, "num_threads": num_threads_each}
        return host_engine(task, **sizes, seed=seed)

    return HostEngine(make, num_threads=num_threads, dtype=dtype, num_models=task.num_models)


class HostEngine:
    """Steps a numpy engine through callbacks of JAX.

    Physics: what the engine's ``state_dict`` returns, by name, each array as uint32 ``(num_envs, num_words)``: the bits
    of a row, NaN included, whatever the precision JAX computes in; and ``last_sensordata (num_envs, num_sensordata)``.
    The engine gets positions, velocities and controls in float64, and what it returns is rounded to ``dtype``, as in
    torch.

    A call takes an engine object of its batch size from a pool, so several devices may step at the same time.

    Args:
        make_engine: ``(num_envs, num_threads) -> Engine``.
        num_threads: of this process, shared by the devices that step at the same time.
        dtype: of the floats that come back: float32 or float64.
        num_models: variants of the model, which the engine keeps as ``model`` in its state if there are several.

    Raises:
        UsageError: what ``make_engine`` raises, or its engine does not take numpy arrays.
    """

    def __init__(
        self, make_engine: Callable[[int, int], Engine], *, num_threads: int, dtype: Any, num_models: int = 1
    ) -> None:
        self._make_engine, self._num_threads = make_engine, num_threads
        self._dtype, self._num_models = np.dtype(dtype), num_models
        self._idle: dict[tuple[int, int], list[Engine]] = {}
        self._engines: list[Engine] = []
        self._log_path: Path | None = None
        self._lock = threading.Lock()
        with self._engine(1, 1) as like:
            if not like.takes_numpy:
                raise UsageError(f"{type(like).__name__} does not take numpy arrays; JAX can't call it on the host")
            self.num_positions, self.num_velocities = like.num_positions, like.num_velocities
            self.num_controls, self.num_sensordata = like.num_controls, like.num_sensordata
            # A copy of each row, to know shapes and dtypes by, and where every env begins.
            self._rows = {name: np.array(array[0]) for name, array in like.state_dict().items()}

    # --- what a program calls ------------------------------------------------------------------------------------

    def start(self, env_ids: Array) -> Physics:
        """Return the physics of envs in their models' default state; ``env_ids (num_envs,)`` are int32 global ids."""
        num_envs = env_ids.shape[0]
        rows = {name: jnp.asarray(_to_bits(row[None])) for name, row in self._rows.items()}
        rows[LAST_SENSORDATA] = jnp.zeros((1, self.num_sensordata), dtype=self._dtype)
        physics = {name: jnp.broadcast_to(row, (num_envs, row.shape[1])) for name, row in rows.items()}
        if "model" in self._rows:
            physics["model"] = (env_ids % self._num_models).astype(jnp.uint32)[:, None]
        return physics

    def step(self, physics: Physics, ctrl: Array, push: Array | None = None) -> tuple[Physics, StepInfo]:
        """Advance every env by one env step under constant ``ctrl (num_envs, num_controls)``.

        ``push (num_envs, num_velocities)`` is added to the velocities before the first physics step.
        """
        state = {name: physics[name] for name in self._rows}
        sizes = (self.num_positions, self.num_velocities, self.num_sensordata)
        shapes = (
            _shapes_of(state),
            tuple(self._shape_of_words(ctrl.shape[0], size) for size in sizes),
            jax.ShapeDtypeStruct((ctrl.shape[0],), np.bool_),
        )
        callback = partial(self._step_on_host, self._threads_per_engine())
        push_words = None if push is None else self._to_words(push)
        state, words, diverged = _call_host(callback, shapes, state, self._to_words(ctrl), push_words)
        qpos, qvel, sensordata = (self._from_words(each) for each in words)
        info = StepInfo(qpos, qvel, sensordata, diverged)
        return state | {LAST_SENSORDATA: info.sensordata}, info

    def reset(self, physics: Physics, mask: Array, qpos: Array, qvel: Array) -> tuple[Physics, Array]:
        """Put the envs of ``mask`` at ``qpos`` and ``qvel``, the rest of their state at the model's default.

        The host is asked only where ``mask (num_envs,)`` is not empty. Returns the sensordata of all envs too,
        ``(num_envs, num_sensordata)``.
        """
        state = {name: physics[name] for name in self._rows}
        shapes = (_shapes_of(state), self._shape_of_words(mask.shape[0], self.num_sensordata))
        callback = partial(self._reset_on_host, self._threads_per_engine())

        def ask_host() -> Physics:
            new, words = _call_host(callback, shapes, state, mask, self._to_words(qpos), self._to_words(qvel))
            new[LAST_SENSORDATA] = self._from_words(words)
            # Not jnp.where: of empty arrays it returns either, and jax.shard_map wants both branches to be of one type.
            return {
                name: jax.lax.select(jnp.broadcast_to(mask[:, None], old.shape), new[name], old)
                for name, old in physics.items()
            }

        physics = jax.lax.cond(jnp.any(mask), ask_host, lambda: physics)
        return physics, physics[LAST_SENSORDATA]

    # --- on the host ---------------------------------------------------------------------------------------------

    def _step_on_host(
        self, num_threads: int, state: Mapping[str, Array], ctrl: Array, push: Array | None
    ) -> tuple[Any, ...]:
        ctrl = self._floats(ctrl)
        with self._engine(len(ctrl), num_threads) as engine:
            engine.load_state_dict(self._from_bits(state))
            info = engine.step(ctrl, None if push is None else self._floats(push))
            floats = (info.qpos, info.qvel, info.sensordata)
            # The engine lends its buffers: they must be copied before somebody else steps it.
            words = tuple(self._words(array) for array in floats)
            return self._state_of(engine), words, np.array(info.diverged, dtype=np.bool_)

    def _reset_on_host(
        self, num_threads: int, state: Mapping[str, Array], mask: Array, qpos: Array, qvel: Array
    ) -> tuple[Any, ...]:
        with self._engine(len(mask), num_threads) as engine:
            engine.load_state_dict(self._from_bits(state))
            sensordata = engine.reset(mask, self._floats(qpos), self._floats(qvel))
            return self._state_of(engine), self._words(sensordata)

    @contextmanager
    def _engine(self, num_envs: int, num_threads: int) -> Iterator[Engine]:
        """Lend an engine object that nobody else uses meanwhile."""
        with self._lock:
            idle = self._idle.setdefault((num_envs, num_threads), [])
            engine = idle.pop() if idle else None
        if engine is None:
            engine = self._make_engine(num_envs, num_threads)
            with self._lock:
                self._engines.append(engine)
            if self._log_path is not None:
                engine.log_to(self._log_path)
        try:
            yield engine
        finally:
            with self._lock:
                idle.append(engine)

    def _threads_per_engine(self) -> int:
        """Return an engine's share of the threads; called while a program is traced for some devices."""
        mesh = jax.sharding.get_abstract_mesh()
        num_devices: int = math.prod(mesh.shape[name] for name in mesh.manual_axes)
        num_local = max(1, num_devices // int(jax.process_count()))
        return max(1, self._num_threads // num_local)

    @property
    def warning_counts(self) -> Mapping[str, int]:
        """What the engine objects have had to say, by name, in envs and env steps."""
        counts: Counter[str] = Counter()
        with self._lock:
            for engine in self._engines:
                counts.update(engine.warning_counts)
        return counts

    def log_to(self, path: Path) -> None:
        """Append what the physics library has to say to a file from now on."""
        with self._lock:
            self._log_path, engines = path, list(self._engines)
        for engine in engines:
            engine.log_to(path)

    def close(self) -> None:
        """Release threads and memory of the engine objects; none of them may be in use."""
        with self._lock:
            engines, self._engines = self._engines, []
            self._idle.clear()
        for engine in engines:
            engine.close()

    # --- bits and floats -----------------------------------------------------------------------------------------

    def _state_of(self, engine: Engine) -> dict[str, Bits]:
        return {name: _to_bits(np.asarray(array)) for name, array in engine.state_dict().items()}

    def _from_bits(self, state: Mapping[str, Array]) -> dict[str, NDArray[Any]]:
        arrays = {}
        for name, row in self._rows.items():
            arrays[name] = state[name].view(row.dtype).reshape(len(state[name]), *row.shape)
        return arrays

    def _to_words(self, floats: Array) -> Array:
        """Return floats ``(num_envs, size)`` as uint32, ``(num_envs, size, 2)`` if they are float64.

        A callback runs in a thread in which JAX knows of no float64: it would round what it is handed.
        """
        return jax.lax.bitcast_convert_type(floats.astype(self._dtype), jnp.uint32)

    def _from_words(self, words: Array) -> Array:
        return jax.lax.bitcast_convert_type(words, self._dtype)

    def _shape_of_words(self, num_envs: int, size: int) -> jax.ShapeDtypeStruct:
        words = () if self._dtype.itemsize == 4 else (self._dtype.itemsize // 4,)
        return jax.ShapeDtypeStruct((num_envs, size, *words), np.uint32)

    def _floats(self, words: Array) -> NDArray[np.float64]:
        """What ``_to_words`` has sent, on the host."""
        floats: NDArray[np.float64] = words.view(self._dtype).reshape(words.shape[:2]).astype(np.float64)
        return floats

    def _words(self, array: Array) -> Bits:
        """What ``_from_words`` will take up, on the host; a copy."""
        floats = np.array(array, dtype=self._dtype)
        return floats.view(np.uint32).reshape(self._shape_of_words(*floats.shape).shape)


def _to_bits(array: NDArray[Any]) -> Bits:
    """Return the bits of ``(num_envs, ...)`` as ``(num_envs, num_words)``; dtypes are those of whole words."""
    return np.ascontiguousarray(array).reshape(len(array), math.prod(array.shape[1:])).view(np.uint32)


def _shapes_of(arrays: Mapping[str, Array]) -> dict[str, jax.ShapeDtypeStruct]:
    return {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in arrays.items()}


# --- calling the host ----------------------------------------------------------------------------------------------

_call_host_p = Primitive("lockstep_call_host")
_call_host_p.multiple_results = True


def _call_host(callback: Callable[..., Any], shapes: Any, *arguments: Any) -> Any:
    """Return what ``callback`` makes of trees of arrays: a tree of numpy arrays like ``shapes``.

    This is ``jax.pure_callback`` (the same restrictions hold) but for one thing: the callback is handed the arrays that
    XLA lends to it, as numpy arrays. ``pure_callback`` makes JAX arrays of them first. With JAX 0.10 a large one is
    copied in the background, by a pool of as many threads as there are cores or devices; where callbacks occupy them
    all, each waits for its copy and none ever comes.
    """
    leaves, tree = jax.tree.flatten(arguments)
    shape_leaves, shape_tree = jax.tree.flatten(shapes)

    def on_leaves(*arrays: Any) -> tuple[Any, ...]:
        return tuple(jax.tree.leaves(callback(*jax.tree.unflatten(tree, arrays))))

    avals = tuple(jax.core.ShapedArray(shape.shape, shape.dtype) for shape in shape_leaves)
    return jax.tree.unflatten(shape_tree, _call_host_p.bind(*leaves, callback=on_leaves, result_avals=avals))


def _lower(context: mlir.LoweringRuleContext, *operands: Any, callback: Callable[..., Any], result_avals: Any) -> Any:
    results, _, _ = mlir.emit_python_callback(
        context,
        callback,
        None,
        list(operands),
        cast(list[jax.core.ShapedArray], context.avals_in),
        list(result_avals),
        has_side_effect=False,
        returns_token=False,
    )
    return results


def _batch(
    arguments: Sequence[jax.Array], axes: Sequence[int | None], **parameters: Any
) -> tuple[list[jax.Array], Any]:
    """Call the host for each entry of the new axis by itself, so that it sees the shapes that it was made for."""
    sizes = {argument.shape[axis] for argument, axis in zip(arguments, axes, strict=True) if axis is not None}
    calls = [
        _call_host_p.bind(
            *(
                argument if axis is None else jax.lax.index_in_dim(argument, number, axis, keepdims=False)
                for argument, axis in zip(arguments, axes, strict=True)
            ),
            **parameters,
        )
        for number in range(sizes.pop())
    ]
    results = [jnp.stack(column) for column in zip(*calls, strict=True)]
    return results, [0] * len(results)


_call_host_p.def_abstract_eval(lambda *_, result_avals, **__: result_avals)
_call_host_p.def_impl(lambda *arrays, **parameters: jax.jit(partial(_call_host_p.bind, **parameters))(*arrays))
mlir.register_lowering(_call_host_p, _lower, cacheable=False)
batching.primitive_batchers[_call_host_p] = _batch
