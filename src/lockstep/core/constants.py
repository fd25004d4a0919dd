"""A task's constants as arrays of any framework."""

from functools import cache
from typing import Any

import numpy
from array_api_compat import is_jax_namespace, is_torch_namespace

from lockstep.core.types import Array, Namespace


def constant(xp: Namespace, values: tuple[float, ...], like: Array) -> Array:
    """Return values as an array ``(len(values),)`` of the dtype and on the device of ``like``; not to be written to.

    It is made once, since to bring it to a GPU in every step would wait for the GPU.
    """
    if is_jax_namespace(xp):
        return numpy.asarray(values, dtype=like.dtype)  # an array that JAX makes must not outlive its trace
    return _make(xp, values, like.dtype, like.device)


@cache
def _make(xp: Namespace, values: tuple[float, ...], dtype: Any, device: Any) -> Array:
    if not is_torch_namespace(xp):
        return xp.asarray(values, dtype=dtype, device=device)
    with xp.inference_mode(False):  # what is made in that mode can be part of no gradient later
        return xp.asarray(values, dtype=dtype, device=device)
