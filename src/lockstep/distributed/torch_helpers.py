"""For a training loop of your own: what ranks must do together at every update. One process alone may call all of it.

Every function here is called by all ranks, in the same order. With several ranks ``lockstep.init()`` (or ``setup``)
comes first; without a group each returns what one rank alone amounts to.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import nn

from lockstep.core.errors import RunError, UsageError
from lockstep.core.types import Comm
from lockstep.distributed.torch_group import current
from lockstep.distributed.torch_state import listing_of, require_same
from lockstep.distributed.wording import name_ranks

Number: TypeAlias = float | torch.Tensor
_agreed: WeakKeyDictionary[Comm, set[str]] = WeakKeyDictionary()


# --- gradients -------------------------------------------------------------------------------------------------------


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
            error = RunError(
                f"gradients of {name_ranks(ranks)} (of {len(self.nonfinite)}) are not finite; look at the losses "
                "there, or use a smaller learning rate"
            )
            error.shared = True
            raise error


@torch.no_grad()
def average_gradients(
    module_or_parameters: nn.Module | Iterable[nn.Module | nn.Parameter],
    num_samples: Number,
    *,
    comm: Comm | None = None,
) -> AveragedGradients:
    """Make every ``.grad`` the mean over the samples of all ranks; clip afterwards, then step the optimizer.

    Call it after ``backward`` of a loss that is the *mean* over this rank's samples. Ranks may have different numbers
    of them, or none: each counts by its samples, so the result is that of one process with all of them. One exchange;
    the first call with some parameters makes one more, which compares their names and shapes over ranks. A process
    alone keeps its gradients bit for bit.

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
        UsageError: no parameter needs a gradient, a gradient is sparse, or the parameters differ between ranks.
    """
    comm = current() if comm is None else comm
    named = _trainable(module_or_parameters)
    parameters = list(named.values())
    dtype = torch.float64 if any(parameter.dtype == torch.float64 for parameter in parameters) else torch.float32
    count = torch.as_tensor(num_samples, dtype=dtype, device=parameters[0].device).reshape(1)
    own = torch.cat([_flat_gradient(parameter, name, count) for name, parameter in named.items()])
    if comm.world_size == 1:
        return AveragedGradients(count.reshape(()), ~torch.isfinite(own).all().reshape(1))
    _require_same_parameters(named, comm)
    # A mean over no samples is no number; it has no say.
    sums = torch.where(count > 0, own * count, torch.zeros_like(own))
    present = sums.new_tensor([parameter.grad is not None for parameter in parameters])
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


def _trainable(module_or_parameters: nn.Module | Iterable[nn.Module | nn.Parameter]) -> dict[str, nn.Parameter]:
    """Return by name, each once, the parameters that need a gradient.

    Raises:
        UsageError: there is none.
    """
    entries = [module_or_parameters] if isinstance(module_or_parameters, nn.Module) else list(module_or_parameters)
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


def _require_same_parameters(named: Mapping[str, nn.Parameter], comm: Comm) -> None:
    listing = listing_of(named)
    agreed = _agreed.setdefault(comm, set())
    key = "\n".join(listing)
    if key not in agreed:
        require_same(listing, comm, "average_gradients")
        agreed.add(key)


# --- statistics ------------------------------------------------------------------------------------------------------


def reduce_metrics(
    metrics: Mapping[str, Number | tuple[Number, Number]], *, comm: Comm | None = None
) -> dict[str, float]:
    """Return every metric's mean over all ranks, the same on every rank.

    Args:
        metrics: by name ``(sum, count)`` over this rank's data, which gives the mean over the data of all ranks; or a
            number, which gives the mean over the ranks that have it. Numbers may be tensors ``()``. A rank may lack a
            metric, for want of a finished episode say.
        comm: the ranks; None for the job's.

    Returns:
        The means, in float64, in the order in which ranks name them; NaN where all counts are zero.
    """
    comm = current() if comm is None else comm
    own = {name: _sum_and_count(value) for name, value in metrics.items()}
    tables = [json.loads(text) for text in comm.gather_text(json.dumps(own), "metrics")]
    names = list(dict.fromkeys(name for table in tables for name in table))
    reduced = {}
    for name in names:
        sums, counts = zip(*(table[name] for table in tables if name in table), strict=True)
        count = math.fsum(counts)
        reduced[name] = _sum(sums) / count if count else math.nan
    return reduced


def _sum_and_count(value: Number | tuple[Number, Number]) -> tuple[float, float]:
    if isinstance(value, tuple | list):
        total, count = value
        return float(total), float(count)
    return float(value), 1.0


def _sum(values: tuple[float, ...]) -> float:
    # fsum rounds once, so the order of ranks does not matter; it has no answer to infinities of both signs.
    return math.fsum(values) if all(map(math.isfinite, values)) else sum(values)


@dataclass(frozen=True)
class Moments:
    """Count, mean and sum of squared deviations from the mean of a set of samples, in float64."""

    count: torch.Tensor  # ()
    mean: torch.Tensor  # (...) the shape of one sample
    m2: torch.Tensor  # (...)

    def std(self) -> torch.Tensor:
        """Return the population's standard deviation ``(...)``; zeros without samples."""
        return (self.m2 / self.count.clamp(min=1.0)).sqrt()


