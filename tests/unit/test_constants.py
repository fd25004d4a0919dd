"""Constants of tasks: of the caller's framework, dtype and device, made once, and fit for gradients."""

from typing import Any

import array_api_compat.numpy
import array_api_compat.torch
import numpy as np
import pytest
import torch

from lockstep.core.constants import constant

VALUES = (0.1, -2.5, 3.0)
KINDS = [
    (array_api_compat.numpy, np.zeros(1, np.float32)),
    (array_api_compat.numpy, np.zeros(1)),
    (array_api_compat.torch, torch.zeros(1)),
    (array_api_compat.torch, torch.zeros(1, dtype=torch.float64)),
]


@pytest.mark.parametrize(("xp", "like"), KINDS, ids=lambda each: str(getattr(each, "dtype", "")))
def test_it_is_like_the_callers_arrays_and_made_once(xp: Any, like: Any) -> None:
    made = constant(xp, VALUES, like)
    assert (type(made), made.dtype, made.device) == (type(like), like.dtype, like.device)
    np.testing.assert_array_equal(np.asarray(made), np.asarray(VALUES, np.asarray(like).dtype))
    assert constant(xp, VALUES, like) is made


def test_it_may_be_part_of_a_gradient_whoever_asked_first() -> None:
    like = torch.ones(3)
    with torch.inference_mode():
        constant(array_api_compat.torch, (4.0, 5.0, 6.0), like)
    factor = torch.ones(3, requires_grad=True)
    (factor * constant(array_api_compat.torch, (4.0, 5.0, 6.0), like)).sum().backward()
    assert factor.grad is not None
    assert factor.grad.tolist() == [4.0, 5.0, 6.0]


def test_jax_may_trace_it_twice() -> None:
    jax = pytest.importorskip("jax")

    def scaled(array: Any) -> Any:
        return array * constant(jax.numpy, VALUES, array)

    for dtype in ("float32", "float16"):
        for trace in (jax.jit(scaled), jax.jit(lambda array: scaled(array))):
            found = trace(jax.numpy.ones(3, dtype))
            assert str(found.dtype) == dtype
            np.testing.assert_allclose(found, VALUES, rtol=1e-3)
