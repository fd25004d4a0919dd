"""Where the processes of JAX meet: what ``train_multigpu`` makes of ``--coordinator_address``, and what it shows."""

import socket
from collections.abc import Callable

import pytest

from lockstep.cli import train_multigpu
from lockstep.cli.main import main
from lockstep.core.errors import UsageError
from lockstep.launch import rendezvous
from lockstep.launch.describe import describe
from lockstep.launch.plan import COORDINATOR, Options, Plan, Work, make_plan
from lockstep.launch.rendezvous import Nodes

WORK = Work(("-m", "lockstep", "train", "cartpole_classic"), device="cpu", has_coordinator=True)
FIRST = Nodes("2", "0", "10.0.0.1", "2345")
SECOND = Nodes("2", "1", "10.0.0.1", "2345")


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, str]]:
    """Runs the dry run of ``train_multigpu`` with JAX on the CPU; returns its rows by their first word."""
    monkeypatch.setattr(train_multigpu, "find_gpus", list)

    def run(*arguments: str) -> dict[str, str]:
        words = ["train_multigpu", "cartpole_classic", "--ml_framework", "jax", "--device", "cpu", "--dry_run"]
        assert main([*words, *arguments]) == 0
        lines = capsys.readouterr().out.splitlines()
        return {line.split()[0]: line for line in lines}

    return run


def planned(address: str, nodes: Nodes, **environment: str) -> Plan:
    return make_plan(Options(num_gpus=2, nodes=nodes, coordinator_address=address), WORK, [], environment, job="abc")


def test_the_dry_run_shows_where_processes_meet(rows: Callable[..., dict[str, str]]) -> None:
    shown = rows("--num_gpus", "2", "--num_envs", "16")
    assert shown["coordinator"].endswith("of JAX on a free port that process 0 finds and tells the others")
    assert COORDINATOR not in shown["command"]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    shown = rows("--num_gpus", "2", "--num_envs", "16", "--coordinator_address", f"127.0.0.1:{port}")
    assert shown["coordinator"].endswith(f"of JAX at 127.0.0.1:{port}, kept by process 0")
    assert f"{COORDINATOR}=127.0.0.1:{port}" in shown["command"]
    assert f"by hand     {COORDINATOR}=127.0.0.1:{port} torchrun" in shown["by"]


def test_a_process_of_several_devices_has_the_envs_of_all(rows: Callable[..., dict[str, str]]) -> None:
    shown = rows("--num_gpus", "2", "--num_devices", "3", "--num_envs", "16")
    assert shown["envs"] == "envs        96 in all"
    assert "rank 1    CPU, 48 envs" in shown["rank"]
    assert rows("--num_gpus", "2", "--num_devices", "2", "--num_envs", "4,8,12,16")["rank"].endswith(
        "rank 1    CPU, 28 envs"
    )


def test_torch_has_none(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(train_multigpu, "find_gpus", list)
    assert main(["train_multigpu", "cartpole_classic", "--device", "cpu", "--num_gpus", "2", "--dry_run"]) == 0
    assert "coordinator" not in capsys.readouterr().out


def test_every_node_is_told_the_same_and_nothing_of_another_job() -> None:
    plans = [planned("10.0.0.1:5000", nodes, JAX_COORDINATOR_ADDRESS="old:1") for nodes in (FIRST, SECOND)]
    assert [plan.added[COORDINATOR] for plan in plans] == ["10.0.0.1:5000"] * 2
    assert all(COORDINATOR in plan.removed for plan in plans)
    without = make_plan(Options(num_gpus=2), WORK, [], {COORDINATOR: "old:1"}, job="abc")
    assert COORDINATOR in without.removed and COORDINATOR not in without.added


@pytest.mark.parametrize(
    ("address", "nodes", "words"),
    [
        ("10.0.0.1", SECOND, "not of the form HOST:PORT"),
        ("10.0.0.1:0", SECOND, "must lie in 1 to 65535"),
        ("two words:5", SECOND, "not of the form HOST:PORT"),
        ("10.0.0.1:2345", SECOND, "where the nodes meet already"),
        ("10.0.0.1:5", Nodes("2", rdzv_endpoint="10.0.0.1:99", rdzv_id="j"), "number the nodes by --node_rank"),
    ],
)
def test_an_address_that_cannot_be_is_refused(
    address: str, nodes: Nodes, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "address_towards", lambda host: "10.0.0.2")
    with pytest.raises(UsageError, match=words):
        planned(address, nodes)


def test_nodes_that_know_the_coordinator_alone_meet_beside_it() -> None:
    alone = Nodes(nnodes="2", node_rank="1")
    found = rendezvous.with_coordinator(alone, "[fe80::1]:5000")
    assert rendezvous.plan_rendezvous(found, "abc").endpoint == "[fe80::1]:5001"
    assert rendezvous.with_coordinator(alone, "host:65535").master_port == "65534"
    # What is told holds, and the rest is filled in: so another port can be chosen, as is advised where one is taken.
    for port, host in ((None, "10.0.0.2"), ("77", None), ("77", "10.0.0.2")):
        told = rendezvous.with_coordinator(Nodes("2", "1", host, port), "10.0.0.1:5000")
        expected = f"{host or '10.0.0.1'}:{port or 5001}"
        assert rendezvous.plan_rendezvous(told, "abc").endpoint == expected
    with pytest.raises(UsageError, match="where the nodes meet already"):
        planned("10.0.0.1:5000", rendezvous.with_coordinator(Nodes("2", "1", None, "5000"), "10.0.0.1:5000"))
    for told in (SECOND, Nodes("2", rdzv_endpoint="10.0.0.1:99", rdzv_id="j"), Nodes("2")):
        assert rendezvous.with_coordinator(told, "host:5000") == told
    assert rendezvous.with_coordinator(alone, None) == alone


def test_a_port_that_is_taken_is_refused_where_process_0_will_listen() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"10.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(UsageError, match="is taken, perhaps by another job"):
            planned(address, FIRST)
        assert "coordinator of JAX at" in "\n".join(describe(planned(address, SECOND), {}))
