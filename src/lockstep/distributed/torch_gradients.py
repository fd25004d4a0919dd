"""Gradients for a training loop of your own: averaged over the samples of all ranks at every update.

Called by all ranks, in the same order. With several ranks ``lockstep.init()`` (or ``setup``) comes first; without a
group it is what one rank alone amounts to.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch
from torch import nn

from lockstep.core.errors import RunError, UsageError
from lockstep.core.types import Comm
from lockstep.distributed.torch_batch_norm import require_synchronised
from lockstep.distributed.torch_group import current
from lockstep.distributed.torch_listing import listing_of, require_same
from lockstep.distributed.torch_statistics import Number
from lockstep.distributed.wording import name_ranks

_agreed: WeakKeyDictionary[Comm, set[str]] = WeakKeyDictionary()
"""By communicator, the listings of parameters that all ranks were found to have."""


class AveragedGradients:
    """What ``average_gradients`` found out. Nothing waits for a GPU until something is asked.

    Attributes:
        num_samples: ``()`` samples of all ranks together.
        nonfinite: ``(world_size,)`` booleans: which ranks had gradients with a NaN or an infinity. The same on all
            ranks; where one is true, the averages are of no use anywhere.
    """

    def __init__(self, num_samples: torch.Tensor, nonfinite: torch.Tensor) -> None:
        self.num_samples, self.nonfinite = num_samples, nonfinite

    def are_finite(self) -> bool:
        """Return whether all ranks' gradients were finite; if not, every rank should skip its optimizer step."""
        return not self.nonfinite_ranks()

    def nonfinite_ranks(self) -> list[int]:
        """Return the ranks whose gradients were not finite."""
        return [rank for rank, flag in enumerate(self.nonfinite.tolist()) if flag]

    def require_finite(self) -> None:
        """Raise RunError, naming the ranks, if any gradients were not finite; every rank raises the same."""
        ranks = self.nonfinite_ranks()
        if ranks:
            raise RunError(
                f"gradients of {name_ranks(ranks)} (of {len(self.nonfinite)}) are not finite; look at the losses "
                "there, or use a smaller learning rate",
                shared=True,
            )


@torch.no_grad()
def average_gradients(
    module_or_parameters: nn.Module | Iterable[nn.Module | nn.Parameter],
    num_samples: Number,
    *,
    comm: Comm | None = None,
) -> AveragedGradients:
    """Make every ``.grad`` the mean over the samples of all ranks; clip afterwards, then step the optimizer.

    Call it after ``backward`` of a loss that is the *mean* over this rank's samples. Ranks may have different numbers
    of them, or none: each counts by its samples, so the result is that of one process with all of them. One exchange,
    and nothing waits for a GPU unless a gradient is missing on this rank. A process alone keeps its gradients bit for
    bit.

    The first call with a list of parameters makes one more exchange, which compares their names, types and shapes over
    ranks; later calls with it compare nothing. So a difference is found, and named, only where the lists are new to all
    ranks. Ranks must make their calls in the same order. Where they do not, and rank 0 averages the actor once more
    while rank 1 comes with the critic for the first time, they wait in different exchanges until LOCKSTEP_TIMEOUT_S
    ends the job; two lists that both ranks know are summed as if they were one. LOCKSTEP_DEBUG_COLLECTIVES=1 stops
    where exchanges differ in kind or size; of two networks of the same build only the sentinel tells.

    A gradient that is missing here counts as zeros; if another rank has it, it is made here too. One that no rank has
    stays missing. Gradients keep their own types and strides; sums are float32, float64 if a parameter is.

    A module inside DistributedDataParallel has averaged its gradients in ``backward`` already, each rank counting the
    same; averaging equal gradients again leaves them as they are. Where ranks have different numbers of samples, leave
    that wrapper off, or run ``backward`` under its ``no_sync()``.

    Args:
        module_or_parameters: whose gradients; a module, or any number of modules and parameters, those of several
            optimizers for instance. Those that need no gradient are left out.
        num_samples: of this rank: a number or a tensor ``()``, 0 or more.
        comm: the ranks; None for the job's.

    Returns:
        Whether all ranks' gradients were finite, and which ranks' were not.

    Raises:
        UsageError: no parameter needs a gradient, a gradient is sparse, the parameters differ between ranks, or on
            several ranks a module has batch normalisation that is not synchronised.
    """
    comm = current() if comm is None else comm
    given = [module_or_parameters] if isinstance(module_or_parameters, nn.Module) else list(module_or_parameters)
    named = _trainable(given)
    parameters = list(named.values())
    dtype = torch.float64 if any(parameter.dtype == torch.float64 for parameter in parameters) else torch.float32
    count = _on_device(num_samples, dtype, parameters[0].device)
    own = torch.cat([_flat_gradient(parameter, name, count) for name, parameter in named.items()])
    if comm.world_size == 1:
        return AveragedGradients(count.reshape(()), ~torch.isfinite(own).all().reshape(1))
    _require_in_step(given, named, comm)
    # A mean over no samples is no number; it has no say.
    sums = torch.where(count > 0, own * count, torch.zeros_like(own))
    present = _have_gradients(parameters, sums)
    message = _Message(torch.cat((sums, present, count, sums.new_zeros(comm.world_size))), len(sums), len(present))
    comm.mean_gradients_(message)
    _write_back(parameters, message)
    return AveragedGradients(message.count, message.flags > 0)


