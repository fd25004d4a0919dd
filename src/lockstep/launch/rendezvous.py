"""How the nodes of a job find one another: a meeting point that belongs to this job alone, or none at all."""

import errno
import re
import socket
from dataclasses import dataclass, replace

from lockstep.core.errors import UsageError, nearest
from lockstep.core.network import address_towards, is_loopback, is_own

_STATIC = ("node_rank", "master_addr", "master_port")
_MEETING = ("rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf")
_BACKENDS = ("c10d", "etcd", "etcd-v2")
_MAX_NODES = 65536
_LAST_PORT = 65535
_HOST = re.compile(r"[\w.-]+|\[[0-9a-fA-F:.]+(%\w+)?\]", re.ASCII)
_ID = re.compile(r"[\w.:+@-]+", re.ASCII)


@dataclass(frozen=True)
class Nodes:
    """What the command line says about nodes, as text; None where nothing was said."""

    nnodes: str | None = None
    node_rank: str | None = None
    master_addr: str | None = None
    master_port: str | None = None
    rdzv_backend: str | None = None
    rdzv_endpoint: str | None = None
    rdzv_id: str | None = None
    rdzv_conf: str | None = None
    local_addr: str | None = None


@dataclass(frozen=True)
class Rendezvous:
    """Where the nodes meet, checked."""

    num_nodes: int
    """The most there can be."""
    node_rank: int | None
    """None if the nodes get their numbers only when they meet."""
    host: str
    """An IPv6 address is in brackets."""
    description: str
    arguments: tuple[str, ...]
    """Of torchrun."""
    plain_arguments: tuple[str, ...]
    """The same as one would type it for torchrun by hand."""
    listens_on: int | None = None
    """The port on which this node will listen, if it is known beforehand."""
    may_listen_on: int | None = None
    """The port on which this node will listen unless another node of the job on this host does so already."""
    endpoint: str | None = None
    """As HOST:PORT; None on one node that chooses it at the start."""
    min_nodes: int | None = None
    """The fewest that an elastic job runs on; None for a fixed number of nodes."""

    @property
    def is_elastic(self) -> bool:
        """Whether nodes may come and go while the job runs."""
        return self.min_nodes is not None

    @property
    def count(self) -> str:
        """The number of nodes in words."""
        many = f"{self.num_nodes} node{'s' if self.num_nodes > 1 else ''}"
        return many if self.min_nodes is None else f"{self.min_nodes} to {many}"


def plan_rendezvous(nodes: Nodes, job: str) -> Rendezvous:
    """Return where the nodes of a job meet; ``job`` is an id that no other job has.

    Raises:
        UsageError: something is missing, malformed or contradicts something else.
    """
    min_nodes, num_nodes = (1, 1) if nodes.nnodes is None else _num_nodes(nodes.nnodes)
    static = [name for name in _STATIC if getattr(nodes, name) is not None]
    meeting = [name for name in _MEETING if getattr(nodes, name) is not None]
    if nodes.local_addr is not None and not _HOST.fullmatch(_bracketed(nodes.local_addr)):
        raise UsageError(f"local_addr {nodes.local_addr!r} is no host name or address")
    if static and meeting:
        raise UsageError(
            f"--{static[0]} and --{meeting[0]} belong to two ways of finding the other nodes; keep --node_rank, "
            "--master_addr and --master_port, or keep --rdzv_*"
        )
    if static and min_nodes < num_nodes:
        raise UsageError(
            f"--nnodes {nodes.nnodes} is for nodes that come and go, which --{static[0]} can't count; let them find "
            "each other by --rdzv_endpoint HOST:PORT --rdzv_id ID, or give one number"
        )
    if static:
        return _static(nodes, num_nodes)
    if meeting:
        return _meeting(nodes, min_nodes, num_nodes, job)
    if min_nodes < num_nodes:
        raise UsageError(
            f"--nnodes {nodes.nnodes} needs --rdzv_endpoint HOST:PORT --rdzv_id ID, where nodes come and go"
        )
    if num_nodes > 1:
        raise UsageError(
            f"{num_nodes} nodes must find one another: add --node_rank R --master_addr A --master_port P (with JAX, "
            "--node_rank R --coordinator_address HOST:PORT will do), or --rdzv_endpoint HOST:PORT --rdzv_id ID"
        )
    return Rendezvous(
        num_nodes=1,
        node_rank=0,
        host="localhost",
        description="on this node alone, on a free port that is chosen at the start",
        arguments=(
            "--nnodes=1",
            "--rdzv_backend=c10d",
            "--rdzv_endpoint=localhost:0",
            f"--rdzv_id={job}",
            # Ranks on one node need no name service, which may know this host by an address that is not up.
            f"--local_addr={nodes.local_addr or '127.0.0.1'}",
        ),
        plain_arguments=("--standalone",),
    )


