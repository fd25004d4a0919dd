"""What a node hears of the others, in which words it ends when a host is lost, and what it takes for no loss."""

import json
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from lockstep.core import outcome, saves
from lockstep.core.blame import Limits
from lockstep.distributed import torch_nodes
from lockstep.distributed.nodes import Node, in_words, keep_asking, own_address, silence_s
from lockstep.distributed.rank_exit import RankExit
from lockstep.distributed.topology import Topology
from lockstep.distributed.torch_nodes import NodeWatch

WAIT_S = 30.0
AT_ONCE = struct.pack("ii", 1, 0)  # SO_LINGER: a close sends a reset, as a host does that knows no such connection


def make_node(number: int, num_ranks: int = 2, port: int = 0) -> Node:
    return Node(2 * number, num_ranks, number, f"h{number}", f"10.0.0.{number + 1}", port, "", "00" * 16)


NODES = [make_node(number) for number in range(8)]


H1, H2 = "h1 (10.0.0.2, node 1, ranks 2 and 3)", "h2 (10.0.0.3, node 2, ranks 4 and 5)"
AGAIN = "go on with lockstep train_multigpu --resume logs/run"
ONE = f"lost host {H1}: nothing heard for 15 s; the host or the network to it is gone; once it is back, {AGAIN}"
TWO = (
    f"lost hosts {H1}, {H2}: nothing heard for 15 s; the hosts or the network to them is gone; once they are back, "
    f"{AGAIN}"
)
ALL = (
    f"hears from no other host, nothing heard for 15 s from {H1}, {H2}: the network of its own host h0 (10.0.0.1) is "
    f"gone; once it is back, {AGAIN}"
)


@pytest.mark.parametrize(("num_lost", "num_nodes", "words"), [(1, 2, ONE), (1, 3, ONE), (2, 4, TWO), (2, 3, ALL)])
def test_lost_hosts_are_named_with_the_mend(num_lost: int, num_nodes: int, words: str) -> None:
    others = NODES[1:num_nodes]
    assert in_words(others[:num_lost], others, NODES[0], 15.0, False, Path("logs/run")) == words


def test_of_many_lost_hosts_four_are_named() -> None:
    words = in_words(NODES[1:7], NODES[1:], NODES[0], 15.0, False, None)
    assert "h4 (10.0.0.5, node 4, ranks 8 and 9) and 2 more: nothing heard" in words
    assert "h5" not in words
    assert words.endswith("once they are back, start the job again")


def test_a_node_that_nobody_has_numbered_is_named_by_its_ranks() -> None:
    node = Node(4, 1, None, "h2", "10.0.0.3", 0, "", "")
    assert node.in_words() == "h2 (10.0.0.3, rank 4)"


def test_a_host_is_lost_before_the_limit_but_not_in_a_moment() -> None:
    assert 10.0 <= silence_s(Limits(20.0)) < 20.0
    assert silence_s(Limits(1.0)) == 3.0


