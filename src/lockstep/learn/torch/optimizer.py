"""Adam without torch's compiler, which the methods of torch's own load when first called: a second of every start."""

from collections.abc import Callable
from typing import Any

import torch


def _plain(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method without what torch has put around it for whoever compiles a call of it; nobody does here."""
    inner: Callable[..., Any] = getattr(method, "__wrapped__", method)
    return inner


class Adam(torch.optim.Adam):
    """Adam (Kingma and Ba 2015, arXiv:1412.6980) as torch has it, with the same arguments and the same results."""

    add_param_group = _plain(torch.optim.Optimizer.add_param_group)
    zero_grad = _plain(torch.optim.Optimizer.zero_grad)
    state_dict = _plain(torch.optim.Optimizer.state_dict)
    load_state_dict = _plain(torch.optim.Optimizer.load_state_dict)
    step = torch.no_grad()(_plain(torch.optim.Adam.step))
