"""Programs of other people's code, traced and lowered on their own, so that they are what they are without ours."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
from jax.extend.core import subjaxprs


def plain_precision() -> AbstractContextManager[Any]:
    """Return a context in which JAX has no types of 64 bits, as its users find it."""
    context: AbstractContextManager[Any] = jax.enable_x64(False)
    return context


class SealedProgram:
    """A function of arrays that lead with envs, in a precision of its own.

    A session counts and sums in 64 bits, and code of others would compute in them wherever it says no type: another
    program than its authors have tried. And ``jax.shard_map`` need not know of loops in it, which begin with constants
    and go on with what differs from rank to rank. It may be called under ``jax.jit``, ``jax.vmap`` and
    ``jax.shard_map``; a batch of each size is traced once.

    Args:
        function: of arrays ``(num_envs, ...)`` or trees of them; returns the same.
        precision: makes a context in which it is traced; arguments and results have types that there are there.
    """

    def __init__(
        self, function: Callable[..., Any], precision: Callable[[], AbstractContextManager[Any]] = plain_precision
    ) -> None:
        self._function, self._precision = function, precision
        self._exported: dict[Any, jax.export.Exported] = {}

    def __call__(self, *arguments: Any) -> Any:
        """Return what the function does."""

        @jax.custom_batching.custom_vmap
        def run(*arguments: Any) -> Any:
            return self._export(arguments).call(*arguments)

        @run.def_vmap
        def run_batches(num_batches: int, is_batched: Any, *batches: Any) -> tuple[Any, Any]:
            """Run batches ``(num_batches, num_envs, ...)`` as one."""

            def merge(is_batched: bool, array: jax.Array) -> jax.Array:
                array = array if is_batched else jnp.broadcast_to(array, (num_batches, *array.shape))
                return array.reshape(num_batches * array.shape[1], *array.shape[2:])

            results = self(*jax.tree.map(merge, tuple(is_batched), batches))

            def split(rows: jax.Array) -> jax.Array:
                return rows.reshape(num_batches, rows.shape[0] // num_batches, *rows.shape[1:])

            return jax.tree.map(split, results), jax.tree.map(lambda _: True, results)

        return run(*arguments)

    def _export(self, arguments: Any) -> jax.export.Exported:
        shapes = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), arguments)
        leaves, structure = jax.tree.flatten(shapes)
        key = (structure, tuple((leaf.shape, str(leaf.dtype)) for leaf in leaves))
        if key not in self._exported:
            with self._precision():
                jitted = jax.jit(self._run_strongly)
                targets = sorted(set(_foreign_targets(jitted.trace(*shapes).jaxpr.jaxpr)))
                # What a program calls outside of JAX need not be there in another process.
                checks = [jax.export.DisabledSafetyCheck.custom_call(target) for target in targets]
                self._exported[key] = jax.export.export(jitted, disabled_checks=checks)(*shapes)
        return self._exported[key]

    def _run_strongly(self, *arguments: Any) -> Any:
        """Call the function; what it has of Python's own numbers would become 64 bits wide outside."""
        results = self._function(*arguments)
        return jax.tree.map(lambda array: jax.lax.convert_element_type(array, jnp.asarray(array).dtype), results)


def _foreign_targets(jaxpr: Any) -> Iterator[str]:
    """Yield the names of all functions outside of JAX that a program calls."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "ffi_call":
            yield equation.params["target_name"]
    for inner in subjaxprs(jaxpr):
        yield from _foreign_targets(inner)
