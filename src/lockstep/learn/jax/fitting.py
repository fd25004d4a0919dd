"""Does what a checkpoint holds fit an algorithm, and what of it are the weights? Called on process 0, on the host."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy

from lockstep.core.errors import UsageError
from lockstep.learn.config import TrainConfig
from lockstep.learn.jax.algorithm import Algorithm, HasWeights, PyTree, TrainState
from lockstep.learn.jax.nests import flatten, to_nest
from lockstep.learn.resuming import (
    incomplete_in_words,
    require_iterations,
    require_like,
    require_num_envs,
    require_num_models,
    require_parts,
    require_settings,
    require_task,
    require_weights,
)

_KEPT_SETTINGS = ("seed", "dtype", "algorithm", "agent.init_std")


def names_of_weights(algorithm: Algorithm, replicated: PyTree) -> list[str]:
    """Return the names that an algorithm's weights have in the replicated state; none if it tells of no weights.

    Args:
        algorithm: whose state it is.
        replicated: its state, or a tree of that structure with one object for each array.
    """
    return jax.tree.leaves(_tree_of_names(algorithm, replicated)) if isinstance(algorithm, HasWeights) else []


def weights_from(by_name: Mapping[str, numpy.ndarray], algorithm: HasWeights, replicated: PyTree) -> PyTree:
    """Return arrays by name as the tree that the algorithm's ``with_weights`` takes."""
    return jax.tree.map(lambda name: by_name[name], _tree_of_names(algorithm, replicated))


def require_fitting_weights(
    saved: Mapping[str, Any], algorithm: HasWeights, expected: PyTree, config: TrainConfig, path: object
) -> dict[str, numpy.ndarray]:
    """Return the weights of a checkpoint by name, in the dtypes that the run has them in.

    Args:
        saved: the checkpoint's content.
        algorithm: that takes them up.
        expected: shapes and dtypes of its replicated state.
        config: of the run that begins.
        path: of the checkpoint.

    Raises:
        UsageError: of another task, or not those of this algorithm with these settings.
    """
    with incomplete_in_words(path):
        require_task(saved, config.task, path)
        shapes = flatten(to_nest(expected))
        own = {name: shapes[name] for name in jax.tree.leaves(_tree_of_names(algorithm, expected))}
        arrays = flatten(saved["replicated"])
        found = {name: arrays[name] for name in saved["weights"]}
        require_weights(found, own, _is_finite, path)
        return {name: found[name].astype(own[name].dtype) for name in own}


def require_fitting(
    saved: Mapping[str, Any],
    algorithm: Algorithm,
    shapes: TrainState,
    total_envs: int,
    num_models: int,
    config: TrainConfig,
    path: object,
) -> None:
    """Check that a run can go on from a checkpoint's content.

    Args:
        saved: the content.
        algorithm: that goes on.
        shapes: shapes and dtypes of its global state, padding included.
        total_envs: envs of the run.
        num_models: variants of the task's model.
        config: of the run.
        path: of the checkpoint.

    Raises:
        UsageError: it does not fit; the line says what.
    """
    with incomplete_in_words(path):
        require_task(saved, config.task, path)
        require_parts(saved, ("replicated", "sharded", "wall_s"), path)
        now = config.model_dump(mode="json")
        require_settings(saved["config"], now, [name for name in _KEPT_SETTINGS if _has(now, name)], path)
        require_num_models(saved, num_models, path)
        if isinstance(algorithm, HasWeights):
            require_fitting_weights(saved, algorithm, shapes.replicated, config, path)
        for array in list(flatten(saved["sharded"]).values())[:1]:
            require_num_envs(array.shape[0], total_envs, path)
        rows = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((total_envs, *leaf.shape[1:]), leaf.dtype), shapes.sharded
        )
        for name, expected in (("replicated", to_nest(shapes.replicated)), ("sharded", to_nest(rows))):
            require_like(saved[name], expected, path, name)
            foreign = sorted(flatten(saved[name], name).keys() - flatten(expected, name).keys())
            if foreign:
                raise UsageError(
                    f"checkpoint {path} has {foreign[0]}, which the config has no place for; use its agent settings"
                )
        require_iterations(saved["iteration"], config.max_iterations, path)


def _tree_of_names(algorithm: HasWeights, replicated: PyTree) -> PyTree:
    """Return the algorithm's weights with, in the place of each array, its name in the replicated state."""
    names = {id(leaf): name for name, leaf in flatten(to_nest(replicated)).items()}
    weights = algorithm.weights(replicated)
    if any(id(leaf) not in names for leaf in jax.tree.leaves(weights)):
        raise UsageError(
            f"weights() of {type(algorithm).__name__} gives something that is no array of the replicated state; it "
            "must select from it and compute nothing"
        )
    return jax.tree.map(lambda leaf: names[id(leaf)], weights)


def _has(config: Mapping[str, Any], name: str) -> bool:
    *group, field = name.split(".")
    return field in (config[group[0]] if group else config)


def _is_finite(value: Any) -> bool:
    return isinstance(value, numpy.ndarray) and bool(numpy.isfinite(value).all())
