"""Which of this host's networks leads to another host."""

import contextlib
import ipaddress
import socket

import psutil  # type: ignore[import-untyped]


def address_towards(host: str) -> str | None:
    """Return this host's address on the way to another one, None if there is no way or no such host.

    Nothing is sent. For an address of this host's own it is that address.
    """
    with contextlib.suppress(OSError, UnicodeError):
        for family, kind, _, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(address)  # of a datagram socket: only chooses a route
                return str(probe.getsockname()[0]).partition("%")[0]
    return None


def interface_of(address: str) -> str | None:
    """Return the name of the network interface that has an address, None if none has."""
    wanted = _parsed(address)
    for name, entries in psutil.net_if_addrs().items():
        if wanted is not None and any(_parsed(entry.address) == wanted for entry in entries):
            return str(name)
    return None


def is_own(host: str) -> bool:
    """Return whether a name or address is this host's."""
    with contextlib.suppress(OSError, UnicodeError):
        return any(interface_of(str(entry[4][0])) is not None for entry in socket.getaddrinfo(host, 9))
    return False


def is_loopback(address: str) -> bool:
    """Return whether an address means this host to every host."""
    parsed = _parsed(address)
    return parsed is not None and parsed.is_loopback


def _parsed(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return None
