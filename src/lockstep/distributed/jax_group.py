"""The processes and devices of a JAX job: met once, with a deadline and in words, and left at the end of the process.

A rank is a device. One process may have several, and torchrun may start several processes, which then meet through
JAX's coordination service. Process 0 keeps that service on a port that it finds free, and tells the others where by way
of torchrun's store; or everybody is told by ``--coordinator_address``. What JAX would find out from SLURM or MPI counts
for nothing: who is in a job says RANK and WORLD_SIZE. A script that has called ``jax.distributed.initialize`` is used
as it is.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import importlib
import os
import re
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax._src import distributed as jax_distributed
from jax._src import xla_bridge
from jax.experimental import multihost_utils

from lockstep.core import beats
from lockstep.core.blame import Limits
from lockstep.core.errors import RunError, UsageError
from lockstep.core.network import address_towards, is_loopback
from lockstep.core.outcome import note_joined
from lockstep.distributed import heartbeat, jax_abort, jax_programs
from lockstep.distributed.first_exchange import deadline
from lockstep.distributed.gloo_threads import started_as_batch_work
from lockstep.distributed.jax_comm import JaxComm, OwnStore, Store
from lockstep.distributed.jax_devices import choose_devices, choose_platform
from lockstep.distributed.jax_mesh import make_mesh
from lockstep.distributed.nodes import own_address
from lockstep.distributed.rank_exit import end_at_once_on_failure
from lockstep.distributed.timeouts import JOIN_TIMEOUT_S, TIMEOUT_S, seconds
from lockstep.distributed.topology import Topology, from_environment

if TYPE_CHECKING:
    from lockstep.distributed.jax_mesh import RankMesh

HEARTBEAT_TIMEOUT_S = 30.0
"""After so many seconds at least without a sign of life JAX's own service takes a process for dead. The watch over
ranks, and that over hosts, are quicker; this is for where there is neither."""
LEAVE_TIMEOUT_S = 10
"""How long the processes wait for one another at the end."""

COORDINATOR = "JAX_COORDINATOR_ADDRESS"
"""JAX's own variable with HOST:PORT of the coordination service, the same for all processes."""

_NAME_THE_NETWORK = "GLOO_SOCKET_IFNAME (CPUs) or NCCL_SOCKET_IFNAME (GPUs) names the network between the hosts"
_MET, _LEFT = "lockstep/met/{}", "lockstep/left/{}"
_NEVER_S = 1e6
_LATER_S = 60.0
_num_joined = 0
_has_met = False
_store_of_job: Any = None


def join(
    device: str = "auto", *, num_devices: int = 0, multi_devices: bool = True, coordinator_address: str | None = None
) -> tuple[RankMesh, JaxComm]:
    """Meet the other processes, if there are any, and return the mesh of all ranks and the processes.

    Args:
        device: ``auto`` (GPUs if JAX sees any), ``cpu``, ``cuda`` or ``cuda:<index>``.
        num_devices: how many of each process's devices are ranks; 0 for all of them. Where JAX has not started yet and
            computes on the CPU, it makes that many out of it, or more if it has been told of more.
        multi_devices: False for one device of each process.
        coordinator_address: HOST:PORT where process 0 keeps JAX's service; None for what JAX_COORDINATOR_ADDRESS says
            or, without that, for a free port that is told through torchrun's store.

    Raises:
        UsageError: no such devices, or JAX has started before the processes could meet.
        RunError: processes are missing after LOCKSTEP_JOIN_TIMEOUT_S seconds; they are named.
    """
    global _num_joined
    topology = from_environment()
    wanted = 1 if not multi_devices else num_devices
    choose_platform(device, wanted)
    if topology.world_size > 1 and not jax.distributed.is_initialized():
        _meet(topology, coordinator_address or os.environ.get(COORDINATOR))
    if not jax.distributed.is_initialized():
        jax_programs.keep()
    with _first_exchange():
        devices = choose_devices(device, wanted)
        mesh = make_mesh(devices)
        _check_network()
    _num_joined += 1
    comm = JaxComm(
        jax.process_index(),
        jax.process_count(),
        mesh.num_ranks,
        _store(),
        prefix=f"lockstep/comm/{_num_joined}",
        timeout_s=seconds("LOCKSTEP_TIMEOUT_S", TIMEOUT_S),
    )
    return mesh, comm


def init(device: str = "auto", *, num_devices: int = 0, coordinator_address: str | None = None) -> RankMesh:
    """Meet the other processes of the job, if there are any, and return the mesh of all ranks.

    For scripts that the launcher (``train_multigpu --script``) or torchrun starts; call it before anything else of JAX.
    In a single process it returns the mesh of its own devices. A second call returns an equal mesh.

    Args:
        device: see ``join``, as for the others.
        num_devices: see there.
        coordinator_address: see there.

    Raises:
        UsageError, RunError: as ``join``.
    """
    heartbeat.begin()
    mesh, _ = join(device, num_devices=num_devices, coordinator_address=coordinator_address)
    return mesh


