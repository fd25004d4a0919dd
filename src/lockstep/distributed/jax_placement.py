"""Arrays on the devices of a mesh: how they get there and back. Each process places and reads only its own part."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy
from jax.sharding import Sharding

Tree = Any


def place(array: Any, sharding: Sharding) -> jax.Array:
    """Return a global array of its own, laid out over devices; nothing that happens to it changes ``array``.

    Args:
        array: the whole array ``(...)``, the same on every process: in numpy, in JAX, a number, or anything that has a
            ``shape`` and gives its parts by index (a memory-mapped file), of which only this process's are read.
        sharding: a layout that divides the array evenly.
    """
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        moved: jax.Array = jax.device_put(array, sharding, may_alias=False)  # among the devices of all processes
        return moved
    if not hasattr(array, "shape"):
        array = numpy.asarray(array)
    shape = tuple(array.shape)
    parts = [
        put_on(array if isinstance(array, jax.Array) and _is_whole(index, shape) else array[index], device)
        for device, index in sharding.addressable_devices_indices_map(shape).items()
    ]
    return jax.make_array_from_single_device_arrays(shape, sharding, parts)


def put_on(array: Any, device: jax.Device) -> jax.Array:
    """Return a copy of an array on one device of this process."""
    # JAX may let an array on the CPU share memory with numpy's, which its owner may write to.
    source = array if isinstance(array, jax.Array) else numpy.array(array)
    copy: jax.Array = jax.device_put(source, device, may_alias=False)
    return copy


def _is_whole(index: tuple[slice, ...] | None, shape: tuple[int, ...]) -> bool:
    return index is None or all(part.indices(size) == (0, size, 1) for part, size in zip(index, shape, strict=True))


def read(array: jax.Array) -> numpy.ndarray:
    """Return a copy ``(...)`` on the host of a global array of which this process has every part."""
    array = without_keys(array)
    if array.is_fully_replicated:
        return numpy.array(array.addressable_data(0))
    for shard in array.addressable_shards:
        shard.data.copy_to_host_async()
    whole = numpy.empty(array.shape, array.dtype)
    for shard in array.addressable_shards:
        whole[shard.index] = shard.data
    return whole


def without_keys(array: jax.Array) -> jax.Array:
    """Return an array that numpy knows: for keys of ``jax.random`` their uint32 data, ``(..., size)``."""
    return jax.random.key_data(array) if jnp.issubdtype(array.dtype, jax.dtypes.prng_key) else array


def name_of(path: tuple[Any, ...]) -> str:
    """Return an array's place in its tree in words: ``actor.layers.0``; ``the array`` if it is the whole tree."""
    return jax.tree_util.keystr(path, simple=True, separator=".") or "the array"
