"""Other people's learners as processes of a JAX job: one device each, and exchanges between their own programs.

Such a library compiles many small programs of its own, for the one device that it knows. What its processes are to
have in common travels between those, over the mesh of all.
"""

import functools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from lockstep.core import beats
from lockstep.core.types import Wait
from lockstep.distributed.jax_collectives import Tree, all_gather, psum
from lockstep.distributed.jax_comm import lost_processes_in_words
from lockstep.distributed.jax_mesh import REPLICATED, SHARDED, RankMesh

_WORLD = ("WORLD_SIZE", "JAX_WORLD_SIZE")
"""Where libraries read, when they are imported, that they are to join a job; which this process has done."""


@contextmanager
def guest_imports() -> Iterator[None]:
    """Return the context in which a library is imported that would join a job of its own: it sees one process."""
    hidden = {name: os.environ.pop(name) for name in _WORLD if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)


class Exchange:
    """What processes that have one device each tell one another, between their own programs.

    All processes make the same calls in the same order. A process that is alone has one too: what it gives comes back.

    Args:
        ranks: the mesh, of one device of each process.
        share: of all samples, this process's: ranks count in proportion, in every mean.
    """

    def __init__(self, ranks: RankMesh, share: float) -> None:
        if len(ranks.local_ranks) != 1:
            raise ValueError(f"a process has {len(ranks.local_ranks)} ranks; it must have one")
        self.ranks, self.share = ranks, share
        (self.rank,) = ranks.local_ranks
        self.device: jax.Device = ranks.mesh.devices.flat[self.rank]
        self._waits: list[Wait] = []
        self._nonfinite = ""

    def mean(self, tree: Tree, tag: str) -> Tree:
        """Return the means over all ranks' samples of each array ``(...)``, the same on every rank, bit for bit.

        Args:
            tree: float arrays on this process's device, means over its own samples; whatever they are where it has
                none.
            tag: what the exchange is for.

        Raises:
            RunError: a process has ended.
        """
        num_ranks = self.ranks.num_ranks
        if num_ranks == 1:
            return tree
        sums = self._send(_weighed(tree, self.share, self.rank, num_ranks), _sum(self.ranks), tag)
        mean, are_bad = _unravel(tree, sums, num_ranks)
        self._note_nonfinite(np.asarray(are_bad), tag)
        return mean

    def gather(self, row: np.ndarray, tag: str) -> np.ndarray:
        """Return every rank's numbers ``(num_ranks, ...)`` on the host, the same on every rank.

        Args:
            row: ``(...)``, this rank's, of the same shape on all.
            tag: what the exchange is for.

        Raises:
            RunError: a process has ended.
        """
        if self.ranks.num_ranks == 1:
            return row[None].copy()
        with jax.enable_x64(True):
            own = jax.device_put(row[None], self.device)
            rows = np.asarray(self._send(own, _rows(self.ranks), tag))
        self._note_nonfinite(~np.isfinite(rows.reshape(len(rows), -1)).all(1), tag)
        return rows

    def take_nonfinite(self) -> str:
        """Return what was sent first since the last call that was not finite, and by which rank: the same on every one.

        It is "" if all was finite, or if nothing was sent, as in a process that is alone.
        """
        taken, self._nonfinite = self._nonfinite, ""
        return taken

    def take_waits(self) -> list[Wait]:
        """Return these exchanges since the last call."""
        taken, self._waits = self._waits, []
        return taken

    def _note_nonfinite(self, are_bad: np.ndarray, tag: str) -> None:
        """Keep what ranks ``are_bad (num_ranks,)`` have sent, if it is the first that was not finite."""
        if are_bad.any() and not self._nonfinite:
            self._nonfinite = f"{tag} on rank {int(are_bad.argmax())}"

    def _send(self, own: jax.Array, collective: Callable[[jax.Array], jax.Array], tag: str) -> jax.Array:
        """Return this process's copy of what a collective makes of all ranks' arrays ``(1, ...)``."""
        jax.block_until_ready(own)  # which is this process's own work, and no wait for others
        began = time.perf_counter()
        with beats.exchange(tag), lost_processes_in_words(tag):
            shape = (self.ranks.num_ranks, *own.shape[1:])
            whole = jax.make_array_from_single_device_arrays(shape, self.ranks.sharded, [own])
            result: jax.Array = jax.block_until_ready(collective(whole).addressable_data(0))
        self._waits.append(Wait(tag, time.perf_counter() - began, own.nbytes))
        return result


@functools.partial(jax.jit, static_argnums=3)
def _weighed(tree: Tree, share: float, rank: int, num_ranks: int) -> jax.Array:
    """Return ``(1, size + num_ranks)``: the arrays, weighed, and in this rank's place 1 if they are not finite."""
    flat, _ = ravel_pytree(tree)
    # What is computed of no samples is 0/0.
    weighed = jnp.where(share > 0, flat * jnp.asarray(share, flat.dtype), 0)
    is_bad = ~jnp.isfinite(weighed).all()
    return jnp.concatenate((weighed, jnp.where(jnp.arange(num_ranks) == rank, is_bad, 0).astype(flat.dtype)))[None]


@functools.partial(jax.jit, static_argnums=2)
def _unravel(tree: Tree, sums: jax.Array, num_ranks: int) -> tuple[Tree, jax.Array]:
    """Return the arrays that sums ``(size + num_ranks,)`` have, and which ranks' ``(num_ranks,)`` were not finite."""
    _, unravel = ravel_pytree(tree)
    return unravel(sums[:-num_ranks]), sums[-num_ranks:] > 0


@functools.cache
def _sum(ranks: RankMesh) -> Callable[[jax.Array], jax.Array]:
    return ranks.compile(lambda own: psum(own[0]), SHARDED, REPLICATED)


@functools.cache
def _rows(ranks: RankMesh) -> Callable[[jax.Array], jax.Array]:
    return ranks.compile(lambda own: all_gather(own[0]), SHARDED, REPLICATED)
