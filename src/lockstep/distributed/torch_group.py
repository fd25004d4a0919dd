"""The process group of a job: joined once, with a deadline and in words, and left at the end of the process."""

import atexit
import os
import threading
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from lockstep.core import beats
from lockstep.core.errors import RunError, UsageError
from lockstep.core.network import address_towards, interface_of
from lockstep.core.outcome import note_joined
from lockstep.core.types import Comm
from lockstep.distributed import torch_debug, torch_nodes
from lockstep.distributed.first_exchange import deadline
from lockstep.distributed.gloo_threads import be_batch_work
from lockstep.distributed.isolation import placement_problem
from lockstep.distributed.rank_exit import end_at_once_on_failure
from lockstep.distributed.timeouts import JOIN_TIMEOUT_S, TIMEOUT_S, seconds
from lockstep.distributed.topology import Topology, from_environment
from lockstep.distributed.torch_collectives import Collectives
from lockstep.distributed.torch_comm import GroupComm, SoloComm
from lockstep.distributed.torch_debug import CheckedCollectives
from lockstep.distributed.torch_direct import MAX_RANKS, DirectExchange, connect
from lockstep.distributed.torch_store import PREFIX, meet, without
from lockstep.distributed.wording import torch_errors_in_words

LEAVE_TIMEOUT_S = 10.0
CONNECT_TIMEOUT_S = 20.0
_NAME_THE_NETWORK = "GLOO_SOCKET_IFNAME (gloo) or NCCL_SOCKET_IFNAME (nccl) names the network between the hosts"
_MET = f"{PREFIX}/met/{{}}"

_collectives: Collectives | CheckedCollectives | None = None
_current: GroupComm | None = None
_direct: DirectExchange | None = None
_num_checked = 0


def setup(backend: str | None = None, device: torch.device | None = None) -> Topology:
    """Join the job's process group; without several ranks, or once it is joined, do nothing.

    Args:
        backend: ``nccl`` or ``gloo``; None for the one that suits the device.
        device: of this rank; None for its GPU if it has one, else the CPU.

    Raises:
        UsageError: torchrun did not start this process, or the backend does not suit.
        RunError: ranks are missing after LOCKSTEP_JOIN_TIMEOUT_S seconds; they are named.
    """
    topology = from_environment()
    if topology.world_size == 1 or dist.is_initialized():
        return topology
    problem = placement_problem()
    if device is None and backend is None and problem is not None:
        raise UsageError(f'{problem}; for ranks on CPU cores, setup(backend="gloo")')
    if device is None:
        device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    backend = backend or ("nccl" if device.type == "cuda" else "gloo")
    if backend not in ("nccl", "gloo"):
        raise UsageError(f"backend {backend!r} is unknown; use nccl (GPUs) or gloo (CPUs)")
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if name not in os.environ:
            raise UsageError(f"{name} is not set although WORLD_SIZE is {topology.world_size}; start with torchrun")
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)  # plain "cuda" names no device to set
        torch.cuda.set_device(device)
    if backend == "gloo":
        be_batch_work()  # all of the rank: what it wakes up waits for its turn to end
        _choose_interface(topology)
    with beats.exchange("meeting"):
        store = meet(topology)
    timeout_s, everyone = seconds("LOCKSTEP_JOIN_TIMEOUT_S", JOIN_TIMEOUT_S), range(topology.world_size)
    in_time = deadline(timeout_s, topology.world_size, lambda: without(store, _MET, everyone), _NAME_THE_NETWORK)
    unreachable = torch_errors_in_words("the ranks can't reach one another", _NAME_THE_NETWORK)
    with beats.exchange("meeting"), in_time, unreachable:
        dist.init_process_group(
            backend,
            store=PrefixStore(f"{PREFIX}/group", store),
            rank=topology.rank,
            world_size=topology.world_size,
            timeout=timedelta(seconds=seconds("LOCKSTEP_TIMEOUT_S", TIMEOUT_S)),
            device_id=device if backend == "nccl" else None,
        )
        first = torch.ones(1, device=device if backend == "nccl" else "cpu")
        dist.all_reduce(first)
        if int(first) != topology.world_size:
            raise RunError(f"the sum of {topology.world_size} ones over ranks is {float(first)}; the network is broken")
        _connect_neighbours(topology, store)
        store.set(_MET.format(topology.rank), "1")
    note_joined(topology.rank)
    atexit.register(cleanup)
    _end_at_once_on_failure()
    torch_nodes.start(topology, store)
    return topology


