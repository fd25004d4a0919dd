"""Counting what an iteration of a JAX side does."""

import math
from collections.abc import Iterator
from typing import Any


def matrix_gflops(jaxpr: Any) -> float:
    """Return the arithmetic of the matrix products in a program: loops as often as they run, branches the longest."""
    return _flops(jaxpr) / 1e9


def _flops(jaxpr: Any) -> int:
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            ((contracted, _), _) = equation.params["dimension_numbers"]
            (left, _), (out,) = equation.invars, equation.outvars
            total += 2 * math.prod(out.aval.shape) * math.prod(left.aval.shape[axis] for axis in contracted)
            continue
        inner = [_flops(body) for body in _bodies(equation)]
        if equation.primitive.name == "cond":
            total += max(inner, default=0)
        else:
            total += sum(inner) * equation.params.get("length", 1)
    return total


def _bodies(equation: Any) -> Iterator[Any]:
    for value in equation.params.values():
        for each in value if isinstance(value, tuple | list) else (value,):
            if hasattr(each, "eqns"):
                yield each
            elif hasattr(each, "jaxpr") and hasattr(each.jaxpr, "eqns"):
                yield each.jaxpr
