"""How ranks of one host find one another for direct exchanges, and who is not let in; threads play the ranks."""

import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from lockstep.distributed import greeting
from lockstep.distributed.torch_direct import MAX_BYTES, DirectExchange, connect
from tests.unit.direct_fixtures import summed, together


def meet(num_ranks: int, store: HashStore, connect_timeout_s: float = 30.0) -> list[DirectExchange | None]:
    """Connect ranks, each in a thread."""
    found: list[DirectExchange | None] = [None] * num_ranks

    def join(rank: int) -> None:
        found[rank] = connect(rank, num_ranks, store, 30.0, connect_timeout_s)

    threads = [threading.Thread(target=join, args=(rank,), daemon=True) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return found


@pytest.mark.parametrize("num_ranks", [2, 5])
def test_ranks_find_one_another(num_ranks: int) -> None:
    ends = [end for end in meet(num_ranks, HashStore()) if end is not None]
    assert [end.rank for end in ends] == list(range(num_ranks))

    def work(end: DirectExchange) -> list[int]:
        return [int(row) for row in end.start(torch.tensor(end.rank), "gather", "ranks").wait()]

    assert together(ends, work) == [list(range(num_ranks))] * num_ranks


def say_nothing(stranger: socket.socket, token: str) -> None:
    pass


def say_half(stranger: socket.socket, token: str) -> None:
    stranger.send(b"\1\0\0")


def hang_up(stranger: socket.socket, token: str) -> None:
    stranger.close()


def guess(stranger: socket.socket, token: str) -> None:
    stranger.send(greeting.hello(1, greeting.new_token()))


def name_another_rank(stranger: socket.socket, token: str) -> None:
    stranger.send(greeting.hello(7, token))


def name_its_host(stranger: socket.socket, token: str) -> None:
    stranger.send(greeting.hello(0, token))


@pytest.mark.parametrize("greet", [say_nothing, say_half, hang_up, guess, name_another_rank, name_its_host])
def test_a_stranger_is_not_taken_for_a_rank(
    greet: Callable[[socket.socket, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(greeting, "GREETING_S", 0.2)
    store = HashStore()
    found: dict[int, DirectExchange | None] = {}
    first = threading.Thread(target=lambda: found.update({0: connect(0, 2, store, 30.0, 30.0)}), daemon=True)
    first.start()
    token, name = store.get("listens/0").decode().split()
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(f"\0{name}")
        greet(stranger, token)
        found[1] = connect(1, 2, store, 30.0, 30.0)
        first.join(60)
    ends = [end for end in (found[0], found[1]) if end is not None]
    assert len(ends) == 2
    assert together(ends, lambda end: summed(end, torch.ones(1))) == [torch.tensor([2.0])] * 2


def test_processes_of_another_user_are_strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert meet(2, HashStore(), connect_timeout_s=0.5)[0] is None


def test_a_rank_that_cannot_connect_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refused(socket.socket):
        def bind(self, address: Any) -> None:
            if threading.current_thread() is unlucky:
                raise PermissionError("no sockets here")
            super().bind(address)

    monkeypatch.setattr(socket, "socket", Refused)
    store = HashStore()
    found: list[DirectExchange | None] = []
    unlucky = threading.Thread(target=lambda: found.append(connect(1, 3, store, 30.0, 50.0)), daemon=True)
    others = [
        threading.Thread(target=lambda rank=rank: found.append(connect(rank, 3, store, 30.0, 50.0)), daemon=True)
        for rank in (0, 2)
    ]
    began = time.monotonic()
    for thread in (*others, unlucky):
        thread.start()
    for thread in (*others, unlucky):
        thread.join(60)
    assert found == [None] * 3
    assert time.monotonic() - began < 20


def test_a_connection_that_fails_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[socket.socket] = []

    class Noted(socket.socket):
        def connect(self, address: Any) -> None:
            made.append(self)
            super().connect(address)

    monkeypatch.setattr(socket, "socket", Noted)
    store = HashStore()
    store.set("listens/0", f"{'0' * 32} lockstep-nobody-listens-here")
    assert connect(1, 2, store, 30.0, 5.0) is None
    assert [each.fileno() for each in made] == [-1]


def test_a_rank_that_does_not_come_is_waited_for_no_longer_than_said() -> None:
    began = time.monotonic()
    assert connect(0, 2, HashStore(), 30.0, 0.3) is None
    assert connect(1, 2, HashStore(), 30.0, 0.3) is None
    assert 0.5 < time.monotonic() - began < 20


def test_a_message_fits_into_the_sockets_at_once() -> None:
    # Else nothing of it would travel while its sender computes.
    ends = [end for end in meet(2, HashStore()) if end is not None]
    ends[0].start(torch.zeros(MAX_BYTES, dtype=torch.uint8), "gather", "large")
    assert [neighbour.num_sent for neighbour in ends[0]._neighbours] == [1]
