"""Populations and keys over a mesh: one function for each row, rows split over the devices of all processes."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from lockstep.distributed.jax_collectives import Tree
from lockstep.distributed.jax_mesh import REPLICATED, RankMesh, plain_mesh
from lockstep.distributed.jax_order import collectives_of, mixes_up, require_order
from lockstep.distributed.jax_placement import name_of, place
from lockstep.distributed.jax_waiting import must_wait, waited

Function = Callable[..., Any]


def shmap_vmap(
    fn: Function, mesh: RankMesh | Mesh, in_specs: Any, out_specs: Any, *, check_vma: bool = True
) -> Function:
    """Return ``fn`` for every row at once: each device does its part of the rows by ``jax.vmap``; compiled.

    ``shmap_vmap(fitness, mesh, SHARDED, SHARDED)`` takes ``(4, 10, 3)`` to ``(4, 10)`` on 1, 2 or 4 devices if
    ``fitness`` takes ``(10, 3)`` to ``(10,)``.

    Args:
        fn: takes and returns trees of arrays without the first axis; collectives over the mesh's axes work in it.
        mesh: of ``make_mesh``, or any other of JAX.
        in_specs: for each argument, or part of it, ``PartitionSpec(axis)`` to take its rows apart over that axis of the
            mesh (or over several: ``PartitionSpec((one, other))``), or ``PartitionSpec()`` to give all of it to every
            call. One spec serves all arguments.
        out_specs: the same for what is returned; ``PartitionSpec()`` for what does not depend on the row.
        check_vma: let JAX prove that what is called the same for all rows is.

    The arguments have ``num_rows`` rows each, whatever that is: where the devices don't divide it, the last row is
    repeated until they do, and what comes of the repetitions is cut off. An argument that is not on the mesh yet is put
    there; if it is on the host, each process reads only its part of it.

    Raises:
        ValueError: the specs split nothing, or not the first axis, or arguments have different numbers of rows; or rows
            would have to be repeated, and would count in a collective of ``fn`` or might in a result without rows.
        UsageError: on several CPU devices ``fn`` has collectives that they could mix up; see ``after``.
    """

    def over_rows(*arguments: Any) -> Any:
        return jax.vmap(fn, in_axes=_axes_of(in_specs), out_axes=_axes_of(out_specs))(*arguments)

    return _over_devices(over_rows, plain_mesh(mesh), in_specs, out_specs, check_vma)


def shmap_map(
    fn: Function,
    mesh: RankMesh | Mesh,
    in_specs: Any,
    out_specs: Any,
    *,
    batch_size: int | None = None,
    check_vma: bool = True,
) -> Function:
    """Return ``fn`` for every row, as ``shmap_vmap``, but each device does its rows one after the other: little memory.

    Args:
        fn: see ``shmap_vmap``, as for all arguments but these:
        mesh: see there.
        in_specs: see there.
        out_specs: see there; every result has rows.
        batch_size: how many rows a device does at once; None for one.
        check_vma: see there.

    Raises:
        ValueError, UsageError: as ``shmap_vmap``, and if ``out_specs`` has a result without rows.
    """
    if not all(_is_split(spec) for spec in jax.tree.leaves(out_specs)):
        raise ValueError(
            f"out_specs is {out_specs}, but every result of shmap_map has rows: use the same axis of the mesh as "
            "in_specs, or shmap_vmap"
        )

    def over_rows(*arguments: Any) -> Any:
        leaves, structure = jax.tree.flatten(arguments)
        split = [_is_split(spec) for spec in _spec_of_each(in_specs, arguments)]

        def one_row(rows: list[Any]) -> Any:
            own = iter(rows)
            every = [next(own) if is_row else leaf for leaf, is_row in zip(leaves, split, strict=True)]
            return fn(*jax.tree.unflatten(structure, every))

        rows = [leaf for leaf, is_row in zip(leaves, split, strict=True) if is_row]
        return jax.lax.map(one_row, rows, batch_size=batch_size)

    return _over_devices(over_rows, plain_mesh(mesh), in_specs, out_specs, check_vma)


def _over_devices(over_rows: Function, mesh: Mesh, in_specs: Any, out_specs: Any, check_vma: bool) -> Function:
    """Return ``over_rows``, which does one device's rows, for all devices and any number of rows."""
    devices_per_axis = _check_specs(mesh, in_specs, out_specs)
    mapped = jax.shard_map(over_rows, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma)

    @functools.partial(jax.jit, static_argnums=0)
    def run(num_repeated: int, *arguments: Any) -> Any:
        is_to_be_ordered = mixes_up(mesh)
        if not (is_to_be_ordered or num_repeated):
            return mapped(*arguments)
        program = jax.make_jaxpr(mapped)(*arguments)
        if is_to_be_ordered:
            require_order(program)
        if num_repeated == 0:
            return mapped(*arguments)
        first = next(collectives_of(program.jaxpr), None)
        if first is not None:
            raise ValueError(
                f"{devices_per_axis} devices don't divide the rows, and repeated rows would count in {first}; give a "
                f"multiple of {devices_per_axis}"
            )
        return jax.tree.map(functools.partial(_shortened, num_repeated=num_repeated, mesh=mesh), mapped(*arguments))

    def over_devices(*arguments: Any) -> Any:
        specs = _spec_of_each(in_specs, arguments)
        named, structure = jax.tree_util.tree_flatten_with_path(arguments)
        num_repeated = -_number_of_rows(named, specs) % devices_per_axis
        if num_repeated and not all(_is_split(spec) for spec in jax.tree.leaves(out_specs)):
            raise ValueError(
                f"{devices_per_axis} devices don't divide {_number_of_rows(named, specs)} rows, and repeated rows "
                f"might count in a result without rows (out_specs {out_specs}); give a multiple of {devices_per_axis}"
            )
        placed = [
            _placed(_lengthened(leaf, num_repeated) if _is_split(spec) else leaf, NamedSharding(mesh, spec))
            for (_, leaf), spec in zip(named, specs, strict=True)
        ]
        rows = run(num_repeated, *jax.tree.unflatten(structure, placed))
        return waited(rows) if must_wait(mesh) else rows

    return over_devices


