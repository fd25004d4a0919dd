"""One iteration of another library's learner in numbers: reduced over ranks, named as ``metrics.jsonl`` has them."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from lockstep.core.interrupts import StopReason
from lockstep.core.types import Comm
from lockstep.distributed.torch_exchange import gather_json
from lockstep.envs.batch_env import BatchEnv
from lockstep.learn.torch import reporting
from lockstep.learn.torch.reporting import Metrics, OwnIteration

_KNOWN = ("kl", "learning_rate", "gradient_norm")
"""Numbers of an update that the display knows; all others are losses to it."""
_NUM_COUNTS = 3
"""Of a row: whether something is not finite, how many envs there are, and whether names are told that are new."""


class Shared(NamedTuple):
    """An iteration over all ranks: the same on every rank."""

    metrics: Metrics
    stop: StopReason | None
    save_due: bool
    is_bad: bool
    """Whether a rank met a number that is not finite."""


def own_row(
    env: BatchEnv,
    own: OwnIteration,
    losses: Mapping[str, float],
    state: Mapping[str, torch.Tensor],
    names: Sequence[str],
) -> torch.Tensor:
    """Return what this rank has to say as a row of float64, which ``gather`` takes.

    Args:
        env: this rank's; its sums are taken and start anew.
        own: this rank's iteration.
        losses: of its update, by name.
        state: what must be the same on every rank, looked at for numbers that are not finite; nothing waits for a GPU.
        names: of losses that all ranks know by now.
    """
    counts = torch.tensor([env.num_envs, not losses.keys() <= {*names}], dtype=torch.float64, device=env.device)
    good = _are_finite(state.values(), env.device) & all(map(math.isfinite, _checked(losses, env.num_envs).values()))
    values = _values(losses, names, env.device)
    return torch.cat((reporting.own_row(env, own), (~good).double().reshape(1), counts, values))


def gather(
    row: torch.Tensor, losses: Mapping[str, float], names: Sequence[str], comm: Comm
) -> tuple[torch.Tensor, tuple[str, ...]]:
    """Return all ranks' rows, for ``share``, and the names of all losses by now.

    One exchange; where a rank tells a name for the first time, as in the first iteration, the names follow and then the
    values again: ranks that tell different ones must not be at odds about how long a row is.

    Args:
        row: this rank's ``own_row``.
        losses: of its update, by name.
        names: of losses that all ranks knew before.
        comm: the ranks.
    """
    table = comm.gather(row, "metrics")
    width = row.shape[0] - len(names)
    if not table[:, width - 1].any():
        return table, tuple(names)
    told = gather_json(list(losses), comm, "names of metrics")
    known = tuple(dict.fromkeys(name for each in [names, *told] for name in each))
    values = comm.gather(_values(losses, known, row.device), "metrics")
    return torch.cat((table[:, :width], values), dim=1), known


def share(env: BatchEnv, table: torch.Tensor, names: Sequence[str]) -> Shared:
    """Return what all ranks' rows come to.

    Args:
        env: whose episodes they are.
        table: ``(num_ranks, width)``, as ``gather`` returns it.
        names: of losses, by the same.
    """
    rows: list[list[float]] = table.tolist()
    width = len(rows[0]) - _NUM_COUNTS - len(names)
    iteration = reporting.share(env, [row[:width] for row in rows])
    bad, num_envs, _, *values = zip(*(row[width:] for row in rows), strict=True)
    for name, by_rank in zip(names, values, strict=True):
        iteration.metrics[name if name in _KNOWN or "/" in name else f"loss/{name}"] = _mean(by_rank, num_envs)
    return Shared(*iteration, any(bad))


def first_nonfinite(losses: Mapping[str, float], num_envs: int, state: Mapping[str, torch.Tensor]) -> str:
    """Return the name of the first loss or tensor of this rank that is not finite; "" if all are."""
    for name, value in _checked(losses, num_envs).items():
        if not math.isfinite(value):
            return f"loss {name}"
    floats = {name: tensor for name, tensor in state.items() if tensor.is_floating_point()}
    return next((name for name, tensor in floats.items() if not torch.isfinite(tensor).all()), "")


def _checked(losses: Mapping[str, float], num_envs: int) -> dict[str, float]:
    """Return what has to be finite: no loss of a rank without samples, and nothing that is told beside the losses."""
    return {name: value for name, value in losses.items() if num_envs and "/" not in name}


def _values(losses: Mapping[str, float], names: Sequence[str], device: torch.device) -> torch.Tensor:
    """Return losses ``(num_names,)`` float64 in the order of names, NaN where there is none."""
    return torch.tensor([losses.get(name, math.nan) for name in names], dtype=torch.float64, device=device)


def _are_finite(tensors: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return ``()`` bool on a device, with one flag of each tensor on the way there."""
    flags = [torch.isfinite(tensor).all() for tensor in tensors if tensor.is_floating_point()]
    on_host = all(flag.item() for flag in flags if flag.device.type == "cpu")
    others = [flag for flag in flags if flag.device.type != "cpu"]
    return torch.stack([torch.tensor(on_host, device=device), *others]).all()


def _mean(values: Sequence[float], num_envs: Sequence[float]) -> float | None:
    """Return the mean of the ranks' numbers by their envs, as all have stepped as often; None if no rank has one."""
    counted = [(value, count) for value, count in zip(values, num_envs, strict=True) if count and math.isfinite(value)]
    if not counted:
        return None
    first, _ = counted[0]
    if all(value == first for value, _ in counted):
        return first  # what ranks have in common, as a learning rate, is not blurred by rounding
    return math.fsum(value * count for value, count in counted) / math.fsum(count for _, count in counted)
