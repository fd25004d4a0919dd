"""A pool of variants of one model as MJX has it: what they share once, and what differs once for each variant."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
from mujoco import mjx
from numpy.typing import NDArray

from lockstep.core.types import Array


class ModelPool:
    """Variants of a model, from which a program picks one for each env.

    Args:
        models: the variants, one at least; sizes are alike.
        put: makes MJX's model of one of them, with numpy arrays.

    Raises:
        NotImplementedError: they differ in what MJX compiles into a program or in where MuJoCo's defaults are.
        ValueError: they differ in their sizes.
    """

    def __init__(self, models: Sequence[mujoco.MjModel], put: Callable[[mujoco.MjModel], mjx.Model]) -> None:
        first, *others = models
        self.size = len(models)
        self.model: mjx.Model = put(first)
        """The first variant."""
        flat, self._structure = jax.tree.flatten_with_path(self.model)
        self._leaves: list[NDArray[Any]] = [leaf for _, leaf in flat]
        columns = [[leaf] for leaf in self._leaves]
        for other in others:
            variant = put(other)
            names = [*_defaults_that_differ(first, other), *_constants_that_differ(self.model, variant)]
            if names:
                raise NotImplementedError(f"its variants differ in {', '.join(names)}, which must be the same in all")
            for column, leaf in zip(columns, jax.tree.leaves(variant), strict=True):
                column.append(leaf)
        differing = [index for index, column in enumerate(columns) if _differ(column)]
        self._stacked = {index: np.stack(columns[index]) for index in differing}
        """Leaf to its values ``(num_models, ...)``, for the leaves that are not the same in all."""
        self.varied = [flat[index][0] for index in differing]
        """What differs: the paths of those leaves in ``mjx.Model``."""

    def pick(self, index: Array | None) -> mjx.Model:
        """Return variant ``index ()``, an int32 that JAX may be tracing or batching; None for the only one.

        What all variants share, and the tables of what differs, are constants of the program.
        """
        leaves = [jnp.asarray(leaf) for leaf in self._leaves]
        for number, values in self._stacked.items():
            leaves[number] = jax.lax.dynamic_index_in_dim(jnp.asarray(values), index, keepdims=False)
        picked: mjx.Model = jax.tree.unflatten(self._structure, leaves)
        return picked


def _differ(column: list[NDArray[Any]]) -> bool:
    return any(not np.array_equal(leaf, column[0]) for leaf in column)


def _defaults_that_differ(one: mujoco.MjModel, other: mujoco.MjModel) -> Iterator[str]:
    """Yield what a state would begin with: that of MJX begins alike for all."""
    is_mocap = one.body_mocapid >= 0
    for name in ("body_pos", "body_quat"):
        if not np.array_equal(getattr(one, name)[is_mocap], getattr(other, name)[is_mocap]):
            yield f"{name} of mocap bodies"


def _constants_that_differ(one: Any, other: Any) -> Iterator[str]:
    """Yield the fields of ``mjx.Model`` that are no arrays of JAX: a program is made for their values."""
    for field in dataclasses.fields(one) if _differ_in_constants(one, other) else ():
        value = getattr(other, field.name)
        if _differ_in_constants(one, one.replace(**{field.name: value})):
            is_nested = dataclasses.is_dataclass(value)
            yield from _constants_that_differ(getattr(one, field.name), value) if is_nested else [field.name]


def _differ_in_constants(one: Any, other: Any) -> bool:
    structures: list[Any] = [jax.tree.structure(one), jax.tree.structure(other)]
    return bool(structures[0] != structures[1])