def with_coordinator(nodes: Nodes, address: str | None) -> Nodes:
    """Return nodes that are told where JAX's coordinator is with a place to meet, as far as they are told of none.

    It is on the same host, by the port after the coordinator's.

    Raises:
        UsageError: the address is malformed.
    """
    meeting = [name for name in _MEETING if getattr(nodes, name) is not None]
    if address is None or nodes.node_rank is None or meeting:
        return nodes
    host, port = _host_and_port(address)
    beside = str(port + 1 if port < _LAST_PORT else port - 1)
    return replace(nodes, master_addr=nodes.master_addr or host, master_port=nodes.master_port or beside)


def check_port(rendezvous: Rendezvous) -> None:
    """Raise UsageError if this node is to listen on a port that it can't have; others would join the wrong job."""
    port = rendezvous.listens_on
    if port is None:
        return
    reason = _why_not_free(port)
    if reason == errno.EADDRINUSE:
        raise UsageError(
            f"port {port} of this node is taken, perhaps by another job; choose another --master_port, the same on "
            "every node"
        )
    if reason == errno.EACCES:
        raise UsageError(
            f"port {port} is not for ordinary users; choose a --master_port above 1023, the same on every node"
        )


def checked_address(address: str | None, rendezvous: Rendezvous) -> str | None:
    """Return where the processes of JAX are to meet, as it was given.

    Raises:
        UsageError: it is malformed, or process 0 can't listen there.
    """
    if address is None:
        return None
    _, port = _host_and_port(address)
    if rendezvous.node_rank is None:
        raise UsageError(
            f"coordinator_address {address} is that of process 0, and with --rdzv_endpoint nobody knows beforehand on "
            "which node that is; leave it out (process 0 then tells the others), or number the nodes by --node_rank"
        )
    if address == rendezvous.endpoint:
        raise UsageError(
            f"coordinator_address {address} is where the nodes meet already; give JAX's coordinator a port of its own"
        )
    if rendezvous.node_rank == 0:
        reason = _why_not_free(port)
        if reason is not None:
            why = "is taken, perhaps by another job" if reason == errno.EADDRINUSE else "is not for ordinary users"
            raise UsageError(
                f"port {port} of this node {why}; choose another one for --coordinator_address, the same on every node"
            )
    return address


def _host_and_port(address: str) -> tuple[str, int]:
    host, colon, port = address.rpartition(":")
    if not colon or not _HOST.fullmatch(host):
        raise UsageError(
            f"coordinator_address {address!r} is not of the form HOST:PORT (an IPv6 address in brackets); HOST is that "
            "of process 0, the port is free there"
        )
    return host, _port("the port of coordinator_address", port)


