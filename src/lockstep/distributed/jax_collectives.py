"""Collectives over the ranks of a mesh. Where there are no ranks they change nothing, so algorithms need no branches.

Each takes ``axis_name``, the name of the ranks' axis, or names of several, whose ranks are then counted through. Names
that are not bound (outside ``jax.shard_map``, or in one over other axes) don't count; without any, as with None, there
is one rank: this one.
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

AXIS_NAME = "ranks"
"""The one axis of the meshes made by ``make_mesh``, and the default of every ``axis_name``."""

Tree = Any
"""Arrays in nested containers: what JAX calls a pytree."""

AxisName = str | tuple[str, ...] | None
"""Whom a collective is among; see above."""

_NOTHING_TO_AVERAGE = (
    "pmean of what is the same on all ranks already, which changes nothing; if it is a gradient, it is the sum over "
    "all ranks: take it with respect to local_parameters(parameters) instead"
)


def psum(tree: Tree, axis_name: AxisName = AXIS_NAME) -> Tree:
    """Return the sums of each array ``(...)`` over all ranks, ``(...)``, the same on every rank.

    An array that is the same on all ranks is multiplied by their number. Booleans are counted, in int32. All else is
    added up in its own dtype, which small ones overflow.
    """
    return _reduce(jax.lax.psum, tree, axis_name)


def pmean(tree: Tree, axis_name: AxisName = AXIS_NAME) -> Tree:
    """Return the means of each array ``(...)`` over all ranks, ``(...)``, the same on every rank.

    Every rank counts as much as every other; see ``gradient_update`` for ranks that have unequal numbers of samples.
    Integers give floats, except where there is no axis. Sums are at least float32, so small dtypes don't overflow.

    Warns of floats that are the same on all ranks already, by JAX's types: there is nothing to average, and a gradient
    is a sum over ranks then; see ``local_parameters``.
    """
    # Of types that know what may differ (check_vma=True), a rank's own number does.
    names = [name for name in _typed(axis_name) if differs(jax.lax.axis_index(name), name)]
    arrays = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]
    floats = [array for array in arrays if jnp.issubdtype(array.dtype, jnp.inexact)]
    if not all(differs(leaf, name) for leaf in floats for name in names):
        warnings.warn(_NOTHING_TO_AVERAGE, stacklevel=2)
    return _reduce(_mean, tree, axis_name)


def pmax(tree: Tree, axis_name: AxisName = AXIS_NAME) -> Tree:
    """Return the largest of each array ``(...)`` over all ranks, by element: ``(...)``, the same on every rank."""
    return _reduce(jax.lax.pmax, tree, axis_name)


def pmin(tree: Tree, axis_name: AxisName = AXIS_NAME) -> Tree:
    """Return the smallest of each array ``(...)`` over all ranks, by element: ``(...)``, the same on every rank."""
    return _reduce(jax.lax.pmin, tree, axis_name)


def all_gather(tree: Tree, axis_name: AxisName = AXIS_NAME, *, tiled: bool = False) -> Tree:
    """Return every rank's arrays, in the order of ranks and the same on every rank.

    Args:
        tree: arrays ``(...)``; with ``tiled`` each has at least one axis: ``(num_rows, ...)``.
        axis_name: see above.
        tiled: give ``(num_ranks * num_rows, ...)`` instead of ``(num_ranks, ...)``.

    Without an axis the tree comes back as it is: no axis is put in front. With ``tiled`` the number of axes is the
    same in both cases.

    Raises:
        ValueError: ``tiled``, and an array has no axis.
    """
    if tiled and is_bound(axis_name) and any(jnp.ndim(leaf) == 0 for leaf in jax.tree.leaves(tree)):
        raise ValueError(
            "all_gather with tiled=True joins rows, but an array of the tree has shape (); use tiled=False"
        )
    return _reduce(functools.partial(_gather, tiled=tiled), tree, axis_name)


def axis_index(axis_name: AxisName = AXIS_NAME) -> jax.Array:
    """Return this rank's number, int32 ``()``: 0 without an axis."""
    names = _bound(axis_name)
    return jax.lax.axis_index(names) if names else jnp.zeros((), jnp.int32)


def axis_size(axis_name: AxisName = AXIS_NAME) -> int:
    """Return the number of ranks, known while compiling: 1 without an axis."""
    names = _bound(axis_name)
    return int(jax.lax.axis_size(names)) if names else 1


def is_bound(axis_name: AxisName) -> bool:
    """Return whether code that runs here is one of several ranks along an axis of this name, or of one of these."""
    return bool(_bound(axis_name))


def differs(array: Any, axis_name: AxisName = AXIS_NAME) -> bool:
    """Return whether JAX's types say that an array may differ from rank to rank: in ``shard_map(check_vma=True)``."""
    return any(_try_to_vary(array, name) is None for name in _typed(axis_name))


