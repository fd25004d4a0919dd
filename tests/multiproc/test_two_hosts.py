"""Two hosts: network namespaces joined by a cable, two ranks in each, one training."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.multiproc.commands import metrics_of, only_run, progress_of
from tests.multiproc.two_hosts import NEEDED, PORT, Host, joined_hosts, run_all

TIMEOUT_S = 120

pytestmark = NEEDED


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    with joined_hosts() as made:
        yield made


def train_on(hosts: list[Host], folder: Path, *flags_of: list[str]) -> tuple[list[str], Path]:
    """Train on all hosts, which share the log root; return what each said and the run directory."""
    lockstep = str(Path(sys.executable).with_name("lockstep"))
    task = ["cartpole_classic", "--device", "cpu", "--num_gpus", "2", "--num_envs", "16", "--max_iterations", "3"]
    task += ["--evaluation.num_episodes", "6", "--log_root", str(folder / "logs"), "--sentinel_interval", "1"]
    processes = [
        host.start(lockstep, "train_multigpu", *task, *flags, folder=folder / host.name)
        for host, flags in zip(hosts, flags_of, strict=True)
    ]
    said = run_all(processes, TIMEOUT_S)
    assert [process.returncode for process in processes] == [0, 0], "\n".join(said)
    return said, only_run("cartpole_classic", folder / "logs")


def check_run(run: Path) -> None:
    """The one run directory holds a training of four ranks."""
    steps = [record["env_steps"] for record in metrics_of(run)]
    assert len(steps) == 3
    assert steps == [steps[0] * iteration for iteration in (1, 2, 3)]
    assert steps[0] % (4 * 16) == 0
    ranks = json.loads((run / "run.json").read_text())["ranks"]
    assert [(rank["rank"], rank["local_rank"]) for rank in ranks] == [(0, 0), (1, 1), (2, 0), (3, 1)]
    assert progress_of(run)["status"] == "finished"
    assert sorted(path.name for path in (run / "ranks").iterdir()) == [f"rank_{rank}.log" for rank in range(4)]


def test_nodes_that_are_told_the_first_ones_address(hosts: list[Host], tmp_path: Path) -> None:
    node = ["--nnodes", "2", "--master_addr", hosts[0].address, "--master_port", str(PORT)]
    said, run = train_on(hosts, tmp_path, *([*node, "--node_rank", str(rank)] for rank in range(2)))
    check_run(run)
    assert "iteration 3/3" in said[0]
    assert "iteration" not in said[1]


def test_nodes_that_meet_at_a_rendezvous(hosts: list[Host], tmp_path: Path) -> None:
    meeting = ["--nnodes", "2", "--rdzv_endpoint", f"{hosts[0].address}:{PORT}", "--rdzv_id", "night"]
    _, run = train_on(hosts, tmp_path, meeting, meeting)
    check_run(run)
