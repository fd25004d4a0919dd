"""Figures of jobs made by hand: ranks that meet once per iteration, after computing for as long as a test says."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from lockstep.benchmark.reasons.find import find_reasons
from lockstep.benchmark.schema import Exchange, Finding, GpuHardware, NodeHardware, RankFigures, TimeSplit, Use

NUM_ITERATIONS = 20


def steady(*compute_s: float) -> np.ndarray:
    """Return ``(num_ranks, 20)``: so many seconds in each iteration, half of them 1 % longer, for all ranks alike."""
    return np.outer(compute_s, [1.0, 1.01] * (NUM_ITERATIONS // 2))


def node(number: int = 0, cores: int = 8, gpu: str | None = None, cpu: str = "AMD EPYC 9654") -> NodeHardware:
    uuid = f"GPU-{number}"
    gpus = (GpuHardware(name=gpu, uuid=uuid, pci_bus_id="0", memory_bytes=None, driver="580"),) if gpu else ()
    return NodeHardware(
        node=number,
        host=f"node-{number}",
        platform="Linux",
        cpu=cpu,
        num_cores=cores,
        num_allowed_cores=cores,
        memory_bytes=2**34,
        gpus=gpus,
    )


def exchange(tag: str, num: float, num_bytes: float, communication_s: float) -> Exchange:
    return Exchange(tag=tag, num=num, num_bytes=num_bytes, communication_s=communication_s, straggler_wait_s=0.0)


def reasons_of(
    compute_s: np.ndarray,
    communication_s: float = 0.0,
    exchanges: Sequence[Exchange] = (),
    hardware: Sequence[NodeHardware] = (node(),),
    *,
    is_compiled: bool = False,
    **of_ranks: Sequence[Any],
) -> tuple[Finding, ...]:
    """Return the findings about a job.

    Args:
        compute_s: ``(num_ranks, num_iterations)``, contention included.
        communication_s: of each iteration.
        exchanges: by tag.
        hardware: nodes, to which the ranks belong in equal parts.
        is_compiled: phases are not known, and each rank's time only as a mean, as where JAX compiles the iteration.
        **of_ranks: a field of each rank: floats as ``Use``, anything else as it is. By default each has a core of its
            own, keeps one thread busy, has 64 envs and computes without contention.
    """
    wait_s = compute_s.max(axis=0) - compute_s
    if is_compiled:
        of_ranks = {"rollout_s": [None] * len(compute_s), "update_s": [None] * len(compute_s)} | of_ranks
    ranks = ranks_of(compute_s, communication_s, len(hardware), **of_ranks)
    contention_s = float(np.mean([0.0 if each.contention_s is None else each.contention_s.mean for each in ranks]))
    split = TimeSplit(
        compute_s=float(compute_s.mean()) - contention_s,
        contention_s=contention_s,
        straggler_wait_s=float(wait_s.mean()),
        communication_s=communication_s,
    )
    shown = compute_s.mean(axis=1, keepdims=True) if is_compiled else compute_s
    iteration_s = float(compute_s.max(axis=0).mean()) + communication_s
    return find_reasons(ranks, split, iteration_s, shown, exchanges, hardware)


def ranks_of(
    compute_s: np.ndarray, communication_s: float = 0.0, num_nodes: int = 1, **of_ranks: Sequence[Any]
) -> tuple[RankFigures, ...]:
    """Return the ranks of such a job; ``of_ranks`` as above."""
    wait_s = compute_s.max(axis=0) - compute_s
    ranks = []
    for rank in range(len(compute_s)):
        mean_s = float(compute_s[rank].mean())
        at = rank * num_nodes // len(compute_s)
        fields: dict[str, Any] = {
            **dict.fromkeys(RankFigures.model_fields),
            "rank": rank,
            "process": rank,
            "local_rank": rank,
            "node": at,
            "host": f"node-{at}",
            "device": "cpu",
            "cores": (rank,),
            "threads": 1,
            "num_envs": 64,
            "env_steps": 1,
            "wall_s": 1,
            "rollout_s": 0.6 * mean_s,
            "update_s": 0.4 * mean_s,
            "compute_s": mean_s,
            "straggler_wait_s": float(wait_s[rank].mean()),
            "communication_s": communication_s,
            "contention_s": 0.0,
            "cpu_s": mean_s,
            "others_cpu_percent": 0.0,
        }
        fields |= {name: values[rank] for name, values in of_ranks.items()}
        used = {
            name: Use(mean=value, peak=value) if isinstance(value, float) else value for name, value in fields.items()
        }
        ranks.append(RankFigures(**used))
    return tuple(ranks)
