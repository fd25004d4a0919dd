"""The three benchmarks on two hosts, network namespaces: one bundle each, of every rank of both."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.benchmark.bundle import read_bundle
from lockstep.benchmark.schema import Bundle
from tests.multiproc.two_hosts import NEEDED, PORT, Host, joined_hosts, run_all

TIMEOUT_S = 200
SMALL = (
    "--num_envs", "16", "--agent.num_steps_per_env", "4", "--agent.num_learning_epochs", "1",
    "--agent.num_mini_batches", "1", "--agent.actor_hidden_dims", "8", "--agent.critic_hidden_dims", "8",
    "--device", "cpu",
)  # fmt: skip

pytestmark = NEEDED


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[Host]]:
    with joined_hosts() as made:
        yield made


def measured_on(hosts: list[Host], folder: Path, kind: str, num_gpus: int, *flags: str) -> Bundle:
    """Run one benchmark on both hosts; return the one bundle."""
    lockstep = str(Path(sys.executable).with_name("lockstep"))
    node = ["--nnodes", "2", "--master_addr", hosts[0].address, "--master_port", str(PORT)]
    words = [f"{kind}_multigpu", "cartpole_classic", "--num_gpus", str(num_gpus), *SMALL, *node, *flags]
    processes = [
        host.start(
            lockstep, "benchmark", *words, "--node_rank", str(rank), "--output", "b.json", folder=folder / host.name
        )
        for rank, host in enumerate(hosts)
    ]
    said = run_all(processes, TIMEOUT_S)
    assert [process.returncode for process in processes] == [0, 0], "\n".join(said)
    written = sorted(path.relative_to(folder) for path in folder.glob("*/*.json"))
    assert written == [Path(hosts[0].name) / "b.json"]  # rank 0 alone has written
    assert "b.json" in said[0] and "b.json" not in said[1]
    return read_bundle(folder / written[0])


def check(bundle: Bundle, kind: str, num_ranks: int) -> None:
    assert (bundle.kind, bundle.num_nodes, bundle.world_size) == (kind, 2, num_ranks)
    assert bundle.local_world_size == num_ranks // 2
    assert [node.node for node in bundle.hardware] == [0, 1]
    assert [each.node for each in bundle.ranks] == [rank // (num_ranks // 2) for rank in range(num_ranks)]
    assert (bundle.num_envs_per_rank, bundle.total_envs) == (16, 16 * num_ranks)
    assert bundle.scope_values["workload_scope"].keys() == {"global", "per_rank"}
    json.dumps(bundle.run.config)


def test_training_on_two_hosts(hosts: list[Host], tmp_path: Path) -> None:
    bundle = measured_on(hosts, tmp_path, "training", 2, "--warm_up", "1", "--iterations", "3")
    check(bundle, "training", 4)
    assert bundle.workload_scope == "global"
    assert bundle.runtime is not None and bundle.runtime.env_steps == 4 * 16 * 4 * 3
    assert {each.tag for each in bundle.runtime.exchanges} >= {"gradients"}
    assert bundle.learning is not None and bundle.learning.env_steps == 4 * 16 * 4 * 4


def test_runtime_on_two_hosts(hosts: list[Host], tmp_path: Path) -> None:
    bundle = measured_on(hosts, tmp_path, "runtime", 1, "--warm_up", "1", "--iterations", "3")
    check(bundle, "runtime", 2)
    assert bundle.workload_scope == "per_rank"
    assert bundle.runtime is not None and bundle.runtime.env_steps == 2 * 16 * 4 * 3


def test_startup_on_two_hosts(hosts: list[Host], tmp_path: Path) -> None:
    bundle = measured_on(hosts, tmp_path, "startup", 1, "--repetitions", "0")
    check(bundle, "startup", 2)
    assert bundle.startup is not None
    assert [phase.name for phase in bundle.startup.phases][-1] == "total"
    assert all(phase.cold_s is not None and phase.cold_s.num == 2 for phase in bundle.startup.phases)
    assert bundle.startup.functions
