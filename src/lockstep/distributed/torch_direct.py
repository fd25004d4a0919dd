"""Small exchanges between the ranks of one host, through sockets of their own and on the rank's own thread.

Gloo hands every operation to threads of its own and sends it by TCP: for a buffer of 36 kB that costs 0.5 ms of
processor time on the cores that the ranks compute on, against 0.1 ms here (measured with torch 2.13, two ranks). Every
message says which exchange it belongs to, so ranks that have parted are told at once instead of adding up what does not
belong together.
"""

import os
import secrets
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta

import torch
from torch.distributed import DistError
from torch.distributed.distributed_c10d import Store

from lockstep.core.errors import RunError

MAX_RANKS = 16
"""Every rank sends to every other; beyond this many a reduction in steps is cheaper."""
MAX_BYTES = 160 * 1024
"""What a socket takes at once under Linux's default limits: a message is on its way while its sender computes."""

_HEADER_BYTES = 64  # what follows is aligned for every type
_BUFFER_BYTES = 4 * MAX_BYTES
_HELLO = struct.Struct("<I")
_SEQUENCE = struct.Struct("<Q")


class DirectExchange:
    """Sends every rank's message to every other rank of this host, in the order in which exchanges are started.

    Args:
        rank: of this process.
        sockets: by rank, the connection to each of the others.
        timeout_s: how long an exchange may take.
    """

    def __init__(self, rank: int, sockets: Mapping[int, socket.socket], timeout_s: float) -> None:
        self.rank, self.world_size = rank, len(sockets) + 1
        self._neighbours = [_Neighbour(other, sockets[other]) for other in sorted(sockets)]
        self._timeout_s = timeout_s
        self._num_started = 0
        self._waited_s = 0.0

    def fits(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is small enough, and on the CPU."""
        return tensor.device.type == "cpu" and tensor.nbytes <= MAX_BYTES

    def start(self, tensor: torch.Tensor, name: str, tag: str) -> "Exchange":
        """Begin to send a tensor (contiguous) to all others, and to receive theirs; it may be overwritten at once."""
        self._num_started += 1
        message = tensor.detach().view(-1).view(torch.uint8)
        table = torch.empty((self.world_size, _HEADER_BYTES + message.numel()), dtype=torch.uint8)
        header = _header(self._num_started, f"{name} of {tensor.nbytes} bytes, {tag}")
        table[self.rank, :_HEADER_BYTES] = torch.frombuffer(header, dtype=torch.uint8)
        table[self.rank, _HEADER_BYTES:] = message
        rows = table.numpy()
        for neighbour in self._neighbours:
            neighbour.begin(memoryview(rows[self.rank]), memoryview(rows[neighbour.rank]))
            with suppress(OSError):  # waiting tells in words
                neighbour.send()
        return Exchange(self, self._num_started, table, tensor, tag)

    def finish(self, number: int, tag: str) -> None:
        """Wait until an exchange, and with it all before it, is over.

        Raises:
            RunError: a rank has ended, does not answer, or is in another exchange.
        """
        began = time.monotonic()
        deadline = began + self._timeout_s
        while waiting := [each for each in self._neighbours if each.num_received < number or each.num_sent < number]:
            for neighbour in waiting:
                try:
                    neighbour.send()
                    neighbour.receive()
                except OSError as error:
                    raise _lost(neighbour.rank, tag) from error
            waiting = [each for each in waiting if each.num_received < number or each.num_sent < number]
            if waiting:
                _wait_for(waiting, deadline, tag, self._timeout_s)
        self._waited_s += time.monotonic() - began

    def take_wait_s(self) -> float:
        """Return the seconds spent in ``finish`` since the last call."""
        taken, self._waited_s = self._waited_s, 0.0
        return taken

    def close(self) -> None:
        """Close the connections."""
        for neighbour in self._neighbours:
            neighbour.socket.close()


class Exchange:
    """One exchange under way."""

    def __init__(
        self, direct: DirectExchange, number: int, table: torch.Tensor, tensor: torch.Tensor, tag: str
    ) -> None:
        self._direct, self._number, self._tag = direct, number, tag
        self._table, self._dtype, self._shape = table, tensor.dtype, tensor.shape

    def wait(self) -> list[torch.Tensor]:
        """Return every rank's tensor, by rank."""
        self._direct.finish(self._number, self._tag)
        return [row[_HEADER_BYTES:].view(self._dtype).view(self._shape) for row in self._table]


class _Neighbour:
    """Another rank: what is still to be sent to it and received from it, in order."""

    def __init__(self, rank: int, connection: socket.socket) -> None:
        self.rank, self.socket = rank, connection
        self.num_sent = self.num_received = 0
        self._outgoing: deque[memoryview] = deque()
        self._incoming: deque[_Incoming] = deque()
        connection.setblocking(False)

    @property
    def events(self) -> int:
        """What ``poll`` is to look for."""
        return select.POLLIN | (select.POLLOUT if self._outgoing else 0)

    def begin(self, outgoing: memoryview, incoming: memoryview) -> None:
        self._outgoing.append(outgoing)
        self._incoming.append(_Incoming(self.rank, outgoing[:_HEADER_BYTES], incoming))

    def send(self) -> None:
        """Send what the socket takes now."""
        with suppress(BlockingIOError):
            while self._outgoing:
                rest = self._outgoing[0]
                rest = rest[self.socket.send(rest) :]
                if rest:
                    self._outgoing[0] = rest
                else:
                    self._outgoing.popleft()
                    self.num_sent += 1

    def receive(self) -> None:
        """Take what has arrived."""
        with suppress(BlockingIOError):
            while self._incoming:
                if not self._incoming[0].receive_from(self.socket):
                    continue
                self._incoming.popleft()
                self.num_received += 1


class _Incoming:
    """A message on its way here."""

    def __init__(self, rank: int, expected: memoryview, into: memoryview) -> None:
        self._rank, self._expected = rank, expected
        self._into = into
        self._num_bytes = 0

    def receive_from(self, connection: socket.socket) -> bool:
        """Take what has arrived; return whether the message is whole.

        Raises:
            OSError: the other end is gone.
            RunError: it belongs to another exchange.
        """
        num_new = connection.recv_into(self._into[self._num_bytes :])
        if num_new == 0:
            raise ConnectionResetError("end of file")
        before, self._num_bytes = self._num_bytes, self._num_bytes + num_new
        if before < _HEADER_BYTES <= self._num_bytes and self._into[:_HEADER_BYTES] != self._expected:
            theirs, ours = (_in_words(bytes(header)) for header in (self._into[:_HEADER_BYTES], self._expected))
            raise RunError(
                f"the ranks have parted: this rank is at {ours}, rank {self._rank} at {theirs}; all ranks must make "
                "the same exchanges in the same order (LOCKSTEP_DEBUG_COLLECTIVES=1 shows where they part)"
            )
        return self._num_bytes == len(self._into)


def connect(
    rank: int, world_size: int, store: Store, timeout_s: float, connect_timeout_s: float
) -> DirectExchange | None:
    """Return the connections of this rank to all others of this host, None if any of them can't be had.

    Every rank calls it. Connections are made through Linux's abstract socket names, which leave no file behind; who is
    at the other end is asked of the kernel.

    Args:
        rank: of this process.
        world_size: of the job, all on this host.
        store: of this job alone.
        timeout_s: for every exchange.
        connect_timeout_s: for all connections together.
    """
    sockets: dict[int, socket.socket] = {}
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            name = f"lockstep-{secrets.token_hex(16)}"
            listener.bind(f"\0{name}")
            listener.listen(world_size)
            listener.settimeout(connect_timeout_s)
            store.set(f"listens/{rank}", name)
            for other in range(rank):
                store.wait([f"listens/{other}"], timedelta(seconds=connect_timeout_s))
                connection = _new_connection(connect_timeout_s)
                sockets[other] = connection
                connection.connect(f"\0{store.get(f'listens/{other}').decode()}")
                connection.sendall(_HELLO.pack(rank))
            while len(sockets) < world_size - 1:
                connection, _ = listener.accept()
                greeted = _greeted_by(connection, connect_timeout_s)
                if greeted is None:
                    connection.close()
                else:
                    sockets[greeted] = connection
    except (OSError, DistError, RuntimeError):
        for connection in sockets.values():
            connection.close()
        return None
    return DirectExchange(rank, sockets, timeout_s)


def _new_connection(timeout_s: float) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(timeout_s)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
    return connection


def _greeted_by(connection: socket.socket, timeout_s: float) -> int | None:
    """Return the rank at the other end of a connection, None if it is a process of another user."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if user != os.getuid():
        return None
    connection.settimeout(timeout_s)
    hello = connection.recv(_HELLO.size, socket.MSG_WAITALL)
    return int(_HELLO.unpack(hello)[0]) if len(hello) == _HELLO.size else None


def _header(number: int, text: str) -> bytearray:
    room = _HEADER_BYTES - _SEQUENCE.size
    return bytearray(_SEQUENCE.pack(number) + text.encode()[:room].ljust(room))


def _in_words(header: bytes) -> str:
    text = header[_SEQUENCE.size :].decode(errors="replace").rstrip()
    return f"exchange {_SEQUENCE.unpack_from(header)[0]} ({text})"


def _lost(rank: int, tag: str) -> RunError:
    return RunError(
        f"lost another rank in the exchange of {tag}: rank {rank} has ended; see what it says, and its log in ranks/"
    )


def _wait_for(neighbours: list[_Neighbour], deadline: float, tag: str, timeout_s: float) -> None:
    poll = select.poll()
    for neighbour in neighbours:
        poll.register(neighbour.socket, neighbour.events)
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1e3):
        names = ", ".join(str(neighbour.rank) for neighbour in neighbours)
        raise RunError(
            f"no answer within {timeout_s:.0f} s in the exchange of {tag} from rank {names}; see its log in ranks/, or "
            "raise LOCKSTEP_TIMEOUT_S if it is only slow"
        )