@pytest.mark.parametrize("silent_s", [3.0, 4.0, 15.0, 45.0, 300.0])
def test_the_kernel_asks_every_second_and_gives_up_in_time(silent_s: float) -> None:
    with socket.socket() as connection:
        keep_asking(connection, silent_s)
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        idle, between, count = (
            connection.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
    assert idle == 1
    assert silent_s - between <= idle + between * count <= silent_s + 1


def test_nodes_on_one_host_listen_to_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    assert own_address("127.0.0.1") == ("127.0.0.1", "127.0.0.1")
    # As Debian has it: this host's name leads to a loopback address, though others reach it by that name.
    monkeypatch.setattr("lockstep.distributed.nodes.address_towards", lambda host: "127.0.1.1")
    assert own_address("h0") == ("h0", "")
    monkeypatch.setattr("lockstep.distributed.nodes.address_towards", lambda host: None)
    with pytest.raises(ValueError, match="no network leads to h0"):
        own_address("h0")


@dataclass
class Ends:
    """Ranks that have ended, and why."""

    messages: dict[int, str] = field(default_factory=dict)
    said_by: list[int] = field(default_factory=list)

    def wait(self, num_ranks: int) -> None:
        deadline = time.monotonic() + WAIT_S
        while len(self.messages) < num_ranks and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(self.messages) == num_ranks, self.messages


class FakeNode:
    """The leader of another node, which the test speaks for."""

    def __init__(self, number: int, store: Store) -> None:
        self.connection = socket.socket()
        store.set(str(2 * number), json.dumps(asdict(make_node(number))))
        self._number, self._store = number, store

    def connect(self, token: str | None = None) -> bytes:
        """Greet the leader of node 0; return its answer, empty if it has closed the connection."""
        leader = Node(**json.loads(self._store.get("0")))
        self.connection = socket.create_connection((leader.address, leader.port), timeout=WAIT_S)
        self.connection.sendall(struct.pack("<I16s", 2 * self._number, bytes.fromhex(token or leader.token)))
        return self.connection.recv(16)

    def reset(self) -> None:
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, AT_ONCE)
        self.connection.close()


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Ends:
    found = Ends()

    def abort(self: RankExit, message: str, is_said: bool) -> None:
        rank = 0 if threading.current_thread() is leader_threads[0] else 1
        found.messages[rank] = message
        if is_said:
            found.said_by.append(rank)

    leader_threads: list[threading.Thread] = []
    run = NodeWatch._run

    def noting_run(watch: NodeWatch) -> None:
        if watch._topology.rank == 0:
            leader_threads.append(threading.current_thread())
        run(watch)

    monkeypatch.setattr(RankExit, "abort", abort)
    monkeypatch.setattr(NodeWatch, "_run", noting_run)
    monkeypatch.setattr(outcome, "_own_run", None)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    return found


@pytest.fixture
def store() -> Store:
    made: Store = dist.HashStore()  # type: ignore[attr-defined]
    return made


@pytest.fixture
def node_0(ends: Ends, store: Store) -> Iterator[list[NodeWatch]]:
    """Both ranks of the first of three nodes."""
    watches = [NodeWatch(Topology(rank, rank, 6, 2, 0), store, Limits(4.0)) for rank in range(2)]
    for watch in watches:
        watch.start()
    yield watches
    while watches:
        watches.pop().stop()


def test_all_ranks_of_a_node_end_in_the_words_of_the_first(
    node_0: list[NodeWatch], store: Store, ends: Ends, tmp_path: Path
) -> None:
    (tmp_path / "progress.json").write_text(json.dumps({"iteration": 7, "status": "running", "reason": None}))
    outcome.note_run(tmp_path)
    others = [FakeNode(number, store) for number in (1, 2)]
    assert [other.connect() for other in others] == [b"+", b"+"]
    others[0].reset()
    ends.wait(2)
    words = "lost host h1 (10.0.0.2, node 1, ranks 2 and 3): it has reset its connection, as after a restart of the "
    words += f"host; go on with lockstep train_multigpu --resume {tmp_path}"
    assert ends.messages == {0: words, 1: words}
    assert ends.said_by == [0]
    progress = json.loads((tmp_path / "progress.json").read_text())
    assert progress == {"iteration": 7, "status": "failed", "reason": words}


def test_hosts_that_vanish_together_are_named_together(node_0: list[NodeWatch], store: Store, ends: Ends) -> None:
    others = [FakeNode(number, store) for number in (1, 2)]
    assert [other.connect() for other in others] == [b"+", b"+"]
    for other in others:
        other.reset()
        time.sleep(0.3)  # no two are missed in the same moment
    ends.wait(2)
    assert ends.messages[1].startswith("lost host h1 (10.0.0.2, node 1, ranks 2 and 3), h2 (10.0.0.3, node 2, ")


