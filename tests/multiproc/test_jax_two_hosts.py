"""Two hosts that train together with JAX: network namespaces joined by a cable, one process of two devices in each."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.multiproc.commands import attempts_of, num_recorded, only_run, progress_of, wait_for
from tests.multiproc.jax_jobs import EXAMPLE, OWN, TASK, TIMEOUT_S, pid_of, ranks_of, with_example
from tests.multiproc.two_hosts import NEEDED, PORT, Host, joined_hosts, run_all

pytestmark = NEEDED


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    with joined_hosts() as made:
        yield made


def start(hosts: list[Host], logs: Path, *flags: str) -> "list[subprocess.Popen[str]]":
    """Start the same training on both hosts."""
    with_example()
    lockstep = str(Path(sys.executable).with_name("lockstep"))
    node = ["--nnodes", "2", "--num_gpus", "1", "--master_addr", hosts[0].address, "--master_port", str(PORT)]
    task = [*OWN, "--num_devices", "2", "--log_root", str(logs), *flags]
    return [
        host.start(
            lockstep, "train_multigpu", *node, "--node_rank", str(rank), *task,
            folder=logs.parent / host.name, PYTHONPATH=str(Path.cwd()),
        )
        for rank, host in enumerate(hosts)
    ]  # fmt: skip


@pytest.mark.parametrize("is_told", [False, True], ids=["found", "told"])
def test_two_hosts_train_together(hosts: list[Host], tmp_path: Path, is_told: bool) -> None:
    # Process 0 is on the first host; a port of its own is free in a namespace of its own.
    place = ["--coordinator_address", f"{hosts[0].address}:{PORT + 1}"] if is_told else []
    processes = start(hosts, tmp_path / "logs", "--max_iterations", "2", *place)
    said = run_all(processes, TIMEOUT_S)
    assert [process.returncode for process in processes] == [0, 0], "\n".join(said)
    run = only_run(TASK, tmp_path / "logs")
    assert "32 envs on 4 ranks (2 CPU devices in each of 2 processes)" in said[0]
    assert "iteration 2/2" in said[0] and "iteration" not in said[1]
    assert ranks_of(run) == [(0, 0, "cpu:0"), (1, 0, "cpu:1"), (2, 1, "cpu:0"), (3, 1, "cpu:1")]
    assert progress_of(run)["status"] == "finished"
    assert (tmp_path / EXAMPLE.name).exists()


def test_a_process_that_is_killed_on_one_host_is_started_again(hosts: list[Host], tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    processes = start(hosts, logs, "--max_iterations", "100000", "--max_restarts", "1")
    try:
        wait_for(lambda: list((logs / TASK).glob("*/checkpoints/latest")), timeout_s=TIMEOUT_S)
        run = only_run(TASK, logs)
        os.kill(pid_of(run, 1), signal.SIGKILL)
        wait_for(lambda: len(attempts_of(run)) == 2, timeout_s=TIMEOUT_S)
        again = attempts_of(run)[1]["iteration"]
        wait_for(lambda: num_recorded(run) >= again + 2, timeout_s=TIMEOUT_S)
        for process in processes:
            process.send_signal(signal.SIGTERM)
    finally:
        said = run_all(processes, TIMEOUT_S)
    assert [process.returncode for process in processes] == [75, 75], "\n".join(said)
    assert f"restart 1 after a failure (rank 1 was killed by SIGKILL): {run} goes on from iteration {again}" in said[0]
    assert again >= 2
    assert progress_of(run)["status"] == "preempted"


def test_skrl_trains_on_two_hosts_that_know_the_coordinator_alone(hosts: list[Host], tmp_path: Path) -> None:
    lockstep, logs = str(Path(sys.executable).with_name("lockstep")), tmp_path / "logs"
    task = [
        TASK, "--ml_framework", "jax", "--device", "cpu", "--rl_library", "skrl", "--num_envs", "16",
        "--max_iterations", "2", "--agent.num_steps_per_env", "4", "--logger", "none", "--evaluation.interval", "0",
        "--log_root", str(logs),
    ]  # fmt: skip
    place = ["--nnodes", "2", "--num_gpus", "1", "--coordinator_address", f"{hosts[0].address}:{PORT}"]
    processes = [
        host.start(lockstep, "train_multigpu", *place, "--node_rank", str(rank), *task, folder=tmp_path / host.name)
        for rank, host in enumerate(hosts)
    ]
    said = run_all(processes, TIMEOUT_S)
    assert [process.returncode for process in processes] == [0, 0], "\n".join(said)
    assert "32 envs on 2 ranks (1 CPU device in each of 2 processes)" in said[0]
    assert "iteration 2/2" in said[0] and "iteration" not in said[1]
    run = only_run(TASK, logs)
    assert ranks_of(run) == [(0, 0, "cpu:0"), (1, 1, "cpu:0")]
    assert progress_of(run)["status"] == "finished"
