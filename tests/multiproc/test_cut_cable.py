"""A host that vanishes in mid-training: the others say which one, end in time, and go on once it is back."""

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep.launch.watch import MEET_S
from tests.multiproc.commands import SMALL, lockstep, metrics_of, num_recorded, only_run, progress_of
from tests.multiproc.two_hosts import NEEDED, PORT, Host, joined_hosts, run_all

TIMEOUT_S = 120
END_S = 45
"""How long a job may take to end on a machine that is busy with other tests."""
LIMIT_S = 5

SETTINGS = (*SMALL[2:], "--agent.schedule", "fixed", "--dtype", "float64", "--checkpoints.interval", "2")
TASK = ("cartpole_classic", *SETTINGS)
NUM_ENVS = 64
ON_HOSTS = ("--num_envs", str(NUM_ENVS // 4), "--max_iterations", "100000", "--log_root")

pytestmark = NEEDED


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    with joined_hosts() as made:
        yield made


def command(kind: str, hosts: list[Host], node: int, *arguments: str) -> list[str]:
    """Return what starts a node of a training of 2 x 2 ranks."""
    folder = Path(sys.executable).parent
    if kind == "torchrun":
        own = [str(folder / "torchrun"), "--nnodes=2", f"--node_rank={node}", "--nproc_per_node=2"]
        own += [f"--master_addr={hosts[0].address}", f"--master_port={PORT}", "-m", "lockstep", "train"]
        return [*own, *arguments]
    meeting = ["--nnodes", "2", "--num_gpus", "2", "--rdzv_endpoint", f"{hosts[0].address}:{PORT}", "--rdzv_id", "cut"]
    return [str(folder / "lockstep"), "train_multigpu", *arguments, *meeting]


def start(kind: str, hosts: list[Host], *arguments: str) -> "list[subprocess.Popen[str]]":
    """Start both nodes of a training that all hosts keep in the same place."""
    limit = {"LOCKSTEP_HANG_TIMEOUT_S": f"{LIMIT_S}"}
    return [
        host.start(*command(kind, hosts, node, *arguments), folder=Path(host.name), **limit)
        for node, host in enumerate(hosts)
    ]


def wait_for_training(processes: "list[subprocess.Popen[str]]") -> Path:
    """Return the run directory once a checkpoint and five iterations are in it."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline and all(process.poll() is None for process in processes):
        for run in Path("shared", "cartpole_classic").glob("[0-9]*"):
            if (run / "checkpoints" / "latest").exists() and num_recorded(run) >= 5:
                return run.absolute()
        time.sleep(0.02)
    raise AssertionError("the training did not begin:\n" + "\n".join(run_all(processes, 1)))


def errors_in(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("lockstep: ") and " error" in line]


def check_ends(hosts: list[Host], ended: list[str], run: Path) -> None:
    """Each side has said in one line which host it has lost, and how to go on; rank 0 has noted it in the run."""
    nodes = [
        f"{socket.gethostname()} ({host.address}, node {node}, ranks {2 * node} and {2 * node + 1})"
        for node, host in enumerate(hosts)
    ]
    lost = ": nothing heard for 3 s; the host or the network to it is gone; once it is back, go on with "
    again = f"lockstep train_multigpu --resume {run}"
    told = [f"lost host {other}{lost}{again}" for other in reversed(nodes)]
    for node, text in enumerate(ended):
        assert errors_in(text) == [f"lockstep: error: rank {2 * node} {told[node]}"], text
    progress = progress_of(run)
    assert (progress["status"], progress["reason"]) == ("failed", told[0])


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["train_multigpu", "torchrun"])
def test_when_a_cable_is_cut_both_sides_name_the_other_and_go_on_once_it_is_back(hosts: list[Host], kind: str) -> None:
    logs = str(Path("shared").absolute())
    processes = start(kind, hosts, *TASK, *ON_HOSTS, logs)
    run = wait_for_training(processes)
    hosts[1].plug(False)
    ended = run_all(processes, END_S)
    assert [process.returncode for process in processes] == [1, 1], "\n".join(ended)
    assert [host.pids() for host in hosts] == [[], []]
    check_ends(hosts, ended, run)
    if kind == "torchrun":
        return  # what is on the disk is the same

    hosts[1].plug(True)
    num_iterations = int(metrics_of(run)[-1]["iteration"]) + 3
    total = ("--max_iterations", str(num_iterations))
    processes = start(kind, hosts, "--resume", str(run), *total)
    ended = run_all(processes, TIMEOUT_S)
    assert [process.returncode for process in processes] == [0, 0], "\n".join(ended)
    at_once = lockstep("train", *TASK, *total, "--num_envs", str(NUM_ENVS))
    assert at_once.returncode == 0, at_once.stderr
    check_curve(metrics_of(run), metrics_of(only_run("cartpole_classic")))


def check_curve(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """All that does not depend on how fast a host is agrees; -1 stands for a mean over no episodes."""
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        names = [name for name in mine if not name.startswith(("time/", "steps_per_s", "wall_s"))]
        kept = [{name: -1.0 if one[name] is None else one[name] for name in names} for one in (mine, theirs)]
        assert kept[0] == pytest.approx(kept[1], rel=1e-6, abs=1e-6)


@pytest.mark.timeout(300)
def test_with_restarts_left_the_side_that_can_not_meet_again_ends_in_words(hosts: list[Host]) -> None:
    logs = str(Path("shared").absolute())
    processes = start("train_multigpu", hosts, *TASK, "--max_restarts", "1", *ON_HOSTS, logs)
    wait_for_training(processes)
    hosts[1].plug(False)
    try:
        (ended,) = run_all(processes[1:], MEET_S + END_S)
        assert processes[1].returncode == 1, ended
        assert len(errors_in(ended)) == 1, ended
        assert f"lost host {socket.gethostname()} ({hosts[0].address}, node 0, ranks 0 and 1)" in errors_in(ended)[0]
        assert hosts[1].pids() == []
        assert processes[0].poll() is None  # it keeps the rendezvous, where the other may come back
    finally:
        processes[0].send_signal(signal.SIGINT)
        (ended,) = run_all(processes[:1], END_S)
    assert processes[0].returncode == 130, ended
    assert hosts[0].pids() == []


def test_a_host_whose_processes_are_all_killed_ends_the_other_in_words(hosts: list[Host]) -> None:
    logs = str(Path("shared").absolute())
    processes = start("train_multigpu", hosts, *TASK, *ON_HOSTS, logs)
    wait_for_training(processes)
    hosts[1].kill_all()
    ended = run_all(processes, END_S)
    assert processes[0].returncode == 1, ended[0]
    assert hosts[0].pids() == []
    assert errors_in(ended[0])[0].startswith("lockstep: error: lost another rank in the exchange of "), ended[0]
    assert "lost host" not in ended[0]  # which still answers
