"""Trees of arrays as plain dicts of dicts of numpy arrays: what a checkpoint holds, whatever classes made the tree."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy

Nest = dict[str, Any]
"""Names to arrays, or to nests."""

PyTree = Any
_ALONE = "value"  # the name of an array that is no part of anything


def to_nest(tree: PyTree) -> Nest:
    """Return the arrays of a tree by the names of dict entries and fields and the numbers of items.

    Raises:
        ValueError: two entries of a dict have the same name once they are texts.
    """
    nest: Nest = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        put_into(nest, _names(path), leaf)
    return nest


def from_nest(nest: Mapping[str, Any], like: PyTree) -> PyTree:
    """Return a tree of the structure of ``like`` with the arrays of a nest.

    Raises:
        KeyError: the nest lacks one.
    """

    def take(path: tuple[Any, ...], _: Any) -> Any:
        value: Any = nest
        for name in _names(path):
            value = value[name]
        return value

    return jax.tree_util.tree_map_with_path(take, like)


def flatten(nest: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the arrays of a nest by their full names, with dots between."""
    outer = (prefix,) if prefix else ()
    return {".".join((*outer, *names)): value for names, value in leaves_of(nest)}


def leaves_of(nest: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the arrays of a nest with the names that lead to them."""
    for name, value in nest.items():
        if isinstance(value, Mapping):
            yield from (((name, *names), inner) for names, inner in leaves_of(value))
        else:
            yield (name,), value


def put_into(nest: Nest, names: Sequence[str], value: Any) -> None:
    """Put an array where names lead to.

    Raises:
        ValueError: there is one already.
    """
    *outer, last = names
    for name in outer:
        nest = nest.setdefault(name, {})
    if last in nest:
        raise ValueError(f"two entries of the state are called {'.'.join(names)}; rename one")
    nest[last] = value


def plain_shapes(tree: PyTree) -> PyTree:
    """Return shape and dtype of each array as a checkpoint has it: a key of ``jax.random`` is its data."""

    def shape_of(leaf: Any) -> jax.ShapeDtypeStruct:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            data: jax.ShapeDtypeStruct = jax.eval_shape(jax.random.key_data, leaf)
            return data
        return jax.ShapeDtypeStruct(leaf.shape, numpy.dtype(leaf.dtype))

    return jax.tree.map(shape_of, tree)


def with_keys(tree: PyTree, like: PyTree) -> PyTree:
    """Return a tree of arrays in which what is a key of ``jax.random`` in ``like`` is one again.

    Args:
        tree: arrays; for keys their uint32 data.
        like: arrays, or their shapes and dtypes.
    """

    def wrap(leaf: Any, expected: Any) -> Any:
        if jnp.issubdtype(expected.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(leaf, impl=_kind_of(expected))
        return leaf

    return jax.tree.map(wrap, tree, like)


def _kind_of(key: Any) -> Any:
    """Return the generator that a key is for; of a key there may be shape and dtype alone, which JAX asks nothing."""
    found: list[Any] = []
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), key)
    return found[0]


def _names(path: tuple[Any, ...]) -> tuple[str, ...]:
    return tuple(jax.tree_util.keystr((entry,), simple=True) for entry in path) or (_ALONE,)
