"""Hosts that vanish: the nodes of a job hold connections to one another that tell when a host or its network is gone.

When a cable is cut TCP says nothing, and an exchange would wait for its long time-out. So the first rank of every node,
its leader, keeps an idle connection to the leader of every other node, and has the kernel ask every second whether the
other end is there (keep-alive). Kernels ask and answer: a process that is stopped, or whose main thread keeps Python's
lock, is never taken for a host that is gone. The other ranks of a node learn from their leader that a host is lost,
since torchrun's agent, whose own store may be on that host, can't be relied on to end them.
"""

import contextlib
import errno
import json
import os
import secrets
import select
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict

from torch.distributed import DistError
from torch.distributed.distributed_c10d import PrefixStore, Store

from lockstep.core import saves
from lockstep.core.blame import Limits
from lockstep.core.outcome import own_run
from lockstep.distributed import heartbeat
from lockstep.distributed.greeting import greeted_by, hello, new_token
from lockstep.distributed.nodes import MAX_NAMED, Node, error_of, in_words, keep_asking, own_address, silence_s
from lockstep.distributed.rank_exit import RankExit
from lockstep.distributed.topology import Topology

CONNECT_S = 60.0
"""How long the leaders may take to connect; they have all met already, so they need an instant."""
SAVE_S = 5.0
"""How long the end of this process waits for a checkpoint that is being written."""
MARK_S = 2.0
"""How long it waits for the run to be marked as failed."""

_GATHER_S = 2.0
"""Hosts that vanish together are missed within so many seconds of one another."""
_LOOK_S = 0.1
_LEAVE_S = 2.0
_MAX_MESSAGE_BYTES = 65536
_TAKEN = b"+"


def start(topology: Topology, store: Store, limits: Limits | None = None) -> None:
    """Begin to watch the other nodes of this job, if it has any; every rank calls it once it has met the others.

    From then on this process ends with exit code 1, in words, when a host is lost. Nodes that can't be connected are
    named in a warning and not watched.

    Args:
        topology: of this rank.
        store: of this start of the ranks.
        limits: those of the environment by default.

    Raises:
        UsageError: LOCKSTEP_HANG_TIMEOUT_S is no number of seconds.
    """
    global _watch, _num_started
    limits = limits or Limits.from_environment(os.environ)
    is_one_node = topology.local_world_size == topology.world_size
    if limits.is_off or is_one_node or _watch is not None or sys.platform != "linux":
        return
    _num_started += 1  # what an earlier group of these processes has left in the store is not read
    _watch = NodeWatch(topology, PrefixStore(f"lockstep/nodes/{_num_started}", store), limits)
    _watch.start()


def leave() -> None:
    """Watch no longer, and let the others see that this rank has left."""
    global _watch
    if _watch is not None:
        _watch.stop()
        _watch = None


_watch: "NodeWatch | None" = None
_num_started = 0


def _forget() -> None:
    global _watch
    _watch = None


os.register_at_fork(after_in_child=_forget)  # the thread, and what it holds, are the parent's


