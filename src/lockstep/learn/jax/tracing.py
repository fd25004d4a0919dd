"""Does an algorithm keep to its protocol? Asked while it is traced, so that its faults have names and cost nothing."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from lockstep.core.errors import UsageError
from lockstep.distributed.jax_collectives import differs
from lockstep.distributed.jax_placement import name_of
from lockstep.learn.jax.algorithm import Metrics, PyTree, TrainState


def require_pair(result: object, name: str) -> tuple[TrainState, Metrics]:
    """Return what ``step`` gives, if it is a state and metrics.

    Raises:
        UsageError: it is something else.
    """
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping):
        state, metrics = result
        return state, dict(metrics)
    raise UsageError(f"{name}() gives a {type(result).__name__}; it must give both a TrainState and a dict of metrics")


def require_state(state: TrainState, name: str) -> None:
    """Check what ``setup`` or ``step`` returns, inside ``shard_map``.

    Args:
        state: this rank's part.
        name: of the method, in messages.

    Raises:
        UsageError: it is no ``TrainState``, its replicated part differs from rank to rank, or a number is sharded.
    """
    if not isinstance(state, TrainState):
        raise UsageError(f"{name}() gives a {type(state).__name__}; it must give a TrainState(replicated, sharded)")
    for path, leaf in jax.tree_util.tree_leaves_with_path(TrainState(state.replicated, ())):
        if differs(leaf):
            raise UsageError(
                f"{name}() gives {name_of(path)} as each rank has it, not the same on all; reduce it, as "
                "with psum, pmean or gradient_update of lockstep.distributed.jax, or make it a part of sharded"
            )
    for path, leaf in jax.tree_util.tree_leaves_with_path(TrainState((), state.sharded)):
        if not jnp.shape(leaf):
            raise UsageError(f"{name}() gives {name_of(path)} as a number; it must lead with the envs of the rank")


def require_same(before: PyTree, after: PyTree, name: str) -> None:
    """Check that an iteration changes no structure, shape or dtype of the state, which is compiled once.

    Raises:
        UsageError: naming the first array that it changes.
    """
    structures: list[object] = [jax.tree.structure(tree) for tree in (before, after)]
    if structures[0] != structures[1]:
        old, new = (
            {name_of(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)} for tree in (before, after)
        )
        other = sorted(old ^ new)
        which = f": {other[0]} is only {'before' if other[0] in old else 'after'} it" if other else ""
        raise UsageError(f"{name}() gives a state of another structure than it takes{which}")
    for (path, old), new in zip(jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(after), strict=True):
        was, is_now = (f"{jnp.result_type(leaf)}{list(jnp.shape(leaf))}" for leaf in (old, new))
        if was != is_now:
            raise UsageError(f"{name}() makes {name_of(path)} {is_now} of {was}; keep its shape and give it a dtype")
