"""Which addresses are this host's, and which of its networks leads to another."""

import socket

import pytest

from lockstep.core.network import address_towards, interface_of, is_loopback, is_own


def test_loopback_is_this_hosts_own() -> None:
    assert is_own("127.0.0.1")
    assert is_own("localhost")
    assert address_towards("127.0.0.1") == "127.0.0.1"
    assert interface_of("127.0.0.1") == "lo"


@pytest.mark.parametrize("address", ["192.0.2.1", "2001:db8::1"])  # set apart for documentation: no host has them
def test_an_address_of_nobody_is_not_own(address: str) -> None:
    assert not is_own(address)
    assert interface_of(address) is None


@pytest.mark.parametrize("host", ["a..b", "x" * 300])
def test_what_can_be_no_host(host: str) -> None:
    assert address_towards(host) is None
    assert not is_own(host)
    assert interface_of(host) is None


def test_a_host_that_nobody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_found(*arguments: object, **options: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", not_found)
    assert address_towards("nowhere") is None
    assert not is_own("nowhere")


@pytest.mark.parametrize(
    ("address", "expected"),
    [("127.0.0.1", True), ("127.1.2.3", True), ("::1", True), ("10.0.0.1", False), ("fe80::1%lo", False), ("h", False)],
)
def test_loopback_addresses(address: str, expected: bool) -> None:
    assert is_loopback(address) is expected
