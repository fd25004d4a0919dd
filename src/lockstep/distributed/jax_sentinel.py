"""The sentinel of JAX: is everything that ranks hold in common still the same on all of them, bit for bit?"""

import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import NoReturn

import jax
import jax.numpy as jnp
import numpy

from lockstep.core.errors import RunError
from lockstep.distributed.differences import first_difference, odd, others_in_words, usual
from lockstep.distributed.jax_collectives import Tree, all_gather
from lockstep.distributed.jax_mesh import REPLICATED, RankMesh
from lockstep.distributed.jax_placement import name_of, without_keys
from lockstep.distributed.wording import name_ranks

_NARROW = ("bool", "int2", "int4", "uint2", "uint4")
_WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}

# SplitMix64 (Steele, Lea and Flood 2014): increment, then (shift, multiplier) twice and a last shift. uint64 wraps.
_INCREMENT = 0x9E3779B97F4A7C15
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST_SHIFT = 31


def checksum(array: jax.Array) -> jax.Array:
    """Return ``()`` uint64: a sum over the raw bits of an array ``(...)`` of any dtype and size. Takes 64-bit types.

    Equal only if every entry has the same bits at the same place, but for a chance of one in 2^64.
    """
    words = _words_of(array).astype(jnp.uint64)
    place = jax.lax.iota(jnp.uint64, words.shape[0]) + jnp.uint64(1)
    # A weighted sum of the bits alone would not do: two flipped signs of float64 are 2^63 apart each, whatever their
    # (odd) weights are, and cancel. So each word is scrambled with its place before the sum.
    mixed = place * jnp.uint64(_INCREMENT) + words
    for shift, multiplier in _ROUNDS:
        mixed = (mixed ^ (mixed >> jnp.uint64(shift))) * jnp.uint64(multiplier)
    return jnp.sum(mixed ^ (mixed >> jnp.uint64(_LAST_SHIFT)), dtype=jnp.uint64)


def _words_of(array: jax.Array) -> jax.Array:
    """Return ``(num_words,)`` unsigned integers with the bits of an array."""
    array = without_keys(array)
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        array = jnp.stack((array.real, array.imag))
    flat = array.reshape(-1)
    if flat.dtype.name in _NARROW:
        return flat.astype(jnp.uint8)
    return jax.lax.bitcast_convert_type(flat, _WORDS[flat.dtype.itemsize])


class Sentinel:
    """Compares replicated arrays over the ranks every ``interval`` iterations, and whenever something is to be kept.

    Args:
        ranks: the mesh.
        interval: in iterations; 0 turns the sentinel off.
        gather_text: ``gather_text(text, tag)`` returns every process's text, in their order, on every process.
    """

    def __init__(self, ranks: RankMesh, interval: int, gather_text: Callable[[str, str], list[str]]) -> None:
        self._ranks, self._interval, self._gather_text = ranks, interval, gather_text
        self._last_equal: int | None = None

    def is_due(self, iteration: int, force: bool = False) -> bool:
        """Tell whether ``check`` compares in this iteration."""
        return self._interval > 0 and self._ranks.num_ranks > 1 and (force or iteration % self._interval == 0)

    def check(self, iteration: int, tree: Tree, force: bool = False) -> None:
        """Compare, if it is due: each device sums up its own copy, and the sums of all come back in one call.

        Args:
            iteration: the same on every process.
            tree: global arrays that are replicated; the first that differs is named by its place in the tree.
            force: compare whatever the interval, unless that is 0: a checkpoint of this iteration comes next.

        Raises:
            RunError: something differs; every process raises the same line.
        """
        if not self.is_due(iteration, force):
            return
        named = jax.tree_util.tree_leaves_with_path(tree)
        self._compare_processes(iteration, [f"{name_of(path)}\t{leaf.dtype} {leaf.shape}" for path, leaf in named])
        with jax.enable_x64(True):
            table = self._ranks.to_host(_sums_of_all(self._ranks)([leaf for _, leaf in named]))
        if (table == table[0]).all():  # (num_ranks, num_arrays)
            self._last_equal = iteration
            return
        self._stop_for_arrays(iteration, [name_of(path) for path, _ in named], table)

    def _compare_processes(self, iteration: int, listing: Sequence[str]) -> None:
        """Compare what processes are about to compare: with other arrays they would wait for one another for ever."""
        if not self._ranks.is_multiprocess:
            return
        digest = hashlib.blake2b("\n".join(listing).encode(), digest_size=8).hexdigest()
        own = f"{iteration} {digest}"
        rows = [text.split() for text in self._gather_text(own, "sentinel")]
        iterations, digests = [int(row[0]) for row in rows], [row[1] for row in rows]
        if odd(iterations):
            one, other = odd(iterations)[0], usual(iterations)
            self._stop(
                f"processes are out of step: process {one} is in iteration {iterations[one]}, process {other} in "
                f"iteration {iterations[other]}; look for a loop that one process left early"
            )
        if odd(digests):
            every = [text.split("\n") for text in self._gather_text("\n".join(listing), "sentinel names")]
            difference = first_difference(every, odd(digests)[0], usual(digests), "process")
            self._stop(
                f"processes are out of step in iteration {iteration}: {difference}; build the same state from the same "
                "config on every process"
            )

    def _stop_for_arrays(self, iteration: int, names: Sequence[str], table: numpy.ndarray) -> NoReturn:
        by_array = table.T.tolist()
        first, *others = [index for index, own in enumerate(by_array) if odd(own)]
        more = others_in_words(len(others), "array")
        before = "" if self._last_equal is None else f" (all were equal in iteration {self._last_equal})"
        self._stop(
            f"ranks are out of step in iteration {iteration}: {names[first]} differs on "
            f"{name_ranks(odd(by_array[first]))} (of {self._ranks.num_ranks}), {more}{before}; look for what changes "
            "it from one rank's own data, such as a value that is not reduced under check_vma=False"
        )

    def _stop(self, line: str) -> NoReturn:
        raise RunError(line, shared=True)


@functools.cache
def _sums_of_all(ranks: RankMesh) -> Callable[[list[jax.Array]], jax.Array]:
    def sums(arrays: list[jax.Array]) -> jax.Array:
        own = [checksum(array) for array in arrays]
        table: jax.Array = all_gather(jnp.stack(own) if own else jnp.zeros(0, jnp.uint64))  # (num_ranks, num_arrays)
        return table

    return ranks.compile(sums, REPLICATED, REPLICATED)
