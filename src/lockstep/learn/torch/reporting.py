"""One iteration's numbers: reduced over ranks, brought to the host in one copy, named as ``metrics.jsonl`` has them."""

from typing import NamedTuple

import torch

from lockstep.core.interrupts import StopReason
from lockstep.core.types import Comm
from lockstep.envs.batch_env import BatchEnv
from lockstep.learn.observer import Metrics as Metrics
from lockstep.learn.torch.ppo import RIDERS, UpdateResult

PHASES = ("rollout", "update", "wait")


class OwnIteration(NamedTuple):
    """What one rank has to say of an iteration."""

    num_steps: int  # env steps over all its envs
    times_s: tuple[float, float, float]  # in each of PHASES
    stop: StopReason | None  # why it should stop
    save_due: bool = False  # whether its clock asks for a checkpoint


class Agreement(NamedTuple):
    """What all ranks do after an iteration: the same on every rank."""

    stop: StopReason | None
    save_due: bool
    bad_ranks: list[int]  # those that met a tensor that was not finite


class Shared(NamedTuple):
    """An iteration over all ranks: the same on every rank."""

    metrics: Metrics
    """``num_steps`` and ``steps_per_s``, those of episodes, ``num_diverged``, and times by phase."""
    stop: StopReason | None
    save_due: bool


def iteration_metrics(
    env: BatchEnv, own_iteration: OwnIteration, result: UpdateResult, comm: Comm
) -> tuple[Metrics, Agreement]:
    """Return the metrics over all ranks, and what the ranks agree on.

    A stop that one rank asks for is everyone's. Whether a checkpoint is due rank 0 says, which writes it: clocks of
    different ranks, begun at different times, would ask for one each.

    Args:
        env: this rank's; its sums are taken and start anew.
        own_iteration: this rank's.
        result: of the update; equal on all ranks.
        comm: the ranks.
    """
    own = own_row(env, own_iteration)
    replicated = torch.cat((result.means, torch.stack((result.gradient_norm, result.learning_rate)), result.nonfinite))
    table, shared = _to_host(comm.gather(own, "metrics"), replicated)
    iteration = share(env, table)
    losses = dict(zip(RIDERS, shared, strict=False))
    gradient_norm, learning_rate, *nonfinite = shared[len(RIDERS) :]
    of_update: Metrics = {
        "kl": losses.pop("kl"),
        **{f"loss/{name}": value for name, value in losses.items()},
        "learning_rate": learning_rate,
        "gradient_norm": gradient_norm,
    }
    bad_ranks = [rank for rank, flag in enumerate(nonfinite) if flag]
    return iteration.metrics | of_update, Agreement(iteration.stop, iteration.save_due, bad_ranks)


def own_row(env: BatchEnv, own_iteration: OwnIteration) -> torch.Tensor:
    """Return what this rank has to say as a row of float64; the env's sums are taken and start anew."""
    num_steps, times_s, stop, save_due = own_iteration
    flags = (stop == "interrupted", stop == "preempted", save_due)
    counts = torch.tensor([num_steps, *flags, *times_s], dtype=torch.float64, device=env.device)
    own = torch.cat((env.episodes.take(), env.num_diverged.double().reshape(1), counts))
    env.num_diverged.zero_()
    return own


def share(env: BatchEnv, table: list[list[float]]) -> Shared:
    """Return what all ranks' rows come to; see ``own_row``."""
    num_phases = len(PHASES)
    *sums, interrupted, preempted, _ = _column_sums(table)[:-num_phases]
    main_save_due = table[0][-num_phases - 1] > 0
    *episode_sums, num_diverged, all_steps = sums
    times_by_rank = [row[-num_phases:] for row in table]
    metrics: Metrics = {
        "num_steps": int(all_steps),
        "steps_per_s": all_steps / max(sum(times) for times in times_by_rank),
        **env.summarise(episode_sums),
        "num_diverged": int(num_diverged),
    }
    for phase, times in zip(PHASES, zip(*times_by_rank, strict=True), strict=True):
        metrics[f"time/{phase}_mean"] = sum(times) / len(times)
        metrics |= {f"time/{phase}_min": min(times), f"time/{phase}_max": max(times)}
    stop: StopReason | None = "interrupted" if interrupted else "preempted" if preempted else None
    return Shared(metrics, stop, main_save_due)


def steps_since(before: int, env: BatchEnv) -> int:
    """Return the env steps since the count was ``before``; an env that was reset counts from 0 again."""
    return env.num_steps - before if env.num_steps >= before else env.num_steps


def _to_host(by_rank: torch.Tensor, replicated: torch.Tensor) -> tuple[list[list[float]], list[float]]:
    """Return ``by_rank (world_size, width)`` as rows and ``replicated`` as a list, after one wait for the device."""
    world_size, width = by_rank.shape
    numbers = torch.cat((by_rank.flatten(), replicated.double())).tolist()
    rows = [numbers[rank * width : (rank + 1) * width] for rank in range(world_size)]
    return rows, numbers[world_size * width :]


def _column_sums(table: list[list[float]]) -> list[float]:
    return [sum(column) for column in zip(*table, strict=True)]
