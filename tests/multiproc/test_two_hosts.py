"""Two hosts: network namespaces joined by a cable, two ranks in each, one training."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

TIMEOUT_S = 120
PORT = 29411  # in a namespace of its own any port is free

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="network namespaces are Linux's"),
    pytest.mark.skipif(shutil.which("ip") is None, reason="the command ip is missing (package iproute2)"),
    pytest.mark.skipif(os.geteuid() != 0, reason="making network namespaces takes root"),
]


@dataclass(frozen=True)
class Host:
    """A network namespace."""

    name: str
    interface: str
    address: str

    def start(self, *command: str, folder: Path) -> "subprocess.Popen[str]":
        """Run a command on this host; its session is its own, so that it can be ended with all it has started."""
        folder.mkdir(exist_ok=True)
        return subprocess.Popen(
            ["ip", "netns", "exec", self.name, *command],
            cwd=folder,
            env=os.environ | {"XDG_CACHE_HOME": str(folder / "cache")},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    number = os.getpid() % 250
    made = [Host(f"ls{number}h{side}", f"ls{number}v{side}", f"10.77.{number}.{side + 1}") for side in range(2)]
    try:
        for host in made:
            try:
                ip("netns", "add", host.name)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"this machine lets nobody make network namespaces: {error.stderr.strip()}")
        ip("link", "add", made[0].interface, "type", "veth", "peer", "name", made[1].interface)
        for host in made:
            ip("link", "set", host.interface, "netns", host.name)
            ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", host.interface)
            ip("-n", host.name, "link", "set", host.interface, "up")
            ip("-n", host.name, "link", "set", "lo", "up")
        yield made
    finally:
        for host in made:
            subprocess.run(["ip", "netns", "delete", host.name], capture_output=True)


def train_on(hosts: list[Host], folder: Path, *flags_of: list[str]) -> tuple[list[str], Path]:
    """Train on all hosts, which share the log root; return what each said and the run directory."""
    lockstep = str(Path(sys.executable).with_name("lockstep"))
    task = ["cartpole_classic", "--device", "cpu", "--num_gpus", "2", "--num_envs", "16", "--max_iterations", "3"]
    task += ["--evaluation.num_episodes", "6", "--log_root", str(folder / "logs"), "--sentinel_interval", "1"]
    processes = [
        host.start(lockstep, "train_multigpu", *task, *flags, folder=folder / host.name)
        for host, flags in zip(hosts, flags_of, strict=True)
    ]
    try:
        said = [process.communicate(timeout=TIMEOUT_S)[0] for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert [process.returncode for process in processes] == [0, 0], "\n".join(said)
    (run,) = (folder / "logs" / "cartpole_classic").iterdir()
    return said, run


def check_run(run: Path) -> None:
    """The one run directory holds a training of four ranks."""
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [record["env_steps"] for record in metrics]
    assert len(steps) == 3
    assert steps == [steps[0] * iteration for iteration in (1, 2, 3)]
    assert steps[0] % (4 * 16) == 0
    ranks = json.loads((run / "run.json").read_text())["ranks"]
    assert [(rank["rank"], rank["local_rank"]) for rank in ranks] == [(0, 0), (1, 1), (2, 0), (3, 1)]
    assert json.loads((run / "progress.json").read_text())["status"] == "finished"
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