def differing_axes(tree: Tree) -> set[str]:
    """Return the names of the axes of ``shard_map(check_vma=True)`` over which JAX's types let any array differ."""
    leaves = jax.tree.leaves(tree)
    axes = jax.sharding.get_abstract_mesh().manual_axes
    return {str(name) for name in axes if any(differs(leaf, name) for leaf in leaves)}


def local_parameters(tree: Tree, axis_name: AxisName = AXIS_NAME) -> Tree:
    """Return the same arrays, typed as this rank's own, so that gradients with respect to them are this rank's own.

    Inside ``jax.shard_map(..., check_vma=True)`` the gradient with respect to an argument that is the same on all ranks
    comes back summed over them already; a mean on top of it would be too large by the number of ranks. So take
    gradients with respect to ``local_parameters(parameters)``, and reduce them yourself. Nothing is computed or sent.
    """
    names = _typed(axis_name)
    return jax.tree.map(functools.partial(_as_varying, names=names), tree) if names else tree


def after(tree: Tree, first: Tree) -> Tree:
    """Return the arrays of ``tree`` as they are, but known only once those of ``first`` are.

    For collectives that neither follow from a loop with collectives in it nor are followed by it, which devices of a
    CPU can't keep apart: ``psum(after(sums, learned))`` waits for the loop that gives ``learned``. Nothing is sent.

    Args:
        tree: arrays ``(...)``; its type as the same on all ranks is kept if that is the type of all of ``first``.
        first: arrays ``(...)`` with at least one element between them. All are waited for.

    Raises:
        ValueError: ``first`` holds no number to wait for.
    """
    leaves = [leaf for leaf in map(jnp.asarray, jax.tree.leaves(first)) if leaf.size]
    if not leaves:
        raise ValueError("after(tree, first) waits for arrays of first, but there is none with an element in it")
    # No number has so many bits. The compiler does not know that, and can't drop what depends on it.
    never = functools.reduce(jnp.logical_or, (jax.lax.population_count(_bits(leaf)) > 64 for leaf in leaves))
    return jax.tree.map(lambda leaf: jnp.where(never, jnp.zeros_like(leaf), leaf), tree)


def _bits(array: jax.Array) -> jax.Array:
    """Return the first element of an array as an unsigned integer, ``()``."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    one = jax.lax.index_in_dim(array.reshape(-1), 0, keepdims=False)
    if jnp.issubdtype(one.dtype, jnp.complexfloating):
        one = one.real
    if one.dtype == jnp.bool_:
        return one.astype(jnp.uint32)
    return jax.lax.bitcast_convert_type(one, jnp.dtype(f"uint{8 * one.dtype.itemsize}"))


def _reduce(collective: Callable[..., Any], tree: Tree, axis_name: AxisName) -> Tree:
    names = _bound(axis_name)
    if not names:
        return tree
    # Typed as this rank's own first: what is the same on all ranks is then reduced like anything else.
    return jax.tree.map(lambda leaf: collective(leaf, names), local_parameters(tree, names))


def _mean(leaf: Any, names: tuple[str, ...]) -> jax.Array:
    array = jnp.asarray(leaf)
    if not jnp.issubdtype(array.dtype, jnp.inexact):
        array = jnp.true_divide(array, 1)
    is_small = array.dtype.itemsize < 4
    mean: jax.Array = jax.lax.pmean(array.astype(jnp.float32) if is_small else array, names)
    return mean.astype(array.dtype) if is_small else mean


def _gather(leaf: Any, names: tuple[str, ...], tiled: bool) -> jax.Array:
    # Typed as replicated, which jax.lax.all_gather alone does not say; an axis of vmap knows no such types.
    options: Any = {"to": "invarying"} if _typed(names) else {}
    gathered: jax.Array = jax.lax.all_gather(leaf, names, tiled=tiled, **options)
    return gathered


def _bound(axis_name: AxisName) -> tuple[str, ...]:
    """Return the names of those axes that there are here."""
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    return tuple(name for name in names if name is not None and _is_bound(name))


def _is_bound(name: str) -> bool:
    try:
        jax.lax.axis_size(name)
    except NameError:
        return False
    return True


def _typed(axis_name: AxisName) -> tuple[str, ...]:
    """Return the names of axes of ``jax.shard_map``; the other kind, of ``jax.vmap``, has no types to change."""
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return tuple(name for name in names if name is not None and name in manual)


def _as_varying(leaf: Any, names: tuple[str, ...]) -> jax.Array:
    array = jnp.asarray(leaf)
    for name in names:
        varying = _try_to_vary(array, name)
        array = array if varying is None else varying
    return array


def _try_to_vary(array: Any, name: str) -> jax.Array | None:
    """Return an array typed as different along an axis, or None if it is so already."""
    try:
        varying: jax.Array = jax.lax.pcast(array, name, to="varying")
    except ValueError:
        return None
    return varying
