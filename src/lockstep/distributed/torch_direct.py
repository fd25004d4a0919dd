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
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress

import torch
from torch.distributed import DistError
from torch.distributed.distributed_c10d import Store

from lockstep.core import beats
from lockstep.core.errors import RunError
from lockstep.core.outcome import LOST_A_RANK
from lockstep.core.types import Wait
from lockstep.distributed.greeting import greeted_by, hello, new_token
from lockstep.distributed.wording import name_ranks

MAX_RANKS = 16
"""Every rank sends to every other; beyond this many a reduction in steps is cheaper."""
MAX_BYTES = 160 * 1024
"""What a socket takes at once under Linux's default limits: a message is on its way while its sender computes."""

_HEADER_BYTES = 128  # what follows is aligned for every type
_BUFFER_BYTES = 4 * MAX_BYTES
MAX_WAITS = 4096
"""More than there are in an iteration: where nobody asks for them, as in a script, the oldest are forgotten."""
_LONGEST_POLL_S = 60.0
_LOOK_S = 0.1
_SHORT_PAUSE_S = 0.002
_FAILED = "failed"
# The number of the exchange, and a sum of the whole text, which may be longer than the room for it.
_WHICH = struct.Struct("<QI")


class DirectExchange:
    """Sends every rank's message to every other rank of this host, in the order in which exchanges are started.

    Args:
        rank: of this process.
        sockets: by rank, the connection to each of the others.
        timeout_s: how long an exchange may take.
    """

    def __init__(self, rank: int, sockets: Mapping[int, socket.socket], timeout_s: float) -> None:
        self.rank, self.world_size = rank, len(sockets) + 1
        self._neighbours = [_Neighbour(rank, other, sockets[other]) for other in sorted(sockets)]
        self._timeout_s = timeout_s
        self._num_started = 0
        self._waits: deque[Wait] = deque(maxlen=MAX_WAITS)
        self._failure: RunError | None = None
        """Once an exchange has failed, nothing that arrives can be trusted any more."""

    def fits(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is small enough, and on the CPU."""
        return tensor.device.type == "cpu" and tensor.nbytes <= MAX_BYTES

    def start(self, tensor: torch.Tensor, name: str, tag: str) -> "Exchange":
        """Begin to send a tensor to all others, and to receive theirs; it may be overwritten at once."""
        self._num_started += 1
        message = tensor.detach().reshape(-1).view(torch.uint8)
        table = torch.empty((self.world_size, _HEADER_BYTES + message.numel()), dtype=torch.uint8)
        kind = str(tensor.dtype).removeprefix("torch.")
        header = _header(self._num_started, f"{name} of {tuple(tensor.shape)} {kind} '{tag}'")
        table[self.rank, :_HEADER_BYTES] = torch.frombuffer(header, dtype=torch.uint8)
        table[self.rank, _HEADER_BYTES:] = message
        rows = table.numpy()
        for neighbour in self._neighbours:
            neighbour.begin(memoryview(rows[self.rank]), memoryview(rows[neighbour.rank]))
            with suppress(OSError):  # waiting tells in words
                neighbour.send()
        return Exchange(self, self._num_started, table, tensor, tag)

    def finish(self, number: int, tag: str, num_bytes: int) -> None:
        """Wait until an exchange, and with it all before it, is over.

        Args:
            number: of the exchange.
            tag: what it is for.
            num_bytes: of this rank's message.

        Raises:
            RunError: a rank has ended, does not answer, or is in another exchange; from then on, always.
        """
        if self._failure is not None:
            raise RunError(str(self._failure)) from self._failure
        began = time.monotonic()
        try:
            with beats.exchange(tag):
                self._finish(number, tag, began + self._timeout_s)
        except RunError as error:
            self._failure = error
            raise
        finally:
            self._waits.append(Wait(tag, time.monotonic() - began, num_bytes))

    def _finish(self, number: int, tag: str, deadline: float) -> None:
        waiting = self._neighbours
        while True:
            for neighbour in waiting:
                try:
                    neighbour.receive()  # first: what a rank sent before it ended may tell why
                    neighbour.send()
                except OSError as error:
                    raise _lost(neighbour.rank, tag) from error
            waiting = [each for each in waiting if each.num_received < number or each.num_sent < number]
            if not waiting:
                return
            _wait_for(waiting, deadline, tag, self._timeout_s)

    def take_waits(self) -> list[Wait]:
        """Return the calls of ``finish`` since the last call of this."""
        taken = list(self._waits)
        self._waits.clear()
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
        self._direct.finish(self._number, self._tag, self._table[0].numel() - _HEADER_BYTES)
        return [row[_HEADER_BYTES:].view(self._dtype).view(self._shape) for row in self._table]


class _Neighbour:
    """Another rank: what is still to be sent to it and received from it, in order."""

    def __init__(self, own_rank: int, rank: int, connection: socket.socket) -> None:
        self.rank, self.socket = rank, connection
        self._own_rank = own_rank
        self.num_sent = self.num_received = 0
        self._outgoing: deque[memoryview] = deque()
        self._incoming: deque[_Incoming] = deque()
        connection.setblocking(False)

    @property
    def events(self) -> int:
        """What ``poll`` is to look for; not for what nobody here takes yet, which would be there all the time."""
        return (select.POLLIN if self._incoming else 0) | (select.POLLOUT if self._outgoing else 0)

    def begin(self, outgoing: memoryview, incoming: memoryview) -> None:
        self._outgoing.append(outgoing)
        self._incoming.append(_Incoming(outgoing[:_HEADER_BYTES], incoming))

    def send(self) -> None:
        """Send what the socket takes now."""
        with suppress(BlockingIOError):
            while self._outgoing:
                rest = self._outgoing[0]
                rest = rest[self.socket.send(rest, socket.MSG_NOSIGNAL) :]
                if rest:
                    self._outgoing[0] = rest
                else:
                    self._outgoing.popleft()
                    self.num_sent += 1

    def receive(self) -> None:
        """Take what has arrived."""
        with suppress(BlockingIOError):
            while self._incoming:
                message = self._incoming[0]
                is_whole = message.receive_from(self.socket)
                if message.is_another:
                    raise RunError(
                        f"the ranks have parted: rank {self._own_rank} is at {_in_words(message.expected)}, rank "
                        f"{self.rank} at {_in_words(message.header)}; all ranks must make the same exchanges in the "
                        "same order (LOCKSTEP_DEBUG_COLLECTIVES=1 shows where they part)"
                    )
                if is_whole:
                    self._incoming.popleft()
                    self.num_received += 1


class _Incoming:
    """A message on its way here."""

    def __init__(self, expected: memoryview, into: memoryview) -> None:
        self.expected, self.header = expected, into[:_HEADER_BYTES]
        self.is_another = False
        """Whether it belongs to another exchange than the one it was expected in."""
        self._into = into
        self._num_bytes = 0

    def receive_from(self, connection: socket.socket) -> bool:
        """Take what has arrived; return whether the message is whole.

        Raises:
            OSError: the other end is gone.
        """
        num_new = connection.recv_into(self._into[self._num_bytes :])
        if num_new == 0:
            raise ConnectionResetError("end of file")
        before, self._num_bytes = self._num_bytes, self._num_bytes + num_new
        if before < _HEADER_BYTES <= self._num_bytes:
            self.is_another = self.header != self.expected
        return self._num_bytes == len(self._into)


def connect(
    rank: int, world_size: int, store: Store, timeout_s: float, connect_timeout_s: float
) -> DirectExchange | None:
    """Return the connections of this rank to all others of this host, None if any of them can't be had.

    Every rank calls it; where one of them can't, the others learn it from the store. Connections are made through
    Linux's abstract socket names, which leave no file behind; who is at the other end is asked of the kernel.

    Args:
        rank: of this process.
        world_size: of the job, all on this host.
        store: of this job alone.
        timeout_s: for every exchange.
        connect_timeout_s: for all connections together.
    """
    sockets: dict[int, socket.socket] = {}
    deadline = time.monotonic() + connect_timeout_s
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            name, token = f"lockstep-{secrets.token_hex(16)}", new_token()
            listener.bind(f"\0{name}")
            listener.listen(world_size)
            listener.settimeout(_LOOK_S)
            store.set(f"listens/{rank}", f"{token} {name}")
            for other in range(rank):
                sockets[other] = _connection_to(other, rank, store, deadline)
            while len(sockets) < world_size - 1:
                _check_whether_it_is_in_vain(store, deadline)
                with suppress(TimeoutError):
                    connection, _ = listener.accept()
                    greeted = _neighbour_at(connection, token)
                    if greeted is None or not rank < greeted < world_size or greeted in sockets:
                        connection.close()
                    else:
                        sockets[greeted] = connection
    except (OSError, DistError, RuntimeError):
        for connection in sockets.values():
            connection.close()
        with suppress(DistError, RuntimeError):
            store.set(_FAILED, "1")
        return None
    return DirectExchange(rank, sockets, timeout_s)


def _check_whether_it_is_in_vain(store: Store, deadline: float) -> None:
    """Raise ConnectionError after the deadline, or where another rank has given up."""
    if time.monotonic() > deadline or store.check([_FAILED]):
        raise ConnectionError("not all ranks of this host can be connected")


def _connection_to(other: int, rank: int, store: Store, deadline: float) -> socket.socket:
    key = f"listens/{other}"
    while not store.check([key]):
        _check_whether_it_is_in_vain(store, deadline)
        time.sleep(_SHORT_PAUSE_S)
    token, name = store.get(key).decode().split()
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(max(_LOOK_S, deadline - time.monotonic()))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        connection.connect(f"\0{name}")
        connection.sendall(hello(rank, token))
    except OSError:
        connection.close()
        raise
    return connection


def _neighbour_at(connection: socket.socket, token: str) -> int | None:
    """Return the rank at the other end of a connection, None if it is a stranger: of another user, or without token."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return greeted_by(connection, token) if user == os.getuid() else None


def _header(number: int, text: str) -> bytearray:
    whole = text.encode()
    room = _HEADER_BYTES - _WHICH.size
    return bytearray(_WHICH.pack(number, zlib.crc32(whole)) + whole[:room].ljust(room))


def _in_words(header: memoryview) -> str:
    text = bytes(header[_WHICH.size :]).decode(errors="replace").rstrip()
    return f"exchange {_WHICH.unpack_from(header)[0]}, {text}"


def _lost(rank: int, tag: str) -> RunError:
    return RunError(f"{LOST_A_RANK} {tag}: rank {rank} has ended; see what it says, and its log")


def _wait_for(neighbours: Sequence[_Neighbour], deadline: float, tag: str, timeout_s: float) -> None:
    poll = select.poll()
    for neighbour in neighbours:
        poll.register(neighbour.socket, neighbour.events)
    left_s = deadline - time.monotonic()
    # poll() takes no more than 24 days.
    if not poll.poll(min(max(0.0, left_s), _LONGEST_POLL_S) * 1e3) and left_s <= 0:
        names = name_ranks(neighbour.rank for neighbour in neighbours)
        raise RunError(
            f"no answer within {timeout_s:g} s in the exchange of {tag} from {names}; see what keeps it in its log, "
            "or raise LOCKSTEP_TIMEOUT_S if it is only slow"
        )