def is_set_up() -> bool:
    """Return whether a script has started JAX, or told it of processes or CPU devices otherwise than by variables."""
    options: Any = jax.config
    by_variable = os.environ.get("JAX_NUM_CPU_DEVICES", "")
    num_cpu_devices = int(by_variable) if by_variable.isdecimal() else -1
    return (
        xla_bridge.backends_are_initialized()
        or jax.distributed.is_initialized()
        or options.jax_num_cpu_devices != num_cpu_devices
    )


def is_joined() -> bool:
    """Return whether this process has met others, by this module or by the user's own code."""
    return jax.distributed.is_initialized() and jax.process_count() > 1


def _meet(topology: Topology, address: str | None) -> None:
    """Start JAX's coordination service on process 0 and connect all processes to it.

    Raises:
        UsageError: JAX has started already, the address is malformed, or torchrun did not start this process.
        RunError: processes are missing.
    """
    global _has_met
    if xla_bridge.backends_are_initialized():
        raise UsageError(
            "JAX has started in this process before the ranks could meet; call lockstep.train, or "
            "jax.distributed.initialize, before anything that computes with JAX"
        )
    if address is not None:
        _require_host_and_port(address)
    timeout_s = seconds("LOCKSTEP_JOIN_TIMEOUT_S", JOIN_TIMEOUT_S)
    with beats.exchange("meeting"), contextlib.ExitStack() as held:
        address = _agree_on_address(topology, address, timeout_s, held)
        _prepare(topology, address)
        _initialize(topology, address, timeout_s)
    _has_met = True
    atexit.register(leave)
    end_at_once_on_failure(is_joined)
    jax_abort.explain(_ServiceStore(jax_distributed.global_state.client).check)


def _require_host_and_port(address: str) -> None:
    host, _, port = address.rpartition(":")
    is_port = re.fullmatch("[0-9]{1,5}", port) and 1 <= int(port) <= 65535
    if not is_port or not re.fullmatch(r"[^\s:\[\]]+|\[[^\s\[\]]+\]", host):
        raise UsageError(
            f"the coordinator's address {address!r} is not of the form HOST:PORT (an IPv6 address in brackets); give "
            f"all processes the same {COORDINATOR}"
        )


def _agree_on_address(topology: Topology, address: str | None, timeout_s: float, held: contextlib.ExitStack) -> str:
    """Return where process 0 keeps the service, once all have met in torchrun's store, which tells who is missing.

    Without an address process 0 finds one; its port is held there until ``held`` ends.
    """
    global _store_of_job
    missing = next((name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ), None)
    if missing is not None:
        if address is not None:
            return address  # whoever started the processes keeps no store
        raise UsageError(
            f"{missing} is not set although WORLD_SIZE is {topology.world_size}; start with torchrun, or name JAX's "
            f"coordinator in {COORDINATOR}"
        )
    # The store is torchrun's, which speaks torch; only here is torch needed, and only for a few words.
    torch_store = importlib.import_module("lockstep.distributed.torch_store")
    # Where no agent keeps it this process may do so, and the others have yet to read what is announced in it.
    _store_of_job = store = torch_store.meet(topology)
    if address is None:
        own = None
        if topology.rank == 0:
            host, interface = own_address(os.environ["MASTER_ADDR"])
            own = _address(host, held.enter_context(_free_port(interface)))
        address = torch_store.announce(store, "coordinator", own, timeout_s)
    importlib.import_module("lockstep.distributed.torch_nodes").start(topology, store)
    return address


@contextlib.contextmanager
def _free_port(interface: str) -> Iterator[int]:
    """Return a port that nobody has, and that nobody else gets while this context lasts.

    JAX's server may take it all the same, since both allow others of the same user on it (SO_REUSEPORT).
    """
    family = socket.AF_INET6 if ":" in interface else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as holder:
        if hasattr(socket, "SO_REUSEPORT"):
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind((interface, 0))
        yield holder.getsockname()[1]


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _prepare(topology: Topology, address: str) -> None:
    """Set JAX up for several processes: what it does by default would swallow SIGTERM, or talk past the others."""
    jax.config.update("jax_enable_preemption_service", False)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    host = address.rpartition(":")[0].strip("[]")
    if any(name.lower().endswith("_proxy") for name in os.environ):
        # The processes of a job reach one another directly, whatever stands between them and the rest of the world.
        known = [os.environ.get(name, "") for name in ("no_proxy", "NO_PROXY")]
        os.environ["no_proxy"] = ",".join(filter(None, [*known, host]))
        jax.config.update("jax_check_proxy_envs", False)
    xla_bridge.register_backend_factory("cpu", functools.partial(_make_cpu_client, topology, host), priority=0)


