"""Which of the node's CPU cores a rank gets: ranks that all use every core only take them from one another."""

import contextlib
import os
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from lockstep.core.environment import allowed_cores
from lockstep.distributed.topology import Topology, from_environment, is_isolated

THREADS = "LOCKSTEP_THREADS"
"""Variable with the number of threads that this rank keeps busy; its child processes have it too."""


def threads_per_rank(environment: Mapping[str, str] = os.environ) -> int:
    """Return how many cores this process may keep busy: its own if it is pinned, else its share of the allowed ones.

    Raises:
        UsageError: the launcher's variables make no sense.
    """
    if is_isolated(environment) and environment.get(THREADS, "").isdecimal():
        return max(1, int(environment[THREADS]))
    return max(1, allowed_cores() // from_environment(environment).local_world_size)


def settle(
    environment: MutableMapping[str, str],
    topology: Topology,
    pci_bus_ids: Sequence[str | None],
    system: Path = Path("/sys"),
) -> None:
    """Bind this process to its share of the node's cores and note in ``environment`` how many threads it should have.

    It is bound only where the shares of the other ranks are known: if it has all the cores of the process that started
    the ranks, as under torchrun. srun and ``torchrun --numa-binding`` bind each rank to others, and that stays so.
    LOCKSTEP_PIN=0 turns it off.

    Args:
        environment: of this process.
        topology: of this rank.
        pci_bus_ids: of the GPU of each rank of this node, None where it is not known.
        system: where sysfs is.
    """
    if not hasattr(os, "sched_setaffinity"):
        return
    own, shared, usable = os.sched_getaffinity(0), _cores_of_starter(), allowed_cores()
    ranks = topology.local_world_size
    threads = usable // ranks
    if shared == own and environment.get("LOCKSTEP_PIN") != "0":
        numa_of_core = read_numa_of_cores(system)
        ordered = in_order(own, numa_of_core, system)
        nodes = [None if bus_id is None else read_numa_of_gpu(bus_id, system) for bus_id in pci_bus_ids]
        cores = cores_of_rank(topology, ordered, usable, numa_of_core, nodes)
        if cores is not None and _bind(cores):
            threads = len(cores)
    elif shared is not None and own < shared and usable == len(own):
        # Somebody bound this rank, perhaps together with others: its share is that of the whole at most.
        threads = min(usable, len(shared) // ranks)
    environment[THREADS] = str(max(1, threads))


def cores_of_rank(
    topology: Topology,
    allowed: Sequence[int],
    quota_cores: int,
    numa_of_core: Mapping[int, int],
    numa_node_of_gpu: Sequence[int | None],
) -> tuple[int, ...] | None:
    """Return the cores of one rank; those of the node's ranks are disjoint, and none has two more than another.

    Where the NUMA node of every rank's GPU is known, and has a core for each of its ranks, the cores come from there.

    Args:
        topology: of the rank.
        allowed: the cores to share, neighbours next to each other; the same for all ranks of the node.
        quota_cores: how many of them the cgroup lets the job keep busy.
        numa_of_core: NUMA node by core, for those where it is known.
        numa_node_of_gpu: by local rank; None where it is not known.

    Returns:
        The cores, or None for no binding: there are fewer cores than ranks, or the quota is what limits them, which
        the system enforces by itself on whatever cores are idle.
    """
    ranks = topology.local_world_size
    if ranks > len(allowed) or quota_cores < len(allowed):
        return None
    cores, sharing = list(allowed), list(range(ranks))
    if len(numa_node_of_gpu) == ranks and None not in numa_node_of_gpu:
        nodes = set(numa_node_of_gpu)
        cores_of = {node: [core for core in allowed if numa_of_core.get(core) == node] for node in nodes}
        ranks_of = {node: [rank for rank in sharing if numa_node_of_gpu[rank] == node] for node in nodes}
        if all(len(cores_of[node]) >= len(ranks_of[node]) for node in nodes):
            node = numa_node_of_gpu[topology.local_rank]
            cores, sharing = cores_of[node], ranks_of[node]
    place = sharing.index(topology.local_rank)
    first, end = (len(cores) * edge // len(sharing) for edge in (place, place + 1))
    return tuple(cores[first:end])


def in_order(cores: set[int], numa_of_core: Mapping[int, int], system: Path) -> list[int]:
    """Return cores by NUMA node, with the hardware threads of one physical core next to each other.

    The system often numbers all first threads and then all second ones; halving that would give two ranks the two
    threads of each physical core.
    """

    def place(core: int) -> tuple[int, int, int]:
        siblings = _read_list(system / f"devices/system/cpu/cpu{core}/topology/thread_siblings_list")
        return numa_of_core.get(core, 0), min(siblings, default=core), core

    return sorted(cores, key=place)


def read_numa_of_cores(system: Path) -> dict[int, int]:
    """Return the NUMA node of every core, nothing if the system does not say."""
    folders = (system / "devices/system/node").glob("node[0-9]*")
    nodes = {int(folder.name.removeprefix("node")): _read_list(folder / "cpulist") for folder in folders}
    return {core: node for node, cores in nodes.items() for core in cores}


def read_numa_of_gpu(pci_bus_id: str, system: Path) -> int | None:
    """Return the NUMA node that a GPU is attached to, None where the system does not know (it then says -1)."""
    try:
        node = int((system / "bus/pci/devices" / pci_bus_id / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def _read_list(path: Path) -> list[int]:
    """Return the numbers of a list such as ``0-3,8``, none if it can't be read."""
    numbers: list[int] = []
    with contextlib.suppress(OSError, ValueError):
        for part in path.read_text().strip().split(","):
            first, _, last = part.partition("-")
            numbers += range(int(first), int(last or first) + 1)
    return numbers


def _cores_of_starter() -> set[int] | None:
    """Return the cores of the process that started this node's ranks, None if that can't be found out.

    It is the nearest ancestor without a RANK: between it and this process may be shells that belong to this rank.
    """
    try:
        for ancestor in psutil.Process().parents():
            if not _is_rank(ancestor):
                return os.sched_getaffinity(ancestor.pid)
    except (psutil.Error, OSError):
        pass
    return None


def _is_rank(process: psutil.Process) -> bool:
    try:
        return "RANK" in process.environ()
    except psutil.AccessDenied:
        return False  # another user's, as srun's daemon


def _bind(cores: Sequence[int]) -> bool:
    """Bind every thread of this process; libraries that were imported earlier may have started some."""
    try:
        os.sched_setaffinity(0, cores)
    except OSError:
        return False
    with contextlib.suppress(OSError):
        for task in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):  # a thread may have ended by now
                os.sched_setaffinity(int(task.name), cores)
    return True