def _why_not_free(port: int) -> int | None:
    """Return the error that listening on a port of this host gives: EADDRINUSE, EACCES or None."""
    for family, address in ((socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0")):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as listener:
                # As torch's own server: a port whose last job has just ended is free.
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind((address, port))
                listener.listen()
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return error.errno
            # Else a family that this host does not have.
    return None


def concern(rendezvous: Rendezvous) -> str | None:
    """Return what is wrong with the host where the nodes meet, as seen from here; it may come up yet."""
    try:
        socket.getaddrinfo(rendezvous.host.strip("[]"), None)
    except (OSError, UnicodeError) as error:  # the latter for what can't be a host name at all
        reason = error.strerror if isinstance(error, OSError) else "not a name"
        return f"host {rendezvous.host} is not known here so far ({reason}); is it spelled right?"
    if rendezvous.listens_on is not None and rendezvous.num_nodes > 1 and not is_own(rendezvous.host.strip("[]")):
        return f"{rendezvous.host} is no address of this node, where node 0 listens; the others will not find it there"
    port = rendezvous.may_listen_on
    obstacle = None if port is None else _why_not_free(port)
    if obstacle == errno.EADDRINUSE:
        return (
            f"port {port} of this node is taken already; unless it is by this job's launcher for another node, choose "
            "another port for --rdzv_endpoint, the same on every node"
        )
    if obstacle == errno.EACCES:
        return (
            f"port {port} is not for ordinary users; choose one above 1023 for --rdzv_endpoint, the same on every node"
        )
    return None


def _static(nodes: Nodes, num_nodes: int) -> Rendezvous:
    missing = [name for name in ("nnodes", *_STATIC) if getattr(nodes, name) is None]
    if missing:
        raise UsageError(
            f"{_missing(missing)}; several nodes need --nnodes, --node_rank, --master_addr and --master_port, one node "
            "none of them"
        )
    assert nodes.node_rank is not None and nodes.master_addr is not None and nodes.master_port is not None
    node_rank = _whole_number("node_rank", nodes.node_rank)
    if not 0 <= node_rank < num_nodes:
        raise UsageError(f"node_rank {node_rank} must lie in 0 to {num_nodes - 1}, since nnodes is {num_nodes}")
    address = _bracketed(nodes.master_addr)
    if not _HOST.fullmatch(address):
        raise UsageError(f"master_addr {nodes.master_addr!r} is no host name or address; the port is --master_port")
    port = _port("master_port", nodes.master_port)
    arguments = (
        f"--nnodes={num_nodes}",
        f"--node_rank={node_rank}",
        f"--master_addr={address}",
        f"--master_port={port}",
        *_local_addr(nodes),
    )
    return Rendezvous(
        num_nodes=num_nodes,
        node_rank=node_rank,
        host=address,
        description=f"at {address}:{port}, where node 0 listens",
        arguments=arguments,
        plain_arguments=arguments,
        listens_on=port if node_rank == 0 else None,
        endpoint=f"{address}:{port}",
    )


def _meeting(nodes: Nodes, min_nodes: int, num_nodes: int, job: str) -> Rendezvous:
    backend = nodes.rdzv_backend or "c10d"
    if backend not in _BACKENDS:
        mend = "; for static write --node_rank, --master_addr and --master_port" if backend == "static" else ""
        raise UsageError(
            f"rdzv_backend {backend!r} is not one of {', '.join(_BACKENDS)}{mend or nearest(backend, _BACKENDS)}"
        )
    missing = [name for name in ("rdzv_endpoint", "rdzv_id") if getattr(nodes, name) is None]
    if missing and (num_nodes > 1 or backend != "c10d"):
        raise UsageError(
            f"{_missing(missing)}; the nodes meet at --rdzv_endpoint HOST:PORT under --rdzv_id ID, an id that is this "
            "job's alone and the same on every node"
        )
    endpoint = "localhost:0" if nodes.rdzv_endpoint is None else _endpoint(nodes.rdzv_endpoint, num_nodes)
    if nodes.rdzv_id is not None and not _ID.fullmatch(nodes.rdzv_id):
        raise UsageError(f"rdzv_id {nodes.rdzv_id!r} must be letters, digits and any of . _ - : + @")
    if nodes.rdzv_conf is not None and not re.fullmatch(r"[^=,\s]+=[^=,]+(,[^=,\s]+=[^=,]+)*", nodes.rdzv_conf):
        raise UsageError(f"rdzv_conf {nodes.rdzv_conf!r} is not of the form KEY=VALUE,KEY=VALUE")
    arguments = (
        f"--nnodes={num_nodes if min_nodes == num_nodes else f'{min_nodes}:{num_nodes}'}",
        f"--rdzv_backend={backend}",
        f"--rdzv_endpoint={endpoint}",
        f"--rdzv_id={nodes.rdzv_id or job}",
        *_rdzv_conf(nodes, num_nodes, backend, endpoint),
        *_local_addr(nodes, endpoint if num_nodes > 1 else None),
    )
    host, _, port = endpoint.rpartition(":")
    is_known = port != "0"
    listens = is_known and backend == "c10d" and "is_host=0" not in (nodes.rdzv_conf or "") and is_own(host.strip("[]"))
    return Rendezvous(
        num_nodes=num_nodes,
        node_rank=0 if num_nodes == 1 else None,
        host=host,
        description=f"at {endpoint} ({backend}), id {nodes.rdzv_id or job}",
        arguments=arguments,
        plain_arguments=arguments,
        may_listen_on=int(port) if listens else None,
        endpoint=endpoint if is_known else None,
        min_nodes=min_nodes if min_nodes < num_nodes else None,
    )


def _missing(names: list[str]) -> str:
    flags = [f"--{name}" for name in names]
    *front, last = flags
    return f"{', '.join(front)} and {last} are missing" if front else f"{last} is missing"


def _num_nodes(text: str) -> tuple[int, int]:
    """Return the fewest and the most nodes."""
    least, colon, most = text.partition(":")
    numbers = [_whole_number("nnodes", each) for each in ((least, most) if colon else (text,))]
    for number in numbers:
        if not 1 <= number <= _MAX_NODES:
            raise UsageError(f"nnodes must lie in 1 to {_MAX_NODES}, not {number}")
    if numbers[0] > numbers[-1]:
        raise UsageError(f"nnodes {text} must be MIN:MAX, with MIN no larger than MAX; did you mean {most}:{least}?")
    return numbers[0], numbers[-1]


def _endpoint(text: str, num_nodes: int) -> str:
    host, colon, port = text.rpartition(":")
    if not colon or not _HOST.fullmatch(host):
        raise UsageError(
            f"rdzv_endpoint {text!r} is not of the form HOST:PORT (an IPv6 address in brackets); no port is taken for "
            "granted"
        )
    if port == "0" and num_nodes == 1:
        return text
    return f"{host}:{_port('the port of rdzv_endpoint', port)}"


def _port(name: str, text: str) -> int:
    port = _whole_number(name, text)
    if not 1 <= port <= _LAST_PORT:
        raise UsageError(f"{name} must lie in 1 to {_LAST_PORT}, not {port}")
    return port


def _whole_number(name: str, text: str) -> int:
    if not re.fullmatch(r"[+-]?[0-9]{1,9}", text):
        raise UsageError(f"{name} must be a whole number, not {text[:80]!r}")
    return int(text)


def _bracketed(address: str) -> str:
    """Return an IPv6 address in the brackets that torchrun wants, anything else as it is."""
    return f"[{address}]" if ":" in address and not address.startswith("[") else address


def _local_addr(nodes: Nodes, endpoint: str | None = None) -> tuple[str, ...]:
    """Return under which address other nodes reach this one: that on the way to where they all meet.

    torchrun would take this host's name, which often leads to an address that only this host knows.
    """
    address = nodes.local_addr or (endpoint and address_towards(endpoint.rpartition(":")[0].strip("[]")))
    return () if not address else (f"--local_addr={address}",)


def _rdzv_conf(nodes: Nodes, num_nodes: int, backend: str, endpoint: str) -> tuple[str, ...]:
    """Return the settings of the rendezvous; one node must keep it, which torchrun tells by the host's name alone."""
    settings = [] if nodes.rdzv_conf is None else [nodes.rdzv_conf]
    host = endpoint.rpartition(":")[0].strip("[]")
    # Of launchers on one host only the first can keep it; at a loopback address torchrun finds that out by itself.
    if num_nodes > 1 and backend == "c10d" and not any("is_host=" in each for each in settings):
        if not is_own(host):
            settings.append("is_host=0")
        elif not is_loopback(host):
            settings.append("is_host=1")
    return (f"--rdzv_conf={','.join(settings)}",) if settings else ()
