"""One update of parameters from the gradients of all ranks, for training loops of one's own."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree

from lockstep.distributed.jax_collectives import AXIS_NAME, AxisName, Tree, differing_axes, local_parameters, psum


def gradient_update(
    loss_fn: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    axis_name: AxisName = AXIS_NAME,
    max_grad_norm: float | None = None,
    has_aux: bool = False,
) -> Callable[..., tuple[Any, Tree, Tree]]:
    """Return ``update(params, opt_state, *args, num_samples=None) -> (value, params, opt_state)``.

    It takes the gradient of the loss on this rank's own samples, averages it over ranks (one sum of one flat vector),
    clips it by its global norm after that, and applies it. The result is the same on every rank, and the same whether
    ``jax.shard_map`` has ``check_vma`` on or off; without an axis it is that of one rank.

    Args:
        loss_fn: ``loss_fn(params, *args)`` returns this rank's mean loss, a float ``()``, or with ``has_aux`` the pair
            of it and anything else. Gradients must not pass through collectives in it.
        optimizer: of optax; its state ``opt_state`` and ``params`` are the same on every rank.
        axis_name: of the ranks' axis; names of all axes that samples are split over, if there are several.
        max_grad_norm: of the averaged gradient; None does not clip.
        has_aux: see ``loss_fn``.

    ``value`` is the loss averaged over ranks, ``()``, or with ``has_aux`` the pair of it and this rank's own extra.
    ``num_samples``, ``()``, is over how many samples ``loss_fn`` has averaged: ranks then count in proportion, and a
    rank without samples not at all, whatever its loss; if no rank has any, the gradient is zero. None counts every rank
    the same.

    Raises:
        ValueError: ``max_grad_norm`` is not above 0; or, while it is traced, the loss differs over an axis that is not
            in ``axis_name``, and the parameters don't, so that the gradient would come summed over it.
    """
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise ValueError(f"max_grad_norm is {max_grad_norm}; it must be above 0, or None not to clip")
    clip = optax.identity() if max_grad_norm is None else optax.clip_by_global_norm(max_grad_norm)

    def update(
        params: Tree, opt_state: Tree, *args: Any, num_samples: jax.Array | int | None = None
    ) -> tuple[Any, Tree, Tree]:
        value, gradients = jax.value_and_grad(loss_fn, has_aux=has_aux)(local_parameters(params, axis_name), *args)
        loss, extra = value if has_aux else (value, None)
        _require_all_axes(params, loss, axis_name)
        loss, gradients = _mean_over_ranks((loss, gradients), num_samples, axis_name)
        gradients, _ = clip.update(gradients, clip.init(params))
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return (loss, extra) if has_aux else loss, optax.apply_updates(params, updates), opt_state

    return update


def _require_all_axes(params: Tree, loss: jax.Array, axis_name: AxisName) -> None:
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    summed = differing_axes(loss) - differing_axes(params) - {*names}
    if summed:
        every = (*filter(None, names), *sorted(summed))
        mend = every[0] if len(every) == 1 else every
        raise ValueError(
            f"gradient_update averages over axis_name {axis_name!r}, but the loss differs over {sorted(summed)} too, "
            f"where JAX would sum the gradient; give it axis_name={mend!r}, or "
            "local_parameters(params, ...) of the axes over which parameters are to differ"
        )


def _mean_over_ranks(tree: Tree, num_samples: jax.Array | int | None, axis_name: AxisName) -> Tree:
    flat, unravel = ravel_pytree(tree)
    # Never summed in half precision.
    wide = flat.astype(jnp.promote_types(flat.dtype, jnp.float32))
    weight = jnp.asarray(1 if num_samples is None else num_samples, wide.dtype)
    weighted = jnp.where(weight > 0, wide * weight, 0)  # a loss without samples is 0/0
    sums = psum(jnp.append(weighted, weight), axis_name)
    return unravel((sums[:-1] / jnp.where(sums[-1] > 0, sums[-1], 1)).astype(flat.dtype))