def moments_of(samples: torch.Tensor) -> Moments:
    """Return the moments of ``samples (num_samples, ...)``, over the first axis; there may be none."""
    wide = samples.detach().double()
    count = torch.tensor(float(wide.shape[0]), dtype=torch.float64, device=wide.device)
    mean = wide.sum(0) / count.clamp(min=1.0)
    return Moments(count, mean, (wide - mean).square().sum(0))


def merge_moments(new: Moments, running: Moments | None = None, *, comm: Comm | None = None) -> Moments:
    """Return the moments of all ranks' new samples, and of all that came before: the same on every rank.

    For a normaliser: ``running = merge_moments(moments_of(batch), running)``. Exact for any split of the samples over
    ranks, so that equal data give equal moments on any number of them. One exchange.

    Args:
        new: of this rank's samples since the last merge, and of no others: what every rank has in common already would
            count once per rank.
        running: what the last merge returned; None the first time.
        comm: the ranks; None for the job's.
    """
    comm = current() if comm is None else comm
    gathered = comm.gather(_pack(new), "moments")  # (world_size, 1 + 2 * size)
    if running is not None:
        gathered = torch.cat((_pack(running).to(gathered).unsqueeze(0), gathered))
    size, shape = new.mean.numel(), new.mean.shape
    counts, means, squares = gathered.split([1, size, size], dim=1)  # (num_parts, ...)
    total = counts.sum()
    # Shares, not counts / total at the end: the one part of a process alone keeps its bits.
    shares = counts / total.clamp(min=1.0)
    means = torch.where(counts > 0, means, 0.0)  # the mean of no samples may be anything
    pooled_mean = (shares * means).sum(0)
    pooled_m2 = (torch.where(counts > 0, squares, 0.0) + counts * (means - pooled_mean).square()).sum(0)
    return Moments(total, pooled_mean.view(shape), pooled_m2.view(shape))


def _pack(moments: Moments) -> torch.Tensor:
    return torch.cat([part.double().reshape(-1) for part in (moments.count, moments.mean, moments.m2)])


# --- decisions -------------------------------------------------------------------------------------------------------


def any_rank(condition: bool, *, comm: Comm | None = None) -> bool:
    """Return on every rank whether the condition holds on any: for leaving a loop together, or skipping a step."""
    comm = current() if comm is None else comm
    return bool(comm.gather(torch.tensor([int(condition)]), "any rank").any())


def gather_text(text: str, *, comm: Comm | None = None) -> list[str]:
    """Return every rank's text, in the order of ranks, on every rank."""
    return (current() if comm is None else comm).gather_text(text, "text")
