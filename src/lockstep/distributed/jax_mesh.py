"""The ranks of JAX: one per device, all devices of all processes on one axis."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from lockstep.core.errors import UsageError
from lockstep.distributed.jax_collectives import AXIS_NAME, Tree, all_gather
from lockstep.distributed.jax_eager import eager
from lockstep.distributed.jax_order import mixes_up, require_order
from lockstep.distributed.jax_placement import name_of, place, put_on, read, without_keys
from lockstep.distributed.jax_waiting import must_wait, waited
from lockstep.distributed.topology import from_environment

SHARDED = PartitionSpec(AXIS_NAME)
"""Split along the first axis: each rank has rows of its own."""
REPLICATED = PartitionSpec()
"""The same on every rank."""

_GATHER_BYTES = 1 << 28  # of a large array, so much at a time comes to every device


def make_mesh(devices: Sequence[jax.Device] | None = None) -> "RankMesh":
    """Return the mesh of all devices of all processes, or of those given, in the order of processes, then of ids.

    Rank r is the r-th device in that order, on every process.

    Raises:
        UsageError: all devices are asked for, the launcher or torchrun has started several processes, and they have not
            met: see ``init``.
        ValueError: there is no device, one comes twice, or none of them is this process's.
    """
    if devices is None:
        _require_met()
    chosen = sorted(jax.devices() if devices is None else devices, key=lambda device: (device.process_index, device.id))
    if not chosen:
        raise ValueError("a mesh needs at least one device; devices is empty")
    if len(set(chosen)) < len(chosen):
        twice = next(device for device in chosen if chosen.count(device) > 1)
        raise ValueError(f"each device of a mesh is one rank, but {twice} comes twice in devices; name each once")
    own = jax.process_index()
    if all(device.process_index != own for device in chosen):
        raise ValueError(f"process {own} has no device in the mesh; every process must have one, or more")
    return RankMesh(Mesh(numpy.array(chosen), (AXIS_NAME,), axis_types=(AxisType.Auto,)))


def _require_met() -> None:
    """Raise UsageError if this process is one of several that have not met: each would train alone, without a word."""
    topology = from_environment()
    if topology.world_size > 1 and not jax.distributed.is_initialized():
        raise UsageError(
            f"this is process {topology.rank} of {topology.world_size} (RANK, WORLD_SIZE), and JAX knows of none but "
            "itself; call init() of lockstep.distributed.jax, or jax.distributed.initialize, before all else of JAX"
        )


@dataclass(frozen=True)
class RankMesh:
    """A mesh with the one axis ``AXIS_NAME``; rank r is its r-th device. Make it with ``make_mesh``.

    With several processes all methods must be called by all of them, in the same order.
    """

    mesh: Mesh

    @functools.cached_property
    def num_ranks(self) -> int:
        """Over all processes."""
        return int(self.mesh.size)

    @functools.cached_property
    def local_ranks(self) -> tuple[int, ...]:
        """This process's ranks, in ascending order."""
        own = jax.process_index()
        return tuple(rank for rank, device in enumerate(self.mesh.devices.flat) if device.process_index == own)

    @functools.cached_property
    def is_multiprocess(self) -> bool:
        """Whether other processes have ranks too."""
        return len(self.local_ranks) < self.num_ranks

    @functools.cached_property
    def replicated(self) -> NamedSharding:
        """The layout of arrays that every rank has whole."""
        return NamedSharding(self.mesh, REPLICATED)

    @functools.cached_property
    def sharded(self) -> NamedSharding:
        """The layout of arrays whose first axis is split over the ranks."""
        return NamedSharding(self.mesh, SHARDED)

    def compile(
        self,
        function: Callable[..., Any],
        in_specs: Any,
        out_specs: Any,
        *,
        donate: int | Sequence[int] = (),
        enable_jit: bool = True,
    ) -> Callable[..., Any]:
        """Return a function of global arrays that runs ``function`` on every rank, on that rank's part of them.

        Args:
            function: takes and returns trees of arrays; collectives over ``AXIS_NAME`` work in it.
            in_specs: SHARDED or REPLICATED for each argument or part of it, as ``jax.shard_map`` takes them.
            out_specs: the same for what is returned. What is called REPLICATED is proved to be.
            donate: numbers of the arguments whose memory the results may take; the caller can't use them afterwards.
            enable_jit: False runs it operation by operation, with the same result, to be looked into; loops of
                ``jax.lax`` are still compiled, unless called within ``jax.disable_jit()``. Nothing is donated then.
                For one process only.

        A call returns before it is done, as JAX's do; where a process has several CPU devices, once it is: they would
        hang otherwise.

        Raises:
            UsageError: ``enable_jit`` is False and there are several processes; or, when the function is first called
                or traced, on several CPU devices: it has collectives that they could mix up; see ``after``.
        """
        if not enable_jit:
            self._require_one_process()
            return eager(function, self.mesh, in_specs, out_specs)
        mapped = jax.shard_map(function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=True)
        layouts = jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), out_specs)
        compiled = jax.jit(mapped, donate_argnums=donate, out_shardings=layouts)
        return _OnCpus(compiled, must_wait(self.mesh)) if mixes_up(self.mesh) else compiled

    def replicate(self, tree: Tree) -> Tree:
        """Return global arrays of which every rank has a copy.

        Args:
            tree: arrays ``(...)`` of the host or of a device, or numbers: the same on every process (nobody checks).
        """
        return jax.tree.map(lambda leaf: place(leaf, self.replicated), tree)

    def shard(self, tree: Tree) -> Tree:
        """Return global arrays ``(num_rows, ...)`` of which rank r has the r-th of ``num_ranks`` equal blocks of rows.

        Args:
            tree: whole arrays ``(num_rows, ...)``, the same on every process; each process reads and places only its
                part of them.

        Raises:
            ValueError: the ranks don't divide ``num_rows``, or there is no first axis.
        """
        jax.tree_util.tree_map_with_path(self._check_rows, tree)
        return jax.tree.map(lambda leaf: place(leaf, self.sharded), tree)

    def shard_local(self, tree: Tree) -> Tree:
        """Return global arrays ``(num_ranks * num_rows, ...)`` from the rows of each process.

        Args:
            tree: ``(num_local_ranks * num_rows, ...)``: this process's rows, in the order of its ranks; ``num_rows`` is
                the same on every process.

        Raises:
            ValueError: this process's ranks don't divide its rows, or there is no first axis.
        """
        return jax.tree_util.tree_map_with_path(self._shard_local, tree)

    def unshard(self, tree: Tree) -> Tree:
        """Return whole arrays in numpy, on every process: copies. With several processes this sends all of them to all.

        Keys of ``jax.random`` come back as their uint32 data, here and from ``to_host``.
        """
        return jax.tree.map(self._unshard, tree)

    def to_host(self, tree: Tree) -> Tree:
        """Return this process's first copy of replicated arrays ``(...)`` in numpy; nothing is sent to other ranks.

        Numbers and arrays of the host come back as numpy's too, here and from ``unshard``.

        Raises:
            ValueError: an array is not replicated.
        """
        copies = jax.tree_util.tree_map_with_path(_first_copy, tree)
        for leaf in jax.tree.leaves(copies):
            if isinstance(leaf, jax.Array):
                leaf.copy_to_host_async()  # all of them before the first is waited for
        return jax.tree.map(numpy.array, copies)

    def _require_one_process(self) -> None:
        if self.is_multiprocess:
            num_processes = len({device.process_index for device in self.mesh.devices.flat})
            raise UsageError(
                f"enable_jit False runs operation by operation in one process, and there are {num_processes}; start "
                f"one with {self.num_ranks} devices (lockstep train --num_devices {self.num_ranks}), or leave it on",
                shared=True,
            )

    def _check_rows(self, path: tuple[Any, ...], leaf: Any) -> None:
        shape = numpy.shape(leaf)
        if not shape or shape[0] % self.num_ranks:
            raise ValueError(
                f"{name_of(path)} has shape {shape}, whose first axis can't be split over {self.num_ranks} ranks; "
                "give it a multiple of that many rows, or replicate it"
            )

    def _shard_local(self, path: tuple[Any, ...], leaf: Any) -> jax.Array:
        shape, num_local = numpy.shape(leaf), len(self.local_ranks)
        if not shape or shape[0] % num_local:
            raise ValueError(
                f"{name_of(path)} has shape {shape}, whose first axis can't be split over the {num_local} ranks of "
                "this process; give it a multiple of that many rows"
            )
        num_rows = shape[0] // num_local
        parts = [
            put_on(leaf[index * num_rows : (index + 1) * num_rows], self.mesh.devices.flat[rank])
            for index, rank in enumerate(self.local_ranks)
        ]
        whole = (num_rows * self.num_ranks, *shape[1:])
        return jax.make_array_from_single_device_arrays(whole, self.sharded, parts)

    def _unshard(self, leaf: Any) -> numpy.ndarray:
        if not isinstance(leaf, jax.Array):
            return numpy.array(leaf)
        leaf = without_keys(leaf)
        if leaf.is_fully_addressable or leaf.is_fully_replicated:
            return read(leaf)
        whole = numpy.empty(leaf.shape, leaf.dtype)
        num_rows = leaf.shape[0] // self.num_ranks
        by_rank = whole.reshape(self.num_ranks, num_rows, *leaf.shape[1:])
        row_bytes = max(1, leaf.dtype.itemsize * math.prod(leaf.shape[1:]) * self.num_ranks)
        at_once = max(1, _GATHER_BYTES // row_bytes)
        for start in range(0, num_rows, at_once):
            size = min(at_once, num_rows - start)
            rows = _gather_rows(self, size)(leaf, numpy.int32(start))  # (num_ranks, size, ...)
            by_rank[:, start : start + size] = read(rows)
        return whole


class _OnCpus:
    """A compiled function on several CPU devices.

    Its collectives are checked when it is first traced, and each call is waited for if it must be.
    """

    def __init__(self, compiled: Any, must_wait: bool) -> None:
        self._compiled, self._must_wait = compiled, must_wait
        self._is_checked = False

    def __call__(self, *args: Any) -> Any:
        if not self._is_checked:
            self.trace(*args)
        result = self._compiled(*args)
        return waited(result) if self._must_wait else result

    def trace(self, *args: Any) -> Any:
        """Return ``jax.stages.Traced``; what was traced once is not traced again when it is called."""
        traced = self._compiled.trace(*args)
        if not self._is_checked:
            require_order(traced.jaxpr)
            self._is_checked = True
        return traced

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compiled, name)


