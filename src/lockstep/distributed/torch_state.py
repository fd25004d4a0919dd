"""State that all ranks hold in common: rank 0's, on every rank, bit for bit. Nothing travels pickled."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lockstep.core.errors import UsageError
from lockstep.core.types import Comm
from lockstep.distributed.torch_batch_norm import require_synchronised
from lockstep.distributed.torch_group import current
from lockstep.distributed.torch_listing import dtype_name, listing_of, require_same

_SCALARS = (bool, int, float, str, type(None))


@runtime_checkable
class Stateful(Protocol):
    """What gives and takes its state as nested dicts, as learning-rate schedules do."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Take up a state."""


Replicated: TypeAlias = nn.Module | torch.optim.Optimizer | torch.Tensor | Mapping[str, torch.Tensor] | Stateful
"""What ``broadcast_state`` takes."""


def broadcast_state(*objects: Replicated, comm: Comm | None = None) -> None:
    """Give every rank rank 0's state, bit for bit and in place; call it at the start and after every load.

    Every rank calls it with objects of the same kind. The tensors travel in one message, whatever their types, after a
    description of them; an optimizer's state may exist on rank 0 alone, as after a load or a step there. It does
    nothing without several ranks.

    Args:
        objects: modules (parameters and all buffers; one that is wrapped in DistributedDataParallel is fine),
            optimizers (state, and the numbers of their parameter groups such as the learning rate), tensors, mappings
            of tensors, and what else has ``state_dict`` and ``load_state_dict``, such as learning-rate schedules.
        comm: the ranks; None for the job's.

    Raises:
        UsageError: the objects differ in kind, name, shape or type between ranks (every rank raises the same line),
            one of them holds something that can't be sent, or a module has batch normalisation that is not synchronised
            (on several ranks).
    """
    broadcast_named(
        {f"object {place}": entry for place, entry in enumerate(objects)}, current() if comm is None else comm
    )


def broadcast_named(objects: Mapping[str, Replicated], comm: Comm) -> None:
    """Do what ``broadcast_state`` does, with the names that objects have in messages."""
    parts = [_part(entry, name) for name, entry in objects.items()]
    if comm.world_size == 1:
        return
    for name, entry in objects.items():
        if isinstance(entry, nn.Module):
            require_synchronised(entry, name, comm)
    require_same([line for part in parts for line in part.listing()], comm, "broadcast_state")
    common = [tensor for part in parts for tensor in part.tensors.values()]
    if all(part.read is None for part in parts):
        _broadcast(common, comm)
        return
    sent: list[torch.Tensor] = []
    text = comm.on_main(lambda: json.dumps([part.describe(sent) for part in parts]), "state")
    if comm.rank == 0:
        _broadcast(common + sent, comm)
        return
    built: list[torch.Tensor] = []
    states = [part.build(described, built) for part, described in zip(parts, json.loads(text), strict=True)]
    _broadcast(common + built, comm)
    for part, state in zip(parts, states, strict=True):  # only now is it complete
        part.write(state)


def broadcast_value(value: Any, *, comm: Comm | None = None) -> Any:
    """Return rank 0's value on every rank: a checkpoint that rank 0 alone can read, say.

    Args:
        value: on rank 0 tensors, numbers, texts and None in any nest of dicts, lists and tuples; on the other ranks it
            is ignored. Tensors arrive bit for bit, on the kind of device (CPU or GPU) that they have on rank 0.
        comm: the ranks; None for the job's.

    Raises:
        UsageError: there is something else in the value; it is named.
    """
    comm = current() if comm is None else comm
    if comm.world_size == 1:
        return value
    sent: list[torch.Tensor] = []
    described = json.loads(comm.on_main(lambda: json.dumps(_describe(value, "value", sent)), "value"))
    if comm.rank == 0:
        _broadcast(sent, comm)
        return value
    built: list[torch.Tensor] = []
    received = _build(described, None, built)
    _broadcast(built, comm)
    return received


def require_plain(value: Any, name: str) -> None:
    """Raise UsageError, naming the place, if a value is not made of tensors, numbers, texts, dicts, lists and tuples.

    Such a value can be sent to other ranks, and written to a checkpoint that is read back safely.
    """
    _describe(value, name, [])


def tensors_of(objects: Mapping[str, Replicated]) -> dict[str, torch.Tensor]:
    """Return by name every tensor and every number of some objects, what the sentinel compares.

    Tensors are the objects' own; numbers come as float64 tensors, texts not at all.
    """
    found: dict[str, torch.Tensor] = {}
    for name, entry in objects.items():
        part = _part(entry, name)
        found |= part.tensors
        if part.read is not None:
            found |= dict(_flatten(part.read(), name))
    return found


# --- one object ------------------------------------------------------------------------------------------------------


@dataclass
class _Part:
    """One object, as it is sent.

    Args:
        name: for messages, with the kind of object.
        tensors: by name, those that it has on every rank, to be overwritten.
        read: gives the rest of its state, which may exist on one rank and not on another; None if there is no rest.
        write: takes up such a state.
        layouts: by name, what all ranks have alike and the entries of that name in the rest belong to: new tensors of
            the same shape get its device and strides.
    """

    name: str
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    read: Callable[[], dict[str, Any]] | None = None
    write: Callable[[dict[str, Any]], Any] = lambda state: None
    layouts: dict[str, torch.Tensor] = field(default_factory=dict)

    def listing(self) -> list[str]:
        """Return a line ``name, tab, kind`` for everything that must be alike on all ranks."""
        return [f"{self.name}\t", *listing_of(self.tensors | self.layouts)]

    def describe(self, sent: list[torch.Tensor]) -> Any:
        return None if self.read is None else _describe(self.read(), self.name, sent)

    def build(self, described: Any, built: list[torch.Tensor]) -> dict[str, Any]:
        if self.read is None:
            return {}
        own = self.read()
        return {name: _build(inner, own.get(name), built, self.layouts.get(name)) for name, inner in described["dict"]}


