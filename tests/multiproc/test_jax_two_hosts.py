"""Two hosts that train together with JAX: network namespaces joined by a cable, one process of two devices in each."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.multiproc.commands import only_run, progress_of
from tests.multiproc.jax_jobs import EXAMPLE, OWN, TASK, TIMEOUT_S, ranks_of, with_example
from tests.multiproc.two_hosts import NEEDED, PORT, Host, joined_hosts, run_all

pytestmark = NEEDED


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    with joined_hosts() as made:
        yield made


@pytest.mark.parametrize("is_told", [False, True], ids=["found", "told"])
def test_two_hosts_train_together(hosts: list[Host], tmp_path: Path, is_told: bool) -> None:
    with_example()
    lockstep = str(Path(sys.executable).with_name("lockstep"))
    node = ["--nnodes", "2", "--num_gpus", "1", "--master_addr", hosts[0].address, "--master_port", str(PORT)]
    # Process 0 is on the first host; a port of its own is free in a namespace of its own.
    node += ["--coordinator_address", f"{hosts[0].address}:{PORT + 1}"] if is_told else []
    task = [*OWN, "--num_devices", "2", "--max_iterations", "2", "--log_root", str(tmp_path / "logs")]
    processes = [
        host.start(
            lockstep, "train_multigpu", *node, "--node_rank", str(rank), *task,
            folder=tmp_path / host.name, PYTHONPATH=str(tmp_path),
        )
        for rank, host in enumerate(hosts)
    ]  # fmt: skip
    said = run_all(processes, TIMEOUT_S)
    assert [process.returncode for process in processes] == [0, 0], "\n".join(said)
    run = only_run(TASK, tmp_path / "logs")
    assert "32 envs on 4 ranks (2 CPU devices in each of 2 processes)" in said[0]
    assert "iteration 2/2" in said[0] and "iteration" not in said[1]
    assert ranks_of(run) == [(0, 0, "cpu:0"), (1, 0, "cpu:1"), (2, 1, "cpu:0"), (3, 1, "cpu:1")]
    assert progress_of(run)["status"] == "finished"
    assert (tmp_path / EXAMPLE.name).exists()