def _make_cpu_client(topology: Topology, host: str) -> Any:
    """Return JAX's CPU backend with gloo on the network that leads to the coordinator.

    By itself gloo takes the address that this host's name leads to, which often only this host knows.
    """
    from jaxlib import _jax

    where: dict[str, str] = {}
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    if interface:
        where = {"interface": interface}
    else:
        is_one_host = topology.world_size == topology.local_world_size
        address = "127.0.0.1" if is_one_host else address_towards(host)
        if address is not None and (is_one_host or not is_loopback(address)):
            where = {"hostname": address}
    client = jax_distributed.global_state.client
    with started_as_batch_work():
        gloo = _jax.make_gloo_tcp_collectives(distributed_client=client, **where)
    return xla_bridge.make_cpu_client(collectives=gloo)


def _initialize(topology: Topology, address: str, timeout_s: float) -> None:
    mend = f"JAX's coordinator is to be at {address}, which must be that of process 0 and reachable from everywhere"
    others = [rank for rank in range(topology.world_size) if rank != topology.rank]
    try:
        # JAX itself would abort the process, with a stack trace.
        with deadline(timeout_s, topology.world_size, lambda: others, mend):
            jax.distributed.initialize(
                address,
                topology.world_size,
                topology.rank,
                cluster_detection_method="deactivate",
                initialization_timeout=round(timeout_s + _LATER_S),
                heartbeat_timeout_seconds=round(_heartbeat_timeout_s()),
                shutdown_timeout_seconds=LEAVE_TIMEOUT_S,
            )
    except RuntimeError as error:
        raise RunError(
            f"rank {topology.rank} can't meet the others ({' '.join(str(error).split())[:300]}); {mend}"
        ) from error


def _heartbeat_timeout_s() -> float:
    """Return after how long JAX may take a process for dead: later than whoever watches over ranks."""
    limits = Limits.from_environment(os.environ)
    return _NEVER_S if limits.is_off else max(HEARTBEAT_TIMEOUT_S, 1.5 * limits.hang_s)


@contextlib.contextmanager
def _first_exchange() -> Iterator[None]:
    """End the process, in words, if the processes can't reach one another; then the launcher is told that they have."""
    topology = from_environment()
    if not jax.distributed.is_initialized() or _num_joined:
        yield
        return
    store, timeout_s = _store(), seconds("LOCKSTEP_JOIN_TIMEOUT_S", JOIN_TIMEOUT_S)

    def silent() -> Sequence[int]:
        everyone = range(jax_distributed.global_state.num_processes)
        return [rank for rank in everyone if store.get(_MET.format(rank), 0.01) is None] or everyone

    with beats.exchange("meeting"), deadline(timeout_s, topology.world_size, silent, _NAME_THE_NETWORK):
        yield
        store.set(_MET.format(jax_distributed.global_state.process_id), "1")
    note_joined(topology.rank)


def _check_network() -> None:
    """Exchange the first numbers.

    Raises:
        RunError: they do not come, or come wrong.
    """
    if jax.process_count() == 1 or _num_joined:
        return
    try:
        numbers = np.asarray(multihost_utils.process_allgather(np.int32(jax.process_index()))).flatten().tolist()
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).strip().partition("\n")[0]
        raise RunError(f"the ranks can't reach one another ({reason}); {_NAME_THE_NETWORK}") from error
    if numbers != list(range(jax.process_count())):
        raise RunError(f"the numbers of {jax.process_count()} processes arrive as {numbers}; the network is broken")


class _ServiceStore:
    """The key-value store of JAX's coordination service."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def set(self, key: str, text: str) -> None:
        self._client.key_value_set(key, text)

    def get(self, key: str, timeout_s: float) -> str | None:
        try:
            return str(self._client.blocking_key_value_get(key, max(1, round(timeout_s * 1e3))))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" in str(error) or "NOT_FOUND" in str(error):
                return None
            raise

    def check(self) -> None:
        """Raise what JAX raises if the service has failed."""
        try:
            self._client.key_value_try_get(_MET.format("nobody"))
        except jax.errors.JaxRuntimeError as error:
            if "NOT_FOUND" not in str(error):
                raise

    def delete(self, key: str) -> None:
        self._client.key_value_delete(key)


def _store() -> Store:
    client = jax_distributed.global_state.client
    return OwnStore() if client is None else _ServiceStore(client)


def leave() -> None:
    """Leave the job, together with the others or, where they don't come, without them."""
    global _has_met
    if not _has_met:
        return
    _has_met = False
    nodes = sys.modules.get("lockstep.distributed.torch_nodes")
    if nodes is not None:
        nodes.leave()
    state = jax_distributed.global_state
    if _all_leave(state.num_processes):
        jax.distributed.shutdown()
        return
    # JAX would wait for them, and then abort this process, which has done its work. So it is never told of the end.
    for kept in (state.client, state.service):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
    state.client = state.service = None


def _all_leave(num_processes: int) -> bool:
    """Return whether all processes come to the end of theirs."""
    store, deadline_s = _store(), time.monotonic() + LEAVE_TIMEOUT_S
    try:
        store.set(_LEFT.format(jax_distributed.global_state.process_id), "1")
        left = range(num_processes)
        return all(store.get(_LEFT.format(rank), max(0.01, deadline_s - time.monotonic())) is not None for rank in left)
    except jax.errors.JaxRuntimeError:
        return False