@functools.cache
def _gather_rows(ranks: RankMesh, size: int) -> Callable[[jax.Array, numpy.int32], jax.Array]:
    def gather(rows: jax.Array, start: jax.Array) -> jax.Array:
        gathered: jax.Array = all_gather(jax.lax.dynamic_slice_in_dim(rows, start, size))
        return gathered

    return ranks.compile(gather, (SHARDED, REPLICATED), REPLICATED)


def _first_copy(path: tuple[Any, ...], leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array):
        return leaf
    if not leaf.is_fully_replicated:
        raise ValueError(f"{name_of(path)} {leaf.shape} is split over ranks ({leaf.sharding}); use unshard for it")
    return without_keys(leaf).addressable_data(0)


def get_global_ranks(mesh: "RankMesh | Mesh | None" = None) -> numpy.ndarray:
    """Return ``(num_local_ranks,)`` int64: the global ranks of this process's devices, to slice data sets with.

    Args:
        mesh: None for that of all devices of all processes.
    """
    devices = plain_mesh(mesh).devices.flat
    own = jax.process_index()
    return numpy.array([rank for rank, device in enumerate(devices) if device.process_index == own], dtype=numpy.int64)


def is_dist_initialized() -> bool:
    """Return whether this process has joined others by ``jax.distributed.initialize``."""
    return jax.distributed.is_initialized()


def plain_mesh(mesh: "RankMesh | Mesh | None") -> Mesh:
    """Return JAX's own mesh; for None that of all devices of all processes."""
    if mesh is None:
        mesh = make_mesh()
    return mesh.mesh if isinstance(mesh, RankMesh) else mesh