def _part(entry: Any, name: str) -> _Part:
    titled = f"{name} {type(entry).__name__}"
    if isinstance(entry, nn.Module):
        # Not state_dict, which leaves out the buffers that are not saved.
        tensors = {f"{name}.{path}": tensor for path, tensor in [*entry.named_parameters(), *entry.named_buffers()]}
        for path, tensor in tensors.items():
            if is_lazy(tensor):
                raise UsageError(f"{path} has no shape yet; run the module once before its state is sent")
        return _Part(titled, tensors)
    if isinstance(entry, torch.optim.Optimizer):
        return _part_of_optimizer(entry, name, titled)
    if isinstance(entry, torch.Tensor):
        return _Part(titled, {name: entry})
    if isinstance(entry, Mapping):
        for key, value in entry.items():
            if not isinstance(value, torch.Tensor):
                raise UsageError(
                    f"{name}[{key!r}] is no tensor that could be overwritten; give tensors, or use broadcast_value"
                )
        return _Part(titled, {f"{name}[{key!r}]": tensor for key, tensor in entry.items()})
    if isinstance(entry, Stateful):
        return _Part(titled, {}, entry.state_dict, entry.load_state_dict)
    raise UsageError(
        f"broadcast_state can't send {name}, a {type(entry).__name__}; it takes modules, optimizers, tensors, mappings "
        "of tensors, and what has state_dict and load_state_dict"
    )


def _part_of_optimizer(optimizer: torch.optim.Optimizer, name: str, titled: str) -> _Part:
    groups = {f"{name} group {number}": group for number, group in enumerate(optimizer.param_groups)}
    parameters = {
        f"{group_name} parameter {place}": parameter
        for group_name, group in groups.items()
        for place, parameter in enumerate(group["params"])
    }

    def read() -> dict[str, dict[str, Any]]:
        state = {path: dict(optimizer.state.get(parameter, {})) for path, parameter in parameters.items()}
        numbers = {path: {key: group[key] for key in group if key != "params"} for path, group in groups.items()}
        return state | numbers

    def write(state: dict[str, dict[str, Any]]) -> None:
        for path, parameter in parameters.items():
            optimizer.state.pop(parameter, None)
            if state[path]:
                optimizer.state[parameter] = state[path]
        for path, group in groups.items():
            for key in group.keys() - state[path].keys() - {"params"}:
                del group[key]
            group.update(state[path])

    return _Part(titled, {}, read, write, parameters)


# --- nests of tensors and plain values -------------------------------------------------------------------------------


def _describe(value: Any, name: str, tensors: list[torch.Tensor]) -> Any:
    """Return a value as JSON that has all but the tensors' contents; the tensors are appended in order."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return {"tensor": [dtype_name(value.dtype), list(value.shape), value.device.type]}
    if isinstance(value, numpy.generic):
        value = value.item()
    if isinstance(value, _SCALARS):
        return {"value": value}
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, _SCALARS):
                raise UsageError(f"{name} has the key {key!r}; keys must be texts or numbers")
        return {"dict": [[key, _describe(inner, f"{name}.{key}", tensors)] for key, inner in value.items()]}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_describe(inner, f"{name}.{place}", tensors) for place, inner in enumerate(value)]}
    raise UsageError(
        f"{name} is a {type(value).__name__}, which is neither saved nor sent to other ranks; use tensors, numbers, "
        "texts, dicts, lists and tuples"
    )


def _build(described: Any, own: Any, built: list[torch.Tensor], layout: torch.Tensor | None = None) -> Any:
    """Return what ``_describe`` described, with tensors still to be filled, which are appended in order.

    Args:
        described: as JSON gave it.
        own: what this rank has in its place; its tensors are used again where they fit.
        built: is appended to.
        layout: what new tensors of its shape should be like.
    """
    ((kind, content),) = described.items()
    if kind == "value":
        return content
    if kind == "tensor":
        built.append(_room_for(content, own, layout))
        return built[-1]
    if kind == "dict":
        mapping = own if isinstance(own, Mapping) else {}
        return {key: _build(inner, mapping.get(key), built, layout) for key, inner in content}
    sequence = own if isinstance(own, list | tuple) and len(own) == len(content) else [None] * len(content)
    entries = [_build(inner, each, built, layout) for inner, each in zip(content, sequence, strict=True)]
    return entries if kind == "list" else tuple(entries)


def _room_for(content: Any, own: Any, layout: torch.Tensor | None) -> torch.Tensor:
    dtype_name, shape, device = content
    dtype: torch.dtype = getattr(torch, dtype_name)
    if isinstance(own, torch.Tensor) and (own.dtype, list(own.shape), own.device.type) == (dtype, shape, device):
        return own
    if layout is None or layout.device.type != device:
        here = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device(device)
        return torch.empty(shape, dtype=dtype, device=here)
    if list(layout.shape) == shape:
        return torch.empty_like(layout, dtype=dtype, requires_grad=False)
    return torch.empty(shape, dtype=dtype, device=layout.device)


def _flatten(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, bool | int | float):
        yield name, torch.tensor(value, dtype=torch.float64)
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flatten(inner, f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for place, inner in enumerate(value):
            yield from _flatten(inner, f"{name}.{place}")


def _broadcast(tensors: list[torch.Tensor], comm: Comm) -> None:
    if tensors:
        comm.broadcast_({str(place): tensor for place, tensor in enumerate(tensors)}, "state")
