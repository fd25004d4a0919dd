"""One iteration's numbers: reduced over ranks, brought to the host in one copy, named as ``metrics.jsonl`` has them."""

import torch

from lockstep.core.types import Comm
from lockstep.envs.episodes import summarise
from lockstep.envs.torch_env import TorchEnv
from lockstep.learn.torch.ppo import RIDERS, UpdateResult

Metrics = dict[str, float | int | None]
"""As ``core.metrics`` takes them, and still open for more."""
PHASES = ("rollout", "update", "wait")


def iteration_metrics(
    env: TorchEnv, num_steps: int, times_s: tuple[float, float, float], result: UpdateResult, comm: Comm
) -> tuple[Metrics, list[int]]:
    """Return the metrics over all ranks, and the ranks whose update met a tensor that was not finite.

    Args:
        env: this rank's; its sums are taken and start anew.
        num_steps: env steps of this rank in the iteration, over all its envs.
        times_s: seconds this rank spent in each of PHASES.
        result: of the update; equal on all ranks.
        comm: the ranks.
    """
    counts = torch.tensor([num_steps, *times_s], dtype=torch.float64, device=env.device)
    own = torch.cat((env.episodes.take(), env.num_diverged.double().reshape(1), counts))
    env.num_diverged.zero_()
    replicated = torch.cat((result.means, torch.stack((result.gradient_norm, result.learning_rate)), result.nonfinite))
    table, shared = _to_host(comm.gather(own), replicated)

    num_phases = len(PHASES)
    *episode_sums, num_diverged, all_steps = _column_sums(table)[:-num_phases]
    times_by_rank = [row[-num_phases:] for row in table]
    losses = dict(zip(RIDERS, shared, strict=False))
    gradient_norm, learning_rate, *flags = shared[len(RIDERS) :]
    metrics: Metrics = {
        "num_steps": int(all_steps),
        "steps_per_s": all_steps / max(sum(times) for times in times_by_rank),
        **summarise(episode_sums, env.task.reward_terms),
        "kl": losses.pop("kl"),
        **{f"loss/{name}": value for name, value in losses.items()},
        "learning_rate": learning_rate,
        "gradient_norm": gradient_norm,
        "num_diverged": int(num_diverged),
    }
    for phase, times in zip(PHASES, zip(*times_by_rank, strict=True), strict=True):
        metrics[f"time/{phase}_mean"] = sum(times) / len(times)
        metrics |= {f"time/{phase}_min": min(times), f"time/{phase}_max": max(times)}
    return metrics, [rank for rank, flag in enumerate(flags) if flag]


def _to_host(by_rank: torch.Tensor, replicated: torch.Tensor) -> tuple[list[list[float]], list[float]]:
    """Return ``by_rank (world_size, width)`` as rows and ``replicated`` as a list, after one wait for the device."""
    world_size, width = by_rank.shape
    numbers = torch.cat((by_rank.flatten(), replicated.double())).tolist()
    rows = [numbers[rank * width : (rank + 1) * width] for rank in range(world_size)]
    return rows, numbers[world_size * width :]


def _column_sums(table: list[list[float]]) -> list[float]:
    return [sum(column) for column in zip(*table, strict=True)]
