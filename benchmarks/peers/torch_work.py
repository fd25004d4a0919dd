"""Counting what an iteration of a torch side does."""

from collections.abc import Callable
from typing import Any

from torch.utils.flop_counter import FlopCounterMode


def matrix_gflops(iterate: Callable[[], Any]) -> float:
    """Run one iteration; return the arithmetic of its matrix products, backward passes included."""
    with FlopCounterMode(display=False) as counter:
        iterate()
    return counter.get_total_flops() / 1e9
