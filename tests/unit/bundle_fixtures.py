"""Result bundles made by hand, whose figures agree with each other as those of a real benchmark do."""

from collections.abc import Sequence
from typing import Any

from lockstep.benchmark.schema import SCHEMA_VERSION, SCOPE_VALUES, Bundle, Kind, envs_per_rank
from lockstep.benchmark.spread import spread_of, use_of

NUM_ITERATIONS = 20
NUM_STEPS_PER_ENV = 24
COMMUNICATION_S = 0.002
_UNEVEN = (0.98, 1.0, 1.03, 1.01, 0.98)
"""How the measured iterations differ from the mean one, again and again."""


def make_bundle(
    kind: Kind = "runtime",
    num_envs: Sequence[int] = (256, 256),
    compute_s: Sequence[float] | None = None,
    num_nodes: int = 1,
    device: str = "cpu",
    **changes: Any,
) -> Bundle:
    """Return a bundle of a benchmark that took 20 iterations of 24 steps, all ranks in step.

    Args:
        kind: of the benchmark.
        num_envs: of each rank; there are as many ranks, dealt to the nodes in equal parts.
        compute_s: of each rank in a mean iteration; by default 10 ms, the last rank 12 ms.
        num_nodes: divides the number of ranks.
        device: cpu, or cuda for ranks with a GPU each.
        **changes: fields of the bundle, or of a part of it as ``run__task``, that shall be something else.

    Returns:
        A bundle in which an iteration takes the longest ``compute_s`` and 2 ms of communication.
    """
    shares = tuple(num_envs)
    work = tuple(compute_s or [0.010] * (len(shares) - 1) + [0.012])
    content: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "kind": kind,
        "run": _run(kind, device, shares),
        "world_size": len(shares),
        "local_world_size": len(shares) // num_nodes,
        "num_nodes": num_nodes,
        "num_processes": len(shares),
        "num_envs_per_rank": envs_per_rank(shares),
        "total_envs": sum(shares),
        "workload_scope": "global" if kind == "training" else "per_rank",
        "measurement_scope": "all_ranks",
        "gpu_measurement_scope": "own_device" if device == "cuda" else "none",
        "scope_values": SCOPE_VALUES,
        "versions": _versions(device),
        "hardware": [_node(node, len(shares) // num_nodes, device) for node in range(num_nodes)],
        "runtime": None if kind == "startup" else _runtime(shares, work),
        "startup": _startup(len(shares)) if kind == "startup" else None,
        "work": _work() if kind == "training" else None,
        "ranks": [_rank(rank, shares, work, num_nodes, device) for rank in range(len(shares))],
        "slowest_rank": work.index(max(work)),
        "compute_spread": spread_of(work),
        "resources": _resources(len(shares), num_nodes, device),
        "learning": _learning(sum(shares)) if kind == "training" else None,
        "findings": [] if kind == "startup" else [_finding(work)],
    }
    return Bundle.model_validate(_changed(Bundle.model_validate(content).model_dump(), changes))


def _changed(content: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    for name, value in changes.items():
        *outer, last = name.split("__")
        section = content
        for part in outer:
            section = section[part]
        assert last in section, f"a bundle has no field {name}"
        section[last] = value
    return content


def _run(kind: Kind, device: str, shares: tuple[int, ...]) -> dict[str, Any]:
    return {
        "benchmark_id": "0123456789abcdef",
        "date": "2026-03-01T12:00:00+00:00",
        "command": ("lockstep", "benchmark", f"{kind}_multigpu", "cartpole_balance", "--num_gpus", str(len(shares))),
        "task": "cartpole_balance",
        "ml_framework": "torch",
        "rl_library": "lockstep",
        "algorithm": "ppo",
        "engine": "auto",
        "device": device,
        "dtype": "float32",
        "seed": 0,
        "config": {"task": "cartpole_balance", "num_envs": shares[0], "agent": {"num_steps_per_env": 24}},
        "git": {"commit": "0123456789abcdef0123456789abcdef01234567", "dirty": False},
    }


def _versions(device: str) -> dict[str, Any]:
    on_gpu = device == "cuda"
    return {
        "python": "3.11.9",
        "packages": {"lockstep": "0.1.0", "torch": "2.13.0", "jax": None, "mujoco": "3.17.0", "numpy": "2.3.0"},
        "driver": "580.65.06" if on_gpu else None,
        "cuda": "13.0" if on_gpu else None,
        "nccl": "2.28.3" if on_gpu else None,
    }


def _uuid(node: int, local_rank: int) -> str:
    return f"GPU-{node:08d}-0000-0000-0000-{local_rank:012d}"


def _pci_bus_id(local_rank: int) -> str:
    return f"00000000:{16 + local_rank:02X}:00.0"


def _node(node: int, num_ranks: int, device: str) -> dict[str, Any]:
    gpus = [
        {
            "name": "NVIDIA H200",
            "uuid": _uuid(node, local_rank),
            "pci_bus_id": _pci_bus_id(local_rank),
            "memory_bytes": 139 * 2**30,
            "driver": "580.65.06",
        }
        for local_rank in range(num_ranks if device == "cuda" else 0)
    ]
    return {
        "node": node,
        "host": f"node-{node}",
        "platform": "Linux-6.8.0-x86_64-with-glibc2.39",
        "cpu": "AMD EPYC 9654 96-Core Processor",
        "num_cores": 192,
        "num_allowed_cores": 2 * num_ranks,
        "memory_bytes": 256 * 2**30,
        "gpus": gpus,
    }


def _runtime(shares: tuple[int, ...], work: tuple[float, ...]) -> dict[str, Any]:
    mean_s = max(work) + COMMUNICATION_S
    iterations_s = [mean_s * _UNEVEN[k % len(_UNEVEN)] for k in range(NUM_ITERATIONS)]
    steps = sum(shares) * NUM_STEPS_PER_ENV
    wall_s = sum(iterations_s)
    compute_s = sum(work) / len(work)
    return {
        "warm_up": {"iterations": 2, "env_steps": 2 * steps, "wall_s": 1.5, "compile_s": None},
        "iterations": NUM_ITERATIONS,
        "env_steps": NUM_ITERATIONS * steps,
        "wall_s": wall_s,
        "steps_per_s": NUM_ITERATIONS * steps / wall_s,
        "iteration_s": spread_of(iterations_s),
        "iteration_steps_per_s": spread_of([steps / each for each in iterations_s]),
        "split": {
            "compute_s": 0.9 * compute_s,
            "contention_s": 0.1 * compute_s,
            "straggler_wait_s": max(work) - compute_s,
            "communication_s": COMMUNICATION_S,
        },
        "split_note": None,
        "exchanges": [
            {
                "tag": "gradients",
                "num": 20.0,
                "num_bytes": 35_000.0,
                "communication_s": COMMUNICATION_S / 20,
                "straggler_wait_s": (max(work) - compute_s) / 20,
            }
        ],
    }


def _startup(num_ranks: int) -> dict[str, Any]:
    seconds = {"imports": 2.0, "config": 0.1, "engine": 1.0, "envs": 0.5, "first_step": 0.4, "first_iteration": 1.0}
    seconds["total"] = sum(seconds.values())
    phases = [
        {
            "name": name,
            "cold_s": spread_of([1.5 * each * (1 + 0.01 * rank) for rank in range(num_ranks)]),
            "warm_s": spread_of([each * (1 + 0.01 * rank) for rank in range(num_ranks) for _ in range(2)]),
            "slowest_rank": num_ranks - 1,
        }
        for name, each in seconds.items()
    ]
    functions = [
        {"phase": "imports", "function": "torch/__init__.py:1 <module>", "calls": 1, "own_s": 0.4, "total_s": 1.6},
        {"phase": "engine", "function": "mujoco.MjModel.from_xml_path", "calls": 1, "own_s": 0.7, "total_s": 0.7},
    ]
    return {"repetitions": 2, "phases": phases, "functions": functions}


def _work() -> dict[str, Any]:
    return {
        "num_steps_per_env": NUM_STEPS_PER_ENV,
        "num_learning_epochs": 5,
        "num_mini_batches": 4,
        "num_parameters": 8_770,
        "flops_per_action": 17_000.0,
        "flops_per_sample": 34_000.0,
    }


def _rank(rank: int, shares: tuple[int, ...], work: tuple[float, ...], num_nodes: int, device: str) -> dict[str, Any]:
    node, local_rank = divmod(rank, len(shares) // num_nodes)
    on_gpu = device == "cuda"

    def use(mean: float) -> Any:
        return use_of([0.9 * mean, 1.1 * mean])

    return {
        "rank": rank,
        "process": rank,
        "local_rank": local_rank,
        "node": node,
        "host": f"node-{node}",
        "device": "cuda:0" if on_gpu else "cpu",
        "gpu_uuid": _uuid(node, local_rank) if on_gpu else None,
        "pci_bus_id": _pci_bus_id(local_rank) if on_gpu else None,
        "cores": (2 * local_rank, 2 * local_rank + 1),
        "threads": 2,
        "num_envs": shares[rank],
        "env_steps": shares[rank] * NUM_STEPS_PER_ENV * NUM_ITERATIONS,
        "wall_s": (max(work) + COMMUNICATION_S) * NUM_ITERATIONS,
        "rollout_s": use(0.6 * work[rank]),
        "update_s": use(0.4 * work[rank]),
        "compute_s": use(work[rank]),
        "straggler_wait_s": use(max(work) - work[rank]),
        "communication_s": use(COMMUNICATION_S),
        "contention_s": use(0.1 * work[rank]),
        "cpu_s": use(1.5 * work[rank]),
        "cpu_percent": use(150.0),
        "others_cpu_percent": use(5.0),
        "memory_bytes": use(900.0 * 2**20),
        "gpu_percent": use(70.0) if on_gpu else None,
        "gpu_memory_bytes": use(3.0 * 2**30) if on_gpu else None,
    }


def _resources(num_ranks: int, num_nodes: int, device: str) -> list[dict[str, Any]]:
    here = num_ranks // num_nodes
    use = {"mean": 70.0, "peak": 90.0}
    memory = {"mean": 3.0 * 2**30, "peak": 3.5 * 2**30}
    cores = [
        {
            "kind": "cpu",
            "node": node,
            "uuid": None,
            "pci_bus_id": None,
            "ranks": tuple(range(node * here, (node + 1) * here)),
            "percent": use,
            "memory_bytes": memory,
        }
        for node in range(num_nodes)
    ]
    gpus = [
        {
            "kind": "gpu",
            "node": rank // here,
            "uuid": _uuid(rank // here, rank % here),
            "pci_bus_id": _pci_bus_id(rank % here),
            "ranks": (rank,),
            "percent": use,
            "memory_bytes": memory,
        }
        for rank in range(num_ranks if device == "cuda" else 0)
    ]
    return cores + gpus


def _learning(total_envs: int) -> dict[str, Any]:
    steps = total_envs * NUM_STEPS_PER_ENV
    curve = [(steps * (k + 3), None if k == 0 else 10.0 * k) for k in range(NUM_ITERATIONS)]
    return {
        "env_steps": curve[-1][0],
        "mean_return": curve[-1][1],
        "curve": curve,
        "metrics": {"iteration": NUM_ITERATIONS + 2, "mean_return": curve[-1][1], "kl": 0.01},
        "success": None,
    }


def _finding(work: tuple[float, ...]) -> dict[str, Any]:
    slowest = work.index(max(work))
    lost = (max(work) - sum(work) / len(work)) / (max(work) + COMMUNICATION_S)
    if lost < 0.01:
        return {"reason": "nothing_lost", "rank": None, "lost_share": 0.0, "words": "The ranks keep pace."}
    words = f"Rank {slowest} is a straggler: the others wait for it, {lost:.0%} of each iteration."
    return {"reason": "straggler", "rank": slowest, "lost_share": lost, "words": words}
