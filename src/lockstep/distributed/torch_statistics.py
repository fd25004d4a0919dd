"""Statistics over all ranks' data, for a training loop of your own. One process alone may call all of it.

Every function that exchanges something is called by all ranks, in the same order. With several ranks
``lockstep.init()`` (or ``setup``) comes first; without a group each returns what one rank alone amounts to.
"""

import math
from collections.abc import Mapping
from typing import TypeAlias

import torch

from lockstep.core.types import Comm
from lockstep.distributed.torch_exchange import gather_json
from lockstep.distributed.torch_group import current
from lockstep.distributed.torch_moments import Moments, merge_over_ranks

Number: TypeAlias = float | torch.Tensor


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
    tables = gather_json({name: _sum_and_count(value) for name, value in metrics.items()}, comm, "metrics")
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


def moments_of(samples: torch.Tensor) -> Moments:
    """Return the moments of ``samples (num_samples, ...)``, over the first axis; there may be none.

    Nothing waits for a GPU.
    """
    num_samples, *shape = samples.shape
    flat = Moments.of(samples.reshape(num_samples, math.prod(shape)))
    return Moments(flat.count, flat.mean.reshape(shape), flat.m2.reshape(shape))


def merge_moments(new: Moments, running: Moments | None = None, *, comm: Comm | None = None) -> Moments:
    """Return the moments of all ranks' new samples, and of all that came before: the same on every rank.

    For a normaliser: ``running = merge_moments(moments_of(batch), running)``. Exact, but for rounding, for any split of
    the samples over ranks, so that equal data give equal moments on any number of them. One exchange.

    Args:
        new: of this rank's samples since the last merge, and of no others: what every rank has in common already would
            count once per rank.
        running: what the last merge returned; None the first time.
        comm: the ranks; None for the job's.
    """
    comm = current() if comm is None else comm
    # The mean of no samples may be anything where moments were computed by other means than moments_of.
    has_samples = new.count > 0
    own = Moments(new.count, torch.where(has_samples, new.mean, 0.0), torch.where(has_samples, new.m2, 0.0))
    (merged,) = merge_over_ranks([own], comm)
    return merged if running is None else running.merge(merged)