def _connect_neighbours(topology: Topology, store: Store) -> None:
    """Connect ranks on CPUs that share a host directly; where one of them can't, gloo does everything."""
    global _direct
    is_one_host = topology.local_world_size == topology.world_size <= MAX_RANKS
    if dist.get_backend() != "gloo" or not is_one_host:
        return
    # The ranks have met already; and the time must do for gloo if it is needed.
    connect_timeout_s = min(CONNECT_TIMEOUT_S, seconds("LOCKSTEP_JOIN_TIMEOUT_S", JOIN_TIMEOUT_S) / 2)
    own_store = PrefixStore(f"{PREFIX}/direct", store)
    timeout_s = seconds("LOCKSTEP_TIMEOUT_S", TIMEOUT_S)
    direct = connect(topology.rank, topology.world_size, own_store, timeout_s, connect_timeout_s)
    num_connected = torch.tensor([direct is not None], dtype=torch.int32)
    dist.all_reduce(num_connected)
    if int(num_connected) == topology.world_size:
        _direct = direct
    elif direct is not None:
        direct.close()


def is_joined() -> bool:
    """Return whether this process is in a group."""
    return dist.is_initialized()


def _end_at_once_on_failure() -> None:
    end_at_once_on_failure(lambda: is_joined())


def _choose_interface(topology: Topology) -> None:
    """Let gloo talk through the network that leads to rank 0, unless the user has named one.

    By itself it takes the address that this host's name leads to, which often only this host knows.
    """
    if topology.world_size == topology.local_world_size or "GLOO_SOCKET_IFNAME" in os.environ:
        return
    address = address_towards(os.environ["MASTER_ADDR"])
    interface = None if address is None else interface_of(address)
    if interface is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = interface


def join(device: torch.device) -> Comm:
    """Return this rank's communicator: of the job's process group, which is joined if it is not yet, or of one alone.

    Args:
        device: that this rank trains on.

    Raises:
        UsageError, RunError: as ``setup``.
    """
    if dist.is_initialized():
        return _comm()
    if setup(device=device).world_size == 1:
        return SoloComm()
    return _comm(leave=cleanup)


def current() -> Comm:
    """Return the communicator of the group that was joined, by whoever it was; of this process alone without one.

    Raises:
        UsageError: the job has several ranks that have not joined: each would train on its own without a word.
    """
    global _current
    if dist.is_initialized():
        _current = _current or _comm()
        return _current
    world_size = from_environment().world_size
    if world_size > 1:
        raise UsageError(f"WORLD_SIZE is {world_size} and the ranks have not joined; call lockstep.init() first")
    return SoloComm()


def _comm(leave: Callable[[], None] = lambda: None) -> GroupComm:
    return GroupComm(collectives(), leave)


def collectives() -> Collectives | CheckedCollectives:
    """Return the operations of the joined group: one object for all, which counts, and checks, them in one sequence."""
    global _collectives, _num_checked
    if _collectives is None:
        _collectives = Collectives(device_of_group(), _direct)
        if torch_debug.is_wanted():
            _num_checked += 1
            store = PrefixStore(f"{PREFIX}/debug/{_num_checked}", store_of_group())
            _collectives = CheckedCollectives(_collectives, store)
    return _collectives


def cleanup() -> None:
    """Leave the process group, if there is one."""
    global _collectives, _current, _direct
    torch_nodes.leave()
    if isinstance(_collectives, CheckedCollectives):
        _collectives.close()
    if _direct is not None:
        _direct.close()
    _collectives = _current = _direct = None
    if dist.is_initialized():
        # Ranks that are inside an exchange may keep nccl from ending. Then the process has better things to do.
        leaving = threading.Thread(target=dist.destroy_process_group, name="lockstep-leave", daemon=True)
        leaving.start()
        leaving.join(LEAVE_TIMEOUT_S)


def barrier() -> None:
    """Wait until every rank is here; without a group return at once."""
    if dist.is_initialized():
        token = torch.ones(1, device=device_of_group())
        collectives().all_reduce_(token, "barrier")
        token.item()  # a GPU's exchange is over only when its result can be read


def device_of_group() -> torch.device:
    """Return where tensors of the joined group live."""
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")


def store_of_group() -> Store:
    """Return the joined group's key-value store."""
    return dist.distributed_c10d._get_default_store()