class NodeWatch:
    """A thread that holds the connections of this rank and sleeps until something happens to one of them.

    Args:
        topology: of this rank.
        store: where the leaders say how they are reached; of this watch alone.
        limits: for how long a host need not answer.
    """

    def __init__(self, topology: Topology, store: Store, limits: Limits) -> None:
        self._topology, self._store = topology, store
        self._silent_s = silence_s(limits)
        self._leader = topology.rank - topology.local_rank
        self._wake, self._woken = os.pipe2(os.O_CLOEXEC)
        self._peers: dict[int, tuple[Node, socket.socket]] = {}
        """The leaders of other nodes, by descriptor."""
        self._siblings: list[socket.socket] = []
        """On the leader: the other ranks of this node. On those: the leader."""
        self._thread = threading.Thread(target=self._run, name="lockstep-nodes", daemon=True)

    def start(self) -> None:
        """Connect and watch, in the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Close the connections, which the others take for no loss."""
        os.write(self._woken, b".")
        self._thread.join(_LEAVE_S)
        if not self._thread.is_alive():  # else it may still look, once a store that hangs lets it
            for descriptor in (self._wake, self._woken):
                os.close(descriptor)

    def _run(self) -> None:
        try:
            # A store whose host is lost right now may block for ever, and only this thread with it.
            if self._topology.local_rank == 0:
                self._lead()
            else:
                self._follow()
        except (OSError, DistError, RuntimeError, ValueError, TypeError) as error:
            if self._topology.local_rank == 0 and not self._is_left():
                reason = str(error).partition("\n")[0]
                _warn(f"this host does not watch the others of the job ({reason})")
        finally:
            for each in (*self._siblings, *(connection for _, connection in self._peers.values())):
                each.close()

    def _lead(self) -> None:
        with contextlib.ExitStack() as listeners:
            own, by_network, by_name = self._listen(listeners)
            self._store.set(f"{own.first_rank}", json.dumps(asdict(own)))
            nodes = self._meet_nodes()
            others = [node for node in nodes if node.first_rank != own.first_rank]
            missing = self._connect(own, others)
            missing += self._accept(own, others, by_network, by_name)
        if missing and not self._is_left():
            names = ", ".join(node.in_words() for node in missing[:MAX_NAMED])
            _warn(f"there is no connection between this host and {names}; should it vanish, nothing will tell")
        lost, was_reset = self._wait_for_loss()
        if lost:
            message = in_words(lost, others, own, self._silent_s, was_reset, own_run())
            for sibling in self._siblings:
                with contextlib.suppress(OSError):
                    sibling.sendall(message.encode())
            _end(message, self._topology)

    def _listen(self, listeners: contextlib.ExitStack) -> tuple[Node, socket.socket, socket.socket]:
        address, interface = own_address(os.environ["MASTER_ADDR"])
        family = socket.AF_INET6 if ":" in interface else socket.AF_INET
        by_network = listeners.enter_context(socket.create_server((interface, 0), family=family, backlog=1024))
        by_name = listeners.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        name = f"lockstep-{secrets.token_hex(16)}"
        by_name.bind(f"\0{name}")
        by_name.listen(1024)
        topology, host, port = self._topology, socket.gethostname(), by_network.getsockname()[1]
        token = new_token()
        card = Node(topology.rank, topology.local_world_size, topology.node, host, address, port, name, token)
        return card, by_network, by_name

    def _meet_nodes(self) -> list[Node]:
        """Return all nodes of the job, in the order of their ranks."""
        nodes: list[Node] = []
        first_rank = 0
        while first_rank < self._topology.world_size:
            nodes.append(self._card_of(first_rank))
            first_rank += nodes[-1].num_ranks
        return nodes

    def _card_of(self, first_rank: int) -> Node:
        deadline = time.monotonic() + CONNECT_S
        while not self._store.check([f"{first_rank}"]):
            if self._is_left() or time.monotonic() > deadline:
                raise TimeoutError(f"rank {first_rank} has not said where it is")
            time.sleep(_LOOK_S)
        return Node(**json.loads(self._store.get(f"{first_rank}")))

    def _connect(self, own: Node, others: Sequence[Node]) -> list[Node]:
        """Connect to the leaders before this one; return the nodes that can't be reached."""
        missing = []
        for node in others:
            if node.first_rank < own.first_rank:
                try:
                    connection = socket.create_connection((node.address, node.port), timeout=self._silent_s)
                    connection.sendall(hello(own.first_rank, node.token))
                    # Before it is taken up it may be reset because the other leaves, and from then on never.
                    connection.settimeout(CONNECT_S)
                    if connection.recv(len(_TAKEN)) == _TAKEN:
                        self._add_peer(node, connection)
                except ConnectionError:
                    pass  # its host is well, so it has left
                except OSError:
                    missing.append(node)
        return missing

    def _accept(
        self, own: Node, others: Sequence[Node], by_network: socket.socket, by_name: socket.socket
    ) -> list[Node]:
        """Take up the leaders after this one and the other ranks of this node; return the nodes that do not come."""
        expected = {node.first_rank: node for node in others if node.first_rank > own.first_rank}
        siblings = set(own.ranks) - {own.first_rank}
        deadline = time.monotonic() + CONNECT_S
        while (expected or siblings) and not self._is_left() and time.monotonic() < deadline:
            ready = _ready([by_network.fileno(), by_name.fileno()], _LOOK_S)
            for listener in (by_network, by_name):
                if listener.fileno() not in ready:
                    continue
                connection, _ = listener.accept()
                rank = greeted_by(connection, own.token)
                if rank in siblings:
                    siblings.remove(rank)
                    self._siblings.append(connection)
                elif rank in expected:
                    self._add_peer(expected.pop(rank), connection)
                    with contextlib.suppress(OSError):  # it has left, or will be missed
                        connection.send(_TAKEN)
                else:
                    connection.close()
        return list(expected.values())

    def _add_peer(self, node: Node, connection: socket.socket) -> None:
        keep_asking(connection, self._silent_s)
        self._peers[connection.fileno()] = node, connection

    def _wait_for_loss(self) -> tuple[list[Node], bool]:
        """Sleep until hosts are lost; return them, and whether they have reset their connections. None: all is over."""
        lost: list[Node] = []
        errors: set[int] = set()
        deadline: float | None = None
        while deadline is None or time.monotonic() < deadline:
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            for descriptor in _ready([self._wake, *self._peers], left_s):
                if descriptor == self._wake:
                    return [], False
                node, connection = self._peers.pop(descriptor)
                error = error_of(connection)
                connection.close()
                if error:  # else its leader has left, or died, while its host is well
                    lost.append(node)
                    errors.add(error)
            if lost and deadline is None:
                deadline = time.monotonic() + (_GATHER_S if self._peers else 0.0)
        return sorted(lost, key=lambda node: node.first_rank), errors == {errno.ECONNRESET}

    def _follow(self) -> None:
        """Wait for what the leader says."""
        leader = self._card_of(self._leader)
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._siblings.append(connection)
        connection.connect(f"\0{leader.local_name}")
        connection.sendall(hello(self._topology.rank, leader.token))
        if self._wake in _ready([self._wake, connection.fileno()]):
            return
        message = connection.recv(_MAX_MESSAGE_BYTES).decode(errors="replace")
        if message:  # else the leader has left, or died: whoever is in an exchange with it learns that
            _end(message, self._topology)

    def _is_left(self) -> bool:
        return bool(_ready([self._wake], 0.0))


def _ready(descriptors: Sequence[int], timeout_s: float | None = None) -> list[int]:
    """Return where there is something to read or an error, after waiting for it, for ever by default."""
    poll = select.poll()  # unlike select() it takes any number of descriptors
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return [descriptor for descriptor, _ in poll.poll(None if timeout_s is None else timeout_s * 1e3)]


def _warn(text: str) -> None:
    heartbeat.say(f"lockstep: warning: {RankExit().prefix}{text}")


def _end(message: str, topology: Topology) -> None:
    """End this process; its main thread waits inside an exchange, where nothing reaches it."""
    deadline = time.monotonic() + SAVE_S
    while saves.in_progress() and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
    if topology.rank == 0:
        # The run may be on a host that is gone, where writing never ends.
        marking = threading.Thread(target=_mark_run, args=[message], name="lockstep-mark", daemon=True)
        marking.start()
        marking.join(MARK_S)
    RankExit().abort(message, is_said=topology.local_rank == 0)  # one for all ranks of the node


def _mark_run(reason: str) -> None:
    from lockstep.core.run_directory import mark_failed  # which scripts that keep no run do without

    run = own_run()
    if run is not None:
        mark_failed(run, reason)