class _Message:
    """The ``FlatGradients`` of ``average_gradients``: sums, whether each parameter has a gradient, samples, flags."""

    def __init__(self, flat: torch.Tensor, num_sums: int, num_parameters: int) -> None:
        self.flat = flat
        self.parts: Sequence[slice] = [slice(0, flat.shape[0])]
        end = num_sums + num_parameters
        self.sums, self.num_present = flat[:num_sums], flat[num_sums:end]
        self.count, self.flags = flat[end], flat[end + 1 :]

    @contextmanager
    def watch(self, complete: Callable[[slice], None]) -> Iterator[None]:
        yield

    def flag_nonfinite_(self, rank: int, part: slice) -> None:
        self.flags[rank] = ~torch.isfinite(self.sums).all()

    def divide_by_count_(self) -> None:
        self.sums /= torch.where(self.count > 0, self.count, torch.ones_like(self.count))


def _on_device(number: Number, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a number as ``(1,)`` without waiting for the device, as a copy of the host's memory would."""
    if isinstance(number, torch.Tensor) and number.device == device:
        return number.detach().to(dtype).reshape(1)
    return torch.full((1,), float(number), dtype=dtype, device=device)


def _trainable(entries: Sequence[nn.Module | nn.Parameter]) -> dict[str, nn.Parameter]:
    """Return by name, each once, the parameters that need a gradient.

    Raises:
        UsageError: there is none.
    """
    found: dict[nn.Parameter, str] = {}
    for place, entry in enumerate(entries):
        own = entry.named_parameters() if isinstance(entry, nn.Module) else [("", entry)]
        for name, parameter in own:
            if parameter.requires_grad:
                found.setdefault(parameter, f"{place}.{name}" if len(entries) > 1 else name)
    if not found:
        raise UsageError("average_gradients was given no parameter that needs a gradient; give a module or parameters")
    return {name: parameter for parameter, name in found.items()}


def _flat_gradient(parameter: nn.Parameter, name: str, like: torch.Tensor) -> torch.Tensor:
    """Return ``(numel,)`` in the order of indices, whatever the strides; zeros for a gradient that is missing."""
    if parameter.grad is None:
        return like.new_zeros(parameter.numel())
    if parameter.grad.layout != torch.strided:
        raise UsageError(f"the gradient of parameter {name} is sparse; build its layer with sparse=False")
    return parameter.grad.reshape(-1).to(like)


def _write_back(parameters: list[nn.Parameter], message: _Message) -> None:
    # Only a rank that lacks a gradient has to look whether another has it; for the rest nobody waits for the device.
    lacks = any(parameter.grad is None for parameter in parameters)
    present = message.num_present.tolist() if lacks else [1.0] * len(parameters)
    means = message.sums.split([parameter.numel() for parameter in parameters])
    for parameter, mean, num_present in zip(parameters, means, present, strict=True):
        if num_present == 0:
            continue
        if parameter.grad is None:
            parameter.grad = torch.empty_like(parameter)
        parameter.grad.copy_(mean.view(parameter.shape))


def _have_gradients(parameters: Sequence[nn.Parameter], like: torch.Tensor) -> torch.Tensor:
    """Return ``(num_parameters,)``: 1 where there is a gradient, else 0; filled on the device itself."""
    present = like.new_ones(len(parameters))
    for place, parameter in enumerate(parameters):
        if parameter.grad is None:
            present[place].zero_()
    return present


def _require_in_step(given: Sequence[nn.Module | nn.Parameter], named: Mapping[str, nn.Parameter], comm: Comm) -> None:
    for entry in given:
        if isinstance(entry, nn.Module):
            require_synchronised(entry, "", comm)
    listing = listing_of(named)
    agreed = _agreed.setdefault(comm, set())
    key = "\n".join(listing)
    if key not in agreed:
        require_same(listing, comm, "average_gradients")
        agreed.add(key)
