"""How the nodes of a job find one another: never at a shared default, and everything wrong said in one line."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from lockstep.core.errors import UsageError
from lockstep.launch.rendezvous import Nodes, check_port, concern, plan_rendezvous

STATIC = {"nnodes": "2", "node_rank": "0", "master_addr": "h", "master_port": "1"}
MEETING = {"nnodes": "2", "rdzv_endpoint": "h:1", "rdzv_id": "j"}


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        ({"nnodes": "2"}, ["2 nodes must find one another", "--rdzv_endpoint"]),
        ({"nnodes": "1:4"}, ["elastic", "later version"]),
        ({"nnodes": "0"}, ["nnodes must lie in 1"]),
        ({"nnodes": "two"}, ["nnodes must be a whole number"]),
        ({"nnodes": "2", "node_rank": "0"}, ["--master_addr and --master_port are missing", "no port"]),
        (STATIC | {"node_rank": None}, ["--node_rank is missing"]),
        (STATIC | {"nnodes": None}, ["--nnodes is missing"]),
        (STATIC | {"node_rank": "2"}, ["node_rank 2 must lie in 0 to 1"]),
        (STATIC | {"master_port": "65536"}, ["master_port must lie in 1 to 65535"]),
        (STATIC | {"master_port": "0"}, ["master_port must lie in 1 to 65535"]),
        (STATIC | {"master_port": "http"}, ["master_port must be a whole number"]),
        (STATIC | {"master_addr": "a b"}, ["master_addr 'a b'"]),
        (STATIC | MEETING, ["--node_rank and --rdzv_endpoint", "two ways"]),
        (MEETING | {"rdzv_id": None}, ["--rdzv_id is missing"]),
        (MEETING | {"rdzv_endpoint": None}, ["--rdzv_endpoint is missing"]),
        (MEETING | {"rdzv_endpoint": "host"}, ["'host' is not of the form HOST:PORT"]),
        (MEETING | {"rdzv_endpoint": "fd00::1"}, ["an IPv6 address in brackets"]),
        (MEETING | {"rdzv_endpoint": "h:0"}, ["port of rdzv_endpoint", "1 to 65535"]),
        (MEETING | {"rdzv_backend": "static"}, ["--node_rank"]),
        (MEETING | {"rdzv_backend": "c10"}, ["did you mean 'c10d'"]),
        (MEETING | {"rdzv_id": "a/b"}, ["rdzv_id 'a/b'"]),
        (MEETING | {"rdzv_conf": "timeout"}, ["KEY=VALUE"]),
        ({"local_addr": "a b"}, ["local_addr 'a b'"]),
    ],
)
def test_refused_in_one_line(nodes: dict[str, str | None], words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        plan_rendezvous(Nodes(**nodes), "abc")
    line = str(caught.value)
    assert "\n" not in line
    assert all(word in line for word in words), line


@contextmanager
def listener(host: str) -> Iterator[int]:
    """Yield a port on which somebody listens."""
    with socket.create_server((host, 0)) as server:
        yield server.getsockname()[1]


def test_a_taken_port_is_refused_on_node_0_alone() -> None:
    with listener("127.0.0.1") as port:
        nodes = {"nnodes": "2", "master_addr": "127.0.0.1", "master_port": str(port)}
        with pytest.raises(UsageError, match=f"port {port} of this node is taken"):
            check_port(plan_rendezvous(Nodes(**nodes, node_rank="0"), "abc"))
        check_port(plan_rendezvous(Nodes(**nodes, node_rank="1"), "abc"))
    check_port(plan_rendezvous(Nodes(**nodes, node_rank="0"), "abc"))


def test_a_job_on_one_node_has_a_rendezvous_of_its_own() -> None:
    first, second = (plan_rendezvous(Nodes(), job) for job in ("one", "two"))
    assert "--rdzv_endpoint=localhost:0" in first.arguments  # the system chooses a free port
    assert "--rdzv_id=one" in first.arguments
    assert "--rdzv_id=two" in second.arguments
    assert not any("29500" in word or "29400" in word for word in first.arguments)


@pytest.mark.parametrize(
    ("nodes", "arguments"),
    [
        (
            Nodes("2", "1", "10.0.0.1", "2345"),
            ["--nnodes=2", "--node_rank=1", "--master_addr=10.0.0.1", "--master_port=2345"],
        ),
        (
            Nodes("2", "1", "fd00::1", "2345", local_addr="fd00::2"),
            ["--nnodes=2", "--node_rank=1", "--master_addr=[fd00::1]", "--master_port=2345", "--local_addr=fd00::2"],
        ),
        (
            Nodes("3", rdzv_endpoint="[fd00::1]:99", rdzv_id="job.7", rdzv_conf="timeout=60,is_host=1"),
            [
                "--nnodes=3",
                "--rdzv_backend=c10d",
                "--rdzv_endpoint=[fd00::1]:99",
                "--rdzv_id=job.7",
                "--rdzv_conf=timeout=60,is_host=1",
            ],
        ),
        (Nodes(rdzv_endpoint="h:0"), ["--nnodes=1", "--rdzv_backend=c10d", "--rdzv_endpoint=h:0", "--rdzv_id=abc"]),
    ],
)
def test_rendezvous_of_nodes(nodes: Nodes, arguments: list[str]) -> None:
    assert list(plan_rendezvous(nodes, "abc").arguments) == arguments


def test_a_host_that_nobody_knows_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    assert concern(plan_rendezvous(Nodes("2", "1", "127.0.0.1", "2345"), "abc")) is None
    assert concern(plan_rendezvous(Nodes("2", "1", "::1", "2345"), "abc")) is None

    def not_found(host: str, port: None) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", not_found)
    meeting = Nodes("2", rdzv_endpoint="nowhere:1", rdzv_id="j")
    assert concern(plan_rendezvous(meeting, "abc")) == (
        "host nowhere is not known here so far (Name or service not known); is it spelled right?"
    )


def test_what_can_be_no_host_is_a_warning() -> None:
    line = concern(plan_rendezvous(Nodes("2", rdzv_endpoint="a..b:1", rdzv_id="j"), "abc"))
    assert line is not None
    assert line.startswith("host a..b is not known here so far")