def tree_device_put(tree: Tree, mesh_or_sharding: RankMesh | Mesh | Sharding) -> Tree:
    """Return global arrays laid out over devices; each process reads and places only its own part.

    So the whole may be larger than the memory of any device; on the host it may be a file, see below.

    Args:
        tree: whole arrays, the same on every process, of the host (numpy, memory-mapped) or of JAX. With a mesh
            ``(num_rows, ...)``.
        mesh_or_sharding: a mesh splits the first axis over all its devices; any other layout is given by a sharding.

    Raises:
        ValueError: the layout doesn't divide an array.
    """
    if isinstance(mesh_or_sharding, Sharding):
        sharding = mesh_or_sharding
    else:
        mesh = plain_mesh(mesh_or_sharding)
        sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))

    def put(path: tuple[Any, ...], leaf: Any) -> jax.Array:
        try:
            sharding.shard_shape(numpy.shape(leaf))
        except (ValueError, IndexError) as error:
            raise ValueError(
                f"{name_of(path)} has shape {numpy.shape(leaf)}, which {len(sharding.device_set)} devices don't divide "
                f"as {sharding} says; give it a multiple of that many rows, or use replicate"
            ) from error
        return place(leaf, sharding)

    return jax.tree_util.tree_map_with_path(put, tree)


def replicate(tree: Tree, mesh: RankMesh | Mesh | None = None) -> Tree:
    """Return global arrays of which every device has a copy.

    Args:
        tree: arrays ``(...)`` or numbers, the same on every process.
        mesh: None for that of all devices of all processes.
    """
    sharding = NamedSharding(plain_mesh(mesh), REPLICATED)
    return jax.tree.map(lambda leaf: place(leaf, sharding), tree)


def unreplicate(tree: Tree) -> Tree:
    """Return the copy that this process's first device has of replicated arrays ``(...)``, on that device alone.

    Args:
        tree: arrays of ``replicate``; numbers and arrays of the host are put on a device.

    Raises:
        ValueError: an array is not replicated.
    """

    def first(path: tuple[Any, ...], leaf: Any) -> jax.Array:
        if not isinstance(leaf, jax.Array):
            return jnp.asarray(leaf)
        if not leaf.is_fully_replicated:
            raise ValueError(f"{name_of(path)} {leaf.shape} is not the same on every device: {leaf.sharding}")
        return leaf.addressable_data(0)

    return jax.tree_util.tree_map_with_path(first, tree)


