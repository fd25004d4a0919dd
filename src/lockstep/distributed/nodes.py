"""The nodes of a job: how they are named and reached, and how an idle connection tells that a host is gone."""

import errno
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.core.blame import Limits
from lockstep.core.network import address_towards, is_loopback
from lockstep.distributed.wording import name_ranks

MAX_NAMED = 4
"""So many hosts are named in one line."""

_SHARE = 0.6
"""Of the limit: the rest is what the launchers need, so that within one and a half limits everything has ended."""
_MIN_SILENCE_S = 3.0
_ASK_S = 1
_MAX_ASKED = 6


@dataclass(frozen=True)
class Node:
    """What the others know of a node, from the job's store."""

    first_rank: int
    """Its leader."""
    num_ranks: int
    number: int | None
    """As torchrun has it; None where somebody else started the ranks."""
    host: str
    address: str
    """Under which it can be reached from the others."""
    port: int
    local_name: str
    """Of the socket by which its other ranks reach the leader, in Linux's abstract name space."""
    token: str
    """What tells a rank of this job from a stranger."""

    @property
    def ranks(self) -> range:
        """Of the job, on this node."""
        return range(self.first_rank, self.first_rank + self.num_ranks)

    def in_words(self) -> str:
        """Return host, address, node and ranks."""
        number = "" if self.number is None else f"node {self.number}, "
        return f"{self.host} ({self.address}, {number}{name_ranks(self.ranks)})"


def silence_s(limits: Limits) -> float:
    """Return after how many seconds without an answer a host is lost."""
    return max(_MIN_SILENCE_S, _SHARE * limits.hang_s)


def in_words(
    lost: Sequence[Node], others: Sequence[Node], own: Node, silent_s: float, was_reset: bool, run: Path | None
) -> str:
    """Return what has happened to a rank, as what follows its name in a sentence, and the mend.

    Args:
        lost: the hosts that do not answer.
        others: all nodes but this one.
        own: this node.
        silent_s: for how long they have not answered.
        was_reset: whether there was an answer, but from a host that knows nothing of the connection.
        run: the directory that the job trains in, None if it has none.
    """
    names = ", ".join(node.in_words() for node in lost[:MAX_NAMED])
    more = "" if len(lost) <= MAX_NAMED else f" and {len(lost) - MAX_NAMED} more"
    again = "start the job again" if run is None else f"go on with lockstep train_multigpu --resume {run}"
    if was_reset:
        return f"lost host {names}{more}: it has reset its connection, as after a restart of the host; {again}"
    heard = f"nothing heard for {silent_s:.0f} s"
    if len(lost) > 1 and len(lost) == len(others):
        return (
            f"hears from no other host, {heard} from {names}{more}: the network of its own host {own.host} "
            f"({own.address}) is gone; once it is back, {again}"
        )
    plural = len(lost) > 1
    return (
        f"lost host{'s' if plural else ''} {names}{more}: {heard}; the host{'s' if plural else ''} or the network to "
        f"{'them' if plural else 'it'} is gone; once {'they are' if plural else 'it is'} back, {again}"
    )


def keep_asking(connection: socket.socket, silent_s: float) -> None:
    """Have the kernel ask the other end of an idle connection whether it is there.

    Args:
        connection: by TCP.
        silent_s: after which without an answer the connection has failed, to a second.
    """
    connection.setblocking(False)
    rest_s = max(1, round(silent_s) - _ASK_S)
    between_s = max(1, rest_s // _MAX_ASKED)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _ASK_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, between_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, min(127, max(1, rest_s // between_s)))


def error_of(connection: socket.socket) -> int:
    """Return why a connection on which nothing is ever sent has woken us; 0 if the other end has closed it."""
    error = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if not error:
        try:
            connection.recv(1)
        except BlockingIOError:
            return 0
        except OSError as raised:
            return raised.errno or errno.EIO
    return error


def own_address(master: str) -> tuple[str, str]:
    """Return the address under which other nodes reach this host, and that to listen at.

    Args:
        master: the host of the job's store, where all of them have met.
    """
    address = address_towards(master)
    if address is None:
        raise ValueError(f"no network leads to {master}")
    if not is_loopback(address):
        return address, address
    if master == "localhost" or is_loopback(master):
        return address, address  # all nodes are on one host
    return master, ""  # the name of this host, which leads to a loopback address on this host alone
