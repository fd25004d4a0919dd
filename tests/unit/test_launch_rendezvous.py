"""How the nodes of a job find one another: never at a shared default, and everything wrong said in one line."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from lockstep.core.errors import UsageError
from lockstep.launch import rendezvous
from lockstep.launch.rendezvous import Nodes, check_port, concern, plan_rendezvous

STATIC = {"nnodes": "2", "node_rank": "0", "master_addr": "h", "master_port": "1"}
MEETING = {"nnodes": "2", "rdzv_endpoint": "h:1", "rdzv_id": "j"}
OWN = ("h", "10.0.0.1", "127.0.0.1", "::1")
"""Names and addresses of this node; the way to any other node starts at 10.0.0.1."""


@pytest.fixture(autouse=True)
def _a_network_of_one_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "is_own", lambda host: host in OWN)
    monkeypatch.setattr(rendezvous, "address_towards", lambda host: None if host == "nowhere" else "10.0.0.1")


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        ({"nnodes": "2"}, ["2 nodes must find one another", "--rdzv_endpoint", "R --coordinator_address HOST:PORT"]),
        ({"nnodes": "1:4"}, ["--nnodes 1:4 needs --rdzv_endpoint HOST:PORT --rdzv_id ID"]),
        (STATIC | {"nnodes": "2:4"}, ["--nnodes 2:4", "--node_rank can't count", "--rdzv_endpoint"]),
        (MEETING | {"nnodes": "4:2"}, ["nnodes 4:2 must be MIN:MAX", "did you mean 2:4?"]),
        (MEETING | {"nnodes": "0:2"}, ["nnodes must lie in 1 to", "not 0"]),
        (MEETING | {"nnodes": "1:"}, ["nnodes must be a whole number, not ''"]),
        (MEETING | {"nnodes": "1:2:3"}, ["nnodes must be a whole number, not '2:3'"]),
        (MEETING | {"nnodes": "1:2", "rdzv_id": None}, ["--rdzv_id is missing;"]),
        ({"nnodes": "0"}, ["nnodes must lie in 1"]),
        ({"nnodes": "two"}, ["nnodes must be a whole number"]),
        ({"nnodes": "2", "node_rank": "0"}, ["--master_addr and --master_port are missing;", "one node none of them"]),
        (STATIC | {"node_rank": None}, ["--node_rank is missing;"]),
        ({"master_port": "1"}, ["--nnodes, --node_rank and --master_addr are missing;"]),
        (STATIC | {"nnodes": None}, ["--nnodes is missing"]),
        (STATIC | {"node_rank": "2"}, ["node_rank 2 must lie in 0 to 1"]),
        (STATIC | {"master_port": "65536"}, ["master_port must lie in 1 to 65535"]),
        (STATIC | {"master_port": "0"}, ["master_port must lie in 1 to 65535"]),
        (STATIC | {"master_port": "http"}, ["master_port must be a whole number"]),
        (STATIC | {"master_addr": "a b"}, ["master_addr 'a b'"]),
        (STATIC | MEETING, ["--node_rank and --rdzv_endpoint", "two ways"]),
        (MEETING | {"rdzv_id": None}, ["--rdzv_id is missing;", "--rdzv_endpoint HOST:PORT under --rdzv_id ID"]),
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
                "--local_addr=10.0.0.1",
            ],
        ),
        (
            Nodes("3", rdzv_endpoint="10.0.0.9:99", rdzv_id="job.7", rdzv_conf="timeout=60"),
            [
                "--nnodes=3",
                "--rdzv_backend=c10d",
                "--rdzv_endpoint=10.0.0.9:99",
                "--rdzv_id=job.7",
                "--rdzv_conf=timeout=60,is_host=0",
                "--local_addr=10.0.0.1",
            ],
        ),
        (
            Nodes("2", rdzv_backend="etcd", rdzv_endpoint="10.0.0.9:99", rdzv_id="job.7", local_addr="10.0.0.2"),
            [
                "--nnodes=2",
                "--rdzv_backend=etcd",
                "--rdzv_endpoint=10.0.0.9:99",
                "--rdzv_id=job.7",
                "--local_addr=10.0.0.2",
            ],
        ),
        (Nodes(rdzv_endpoint="h:0"), ["--nnodes=1", "--rdzv_backend=c10d", "--rdzv_endpoint=h:0", "--rdzv_id=abc"]),
    ],
)
def test_rendezvous_of_nodes(nodes: Nodes, arguments: list[str]) -> None:
    assert list(plan_rendezvous(nodes, "abc").arguments) == arguments


def test_nodes_that_come_and_go() -> None:
    elastic = plan_rendezvous(Nodes(**MEETING | {"nnodes": "2:4"}), "abc")
    assert elastic.arguments[0] == elastic.plain_arguments[0] == "--nnodes=2:4"
    assert (elastic.min_nodes, elastic.num_nodes, elastic.node_rank) == (2, 4, None)
    assert (elastic.is_elastic, elastic.count) == (True, "2 to 4 nodes")
    fixed = plan_rendezvous(Nodes(**MEETING | {"nnodes": "2:2"}), "abc")
    assert fixed == plan_rendezvous(Nodes(**MEETING), "abc")
    assert (fixed.is_elastic, fixed.count) == (False, "2 nodes")
    assert plan_rendezvous(Nodes(nnodes="1:1"), "abc") == plan_rendezvous(Nodes(), "abc")


@pytest.mark.parametrize(
    ("endpoint", "given", "is_host"),
    [
        ("10.0.0.1", None, "is_host=1"),
        ("10.0.0.1", "timeout=60", "timeout=60,is_host=1"),
        ("10.0.0.9", None, "is_host=0"),
        ("10.0.0.9", "is_host=1", "is_host=1"),
        ("10.0.0.1", "is_host=0", "is_host=0"),
    ],
)
def test_the_node_whose_address_it_is_keeps_the_rendezvous(endpoint: str, given: str | None, is_host: str) -> None:
    nodes = Nodes("2", rdzv_endpoint=f"{endpoint}:99", rdzv_id="j", rdzv_conf=given)
    assert f"--rdzv_conf={is_host}" in plan_rendezvous(nodes, "abc").arguments


def test_at_a_loopback_address_several_launchers_of_one_host_settle_it_themselves() -> None:
    planned = plan_rendezvous(Nodes("2", rdzv_endpoint="[::1]:99", rdzv_id="j"), "abc")
    assert not any("is_host" in word for word in planned.arguments)


def test_without_a_way_to_the_endpoint_torchrun_names_this_node_itself() -> None:
    planned = plan_rendezvous(Nodes("2", rdzv_endpoint="nowhere:99", rdzv_id="j"), "abc")
    assert not any("local_addr" in word for word in planned.arguments)


@pytest.mark.parametrize("num_nodes", ["1", "2"])
def test_a_taken_endpoint_of_this_node_is_a_warning_since_it_may_be_this_jobs(num_nodes: str) -> None:
    with listener("127.0.0.1") as port:
        common = {"nnodes": num_nodes, "rdzv_endpoint": f"127.0.0.1:{port}", "rdzv_id": "j"}
        planned = plan_rendezvous(Nodes(**common), "abc")
        check_port(planned)  # not refused
        line = concern(planned)
        assert line is not None and line.startswith(f"port {port} of this node is taken already; unless it is by this")
        assert concern(plan_rendezvous(Nodes(**common, rdzv_conf="is_host=0"), "abc")) is None
        assert concern(plan_rendezvous(Nodes(**common | {"rdzv_endpoint": f"127.0.0.9:{port}"}), "abc")) is None
    assert concern(planned) is None


def test_node_0_at_an_address_of_another_node_is_a_warning() -> None:
    line = concern(plan_rendezvous(Nodes("2", "0", "10.0.0.9", "2345"), "abc"))
    assert line == "10.0.0.9 is no address of this node, where node 0 listens; the others will not find it there"
    assert concern(plan_rendezvous(Nodes("2", "1", "10.0.0.9", "2345"), "abc")) is None
    assert concern(plan_rendezvous(Nodes("2", "0", "10.0.0.1", "2345"), "abc")) is None


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