def split_key_to_devices(key: jax.Array | numpy.ndarray, mesh: RankMesh | Mesh | None = None) -> jax.Array:
    """Return ``(num_devices,)`` keys, one on each device of the mesh, no two alike over all devices of all processes.

    Device r's is ``jax.random.fold_in(key, r)`` with its global rank r, so it does not depend on the number of devices
    or processes. Give the result to a compiled function as SHARDED; a device finds its own key at index 0.

    Args:
        key: one key, the same on every process: of ``jax.random.key``, or uint32 of ``jax.random.PRNGKey`` (the result
            is then ``(num_devices, 2)``), also in numpy.
        mesh: None for that of all devices of all processes.

    Raises:
        ValueError: ``key`` is several keys, or none, or is traced.
    """
    if isinstance(key, jax.core.Tracer):
        raise ValueError(
            "split_key_to_devices puts keys on devices, which a compiled function can't do; call it outside, or use "
            "jax.random.fold_in(key, axis_index()) inside"
        )
    key = jnp.asarray(key)
    is_typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    if not is_typed and key.dtype != jnp.uint32:
        raise ValueError(f"key is {key.dtype}{list(key.shape)}, which is no key; give that of jax.random.key(seed)")
    if key.ndim != (0 if is_typed else 1):
        raise ValueError(f"key has shape {key.shape}, which is not one key; give one, the same on every process")
    devices = plain_mesh(mesh)
    here = jax.random.clone(unreplicate(key)) if not key.is_fully_addressable else key
    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(here, jnp.arange(devices.size, dtype=jnp.uint32))
    return place(keys, NamedSharding(devices, PartitionSpec(devices.axis_names)))


def _is_split(spec: PartitionSpec) -> bool:
    return len(spec) > 0 and spec[0] is not None


def _axes_of(specs: Any) -> Any:
    """Return the axes of ``jax.vmap`` that belong to specs of ``jax.shard_map``."""
    return jax.tree.map(lambda spec: 0 if _is_split(spec) else None, specs)


def _spec_of_each(specs: Any, arguments: tuple[Any, ...]) -> list[PartitionSpec]:
    return jax.tree.leaves(jax.tree.broadcast(specs, arguments))


def _check_specs(mesh: Mesh, in_specs: Any, out_specs: Any) -> int:
    """Return over how many devices rows are split."""
    for name, specs in (("in_specs", in_specs), ("out_specs", out_specs)):
        for spec in jax.tree.leaves(specs):
            if not isinstance(spec, PartitionSpec):
                raise ValueError(f"{name} holds {spec!r}; use PartitionSpec('{mesh.axis_names[0]}') or PartitionSpec()")
            if any(entry is not None for entry in spec[1:]):
                raise ValueError(f"{name} holds {spec}, but only the first axis, the rows, can be split over devices")
    split = {spec[0] for specs in (in_specs, out_specs) for spec in jax.tree.leaves(specs) if _is_split(spec)}
    if len(split) != 1:
        found = f"split rows over {', '.join(map(str, sorted(split, key=str)))}" if split else "split nothing"
        raise ValueError(f"in_specs and out_specs {found}; rows must be split over one axis, of {mesh.axis_names}")
    (entry,) = split
    names = entry if isinstance(entry, tuple) else (entry,)
    if unknown := [name for name in names if name not in mesh.axis_names]:
        raise ValueError(f"in_specs split rows over '{unknown[0]}', but the axes of the mesh are {mesh.axis_names}")
    return math.prod(mesh.shape[name] for name in names)


def _number_of_rows(named: list[tuple[tuple[Any, ...], Any]], specs: list[PartitionSpec]) -> int:
    shapes = {
        name_of(path): numpy.shape(leaf) for (path, leaf), spec in zip(named, specs, strict=True) if _is_split(spec)
    }
    if not shapes:
        raise ValueError("no argument has rows: in_specs split nothing")
    numbers = {shape[:1] for shape in shapes.values()}
    if len(numbers) > 1 or () in numbers:
        listed = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ValueError(f"arguments that are split must have the same number of rows, but have shapes: {listed}")
    ((number,),) = numbers
    return int(number)


def _lengthened(leaf: Any, num_repeated: int) -> Any:
    """Return the rows and ``num_repeated`` copies of the last one."""
    if num_repeated == 0:
        return leaf
    xp = jnp if isinstance(leaf, jax.Array) else numpy
    return xp.concatenate([leaf, *[leaf[-1:]] * num_repeated])


def _shortened(leaf: jax.Array, num_repeated: int, mesh: Mesh) -> jax.Array:
    """Return rows without the last ``num_repeated``."""
    if AxisType.Explicit in mesh.axis_types:  # where only what the devices divide can be split over them
        leaf = jax.sharding.reshard(leaf, NamedSharding(mesh, REPLICATED))
    return leaf[: leaf.shape[0] - num_repeated]


def _placed(leaf: Any, sharding: NamedSharding) -> Any:
    if isinstance(leaf, jax.core.Tracer):
        return leaf
    is_there = isinstance(leaf, jax.Array) and leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
    return leaf if is_there else place(leaf, sharding)
