"""Counting what an iteration of a torch side does."""

from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode
from workload import Side


def work_of_iteration(side: Side, parameters: Iterable[torch.Tensor]) -> dict[str, Any]:
    """Let a side run its first iteration; return what ``Side.first_iteration`` does. Nothing may be compiled."""
    gflops = matrix_gflops(lambda: side.iterate(1))
    return {
        "matrix_gflops": gflops,
        "optimizer_steps": side.num_optimizer_steps(),
        "env_steps": side.num_env_steps(),
        "parameters": sum(parameter.numel() for parameter in parameters),
    }


def matrix_gflops(iterate: Callable[[], Any]) -> float:
    """Run something; return the arithmetic of its matrix products, backward passes included.

    What is compiled is not seen.
    """
    own = {}
    if hasattr(torch.ops.mkldnn, "_linear_pointwise"):  # a product that torch's counter does not know
        own[torch.ops.mkldnn._linear_pointwise] = _linear_flops
    with FlopCounterMode(display=False, custom_mapping=own) as counter:
        iterate()
    return counter.get_total_flops() / 1e9


def trained(optimizer: torch.optim.Optimizer) -> Iterable[torch.Tensor]:
    """Return the parameters of an optimizer."""
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def num_steps(optimizer: torch.optim.Optimizer) -> int:
    """Return how many steps an optimizer like Adam has taken since it was made."""
    return int(next(iter(optimizer.state.values()))["step"])


def _linear_flops(inputs: Sequence[int], weight: Sequence[int], *_: Any, **__: Any) -> int:
    return 2 * prod(inputs) * weight[0]