def test_a_node_that_leaves_is_not_lost(node_0: list[NodeWatch], store: Store, ends: Ends) -> None:
    others = [FakeNode(number, store) for number in (1, 2)]
    assert [other.connect() for other in others] == [b"+", b"+"]
    others[0].connection.close()
    others[1].reset()  # what came before it has been seen once this has
    ends.wait(2)
    assert "h1" not in ends.messages[0]


def test_who_leaves_first_is_left_in_peace(node_0: list[NodeWatch], store: Store, ends: Ends) -> None:
    others = [FakeNode(number, store) for number in (1, 2)]
    assert [other.connect() for other in others] == [b"+", b"+"]
    while node_0:
        node_0.pop().stop()
    assert [other.connection.recv(1) for other in others] == [b"", b""]
    assert ends.messages == {}
    assert not any(thread.name == "lockstep-nodes" for thread in threading.enumerate())


def test_a_stranger_is_sent_away(node_0: list[NodeWatch], store: Store, ends: Ends) -> None:
    others = [FakeNode(number, store) for number in (1, 2)]
    assert others[0].connect(token="11" * 16) == b""
    assert [other.connect() for other in others] == [b"+", b"+"]


def test_a_checkpoint_that_is_being_written_is_waited_for(
    node_0: list[NodeWatch], store: Store, ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_saved = threading.Event()
    asked = threading.Semaphore(0)

    def in_progress() -> bool:
        asked.release()
        return not is_saved.is_set()

    monkeypatch.setattr(saves, "in_progress", in_progress)
    monkeypatch.setattr(torch_nodes, "SAVE_S", WAIT_S)
    others = [FakeNode(number, store) for number in (1, 2)]
    assert [other.connect() for other in others] == [b"+", b"+"]
    others[0].reset()
    for _ in range(6):
        assert asked.acquire(timeout=WAIT_S)
    assert ends.messages == {}
    is_saved.set()
    ends.wait(2)


def test_who_leaves_while_others_are_still_to_come_says_nothing(
    node_0: list[NodeWatch], capfd: pytest.CaptureFixture[str]
) -> None:
    while node_0:
        node_0.pop().stop()
    assert capfd.readouterr().err == ""


def test_a_host_that_cannot_be_reached_is_named_in_a_warning(
    ends: Ends, store: Store, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(*arguments: object, **named: object) -> socket.socket:
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", unreachable)
    store.set("0", json.dumps(asdict(make_node(0))))
    watch = NodeWatch(Topology(2, 0, 4, 2, 1), store, Limits(4.0))
    watch.start()
    sibling = NodeWatch(Topology(3, 1, 4, 2, 1), store, Limits(4.0))
    sibling.start()
    deadline, said = time.monotonic() + WAIT_S, ""
    while not said and time.monotonic() < deadline:
        said += capfd.readouterr().err
        time.sleep(0.01)
    sibling.stop()
    watch.stop()
    assert said == (
        "lockstep: warning: there is no connection between this host and h0 (10.0.0.1, node 0, ranks 0 and 1); should "
        "it vanish, nothing will tell\n"
    )
    assert ends.messages == {}


@pytest.mark.parametrize(
    ("topology", "limits"), [(Topology(1, 1, 2, 2), Limits()), (Topology(1, 1, 4, 2), Limits(0.0))]
)
def test_one_node_and_a_watch_that_is_switched_off_need_no_thread(
    store: Store, topology: Topology, limits: Limits
) -> None:
    torch_nodes.start(topology, store, limits)
    assert not any(thread.name == "lockstep-nodes" for thread in threading.enumerate())
    torch_nodes.leave()


def test_a_forked_child_does_not_end_the_watch_of_its_parent(ends: Ends, store: Store) -> None:
    torch_nodes.start(Topology(1, 1, 4, 2), store, Limits())
    try:
        child = os.fork()
        if child == 0:
            torch_nodes.leave()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        time.sleep(0.3)
        assert any(thread.name == "lockstep-nodes" for thread in threading.enumerate())
    finally:
        torch_nodes.leave()
    assert not any(thread.name == "lockstep-nodes" for thread in threading.enumerate())
