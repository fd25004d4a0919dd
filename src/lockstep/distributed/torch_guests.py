"""Other people's learners on the job's process group: they find it joined, and what they exchange is watched."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist

from lockstep.core.types import Comm
from lockstep.distributed.torch_comm import GroupComm

_EXCHANGES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "reduce",
    "reduce_scatter_tensor",
    "scatter",
)
"""Of ``torch.distributed``: what the libraries call."""


@contextmanager
def guest_group(comm: Comm) -> Iterator[None]:
    """Return the context in which a library is imported, built and run that would make a process group of its own.

    While it lasts ``torch.distributed.init_process_group`` finds the job's group, whatever backend it asks for, and
    ``torch.cuda.set_device`` keeps this rank's only GPU, which is number 0 here and not the number of the rank. What
    is exchanged beside ``comm`` counts as a wait (``take_waits``), is told to the watchers, and a rank that is lost in
    it is told in words. None of it concerns the library's own modules: it calls torch, as it always does.

    Without several ranks nothing changes.
    """
    if not isinstance(comm, GroupComm):
        yield
        return
    with ExitStack() as changes:
        for name in _EXCHANGES:
            _put(dist, name, _watched(getattr(dist, name), comm), changes)
        for module, name in ((dist, "init_process_group"), (dist, "destroy_process_group"), (torch.cuda, "set_device")):
            _put(module, name, _done_already, changes)
        yield


def _put(module: Any, name: str, function: Callable[..., Any], changes: ExitStack) -> None:
    """Have a module give another function under a name, until ``changes`` end."""
    changes.callback(setattr, module, name, getattr(module, name))
    setattr(module, name, function)


def _done_already(*arguments: Any, **named: Any) -> None:
    pass


def _watched(exchange: Callable[..., Any], comm: GroupComm) -> Callable[..., Any]:
    """Return an exchange of torch that is counted among those of ``comm``."""
    signature = inspect.signature(exchange)

    @wraps(exchange)
    def watched(*arguments: Any, **named: Any) -> Any:
        given = signature.bind_partial(*arguments, **named).arguments
        if given.get("async_op"):
            return exchange(*arguments, **named)
        tensors = [value for value in given.values() if isinstance(value, torch.Tensor)]
        with comm.collectives.watching(exchange.__name__, sum(tensor.nbytes for tensor in tensors)):
            return exchange(*arguments, **named)

    return watched
