"""What each rank of a real job is given for its place in it: numbers to draw, envs, and the right to take part.

The ranks stand on two nodes of one rank each, as far as they can know: every LOCAL_RANK is 0, so that whatever should
go by the global rank and goes by the local one is found out.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

import lockstep
from tests.multiproc.commands import SMALL, free_port

TIMEOUT_S = 120
NUM_ENVS = 5

SCRIPT = f"""
import json
import lockstep
from pathlib import Path
from spy_runner import draws

place = lockstep.init("cpu", seed=3)
drawn = draws()
env = lockstep.make_env("cartpole_classic", {NUM_ENVS}, seed=11, device="cpu")
script = {{
    "place": [place.rank, place.local_rank, place.world_size],
    "draws": drawn,
    "env_ids": env.env_ids.tolist(),
    "observations": env.observations["actor"].tolist(),
}}
Path(f"script_{{place.rank}}.json").write_text(json.dumps(script))
env.close()
lockstep.train(
    lockstep.make_config(
        "cartpole_classic",
        runner="spy_runner:Spy",
        num_envs=(12, 8),
        seed=3,
        device="cpu",
        logger="none",
        evaluation={{"interval": 1, "num_episodes": 7}},
    )
)
"""

JOINING = """
import sys
import lockstep
from lockstep.core.errors import LockstepError

try:
    lockstep.init("cpu")
except LockstepError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
"""


@pytest.fixture(autouse=True)
def work_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run in a folder that is empty but for what ranks write on purpose."""
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


def start(command: Sequence[str], variables: dict[str, str]) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, *command],
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def ends(processes: "Sequence[subprocess.Popen[str]]") -> list[tuple[int, str, str]]:
    """Wait for all; return each one's exit code and what it said on stdout and stderr."""
    try:
        said = [process.communicate(timeout=TIMEOUT_S) for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.communicate()
    return [(process.returncode, *texts) for process, texts in zip(processes, said, strict=True)]


def run_on_two_nodes(*commands: Sequence[str], **variables_of_rank_1: str) -> list[tuple[int, str, str]]:
    """Run one command per rank, with the variables that torchrun sets on two nodes of one rank."""
    job = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "LOCKSTEP_PIN": "0"}
    job |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = [
        start(command, job | {"RANK": str(rank)} | (variables_of_rank_1 if rank else {}))
        for rank, command in enumerate(commands)
    ]
    return ends(processes)


# --- numbers and envs ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def notes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Return what the two ranks of one script, started by a launcher on each node, were given."""
    folder = tmp_path_factory.mktemp("script")
    shutil.copy(Path(__file__).with_name("spy_runner.py"), folder)
    (folder / "own.py").write_text(SCRIPT)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.chdir(folder)
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        address = ["--master_addr", "127.0.0.1", "--master_port", str(free_port())]
        command = ["-m", "lockstep", "train_multigpu", "--nnodes", "2", *address, "--num_gpus", "1", "--device", "cpu"]
        launchers = [start([*command, "--node_rank", str(node), "--script", "own.py"], {}) for node in range(2)]
        answers = ends(launchers)
    assert [code for code, *_ in answers] == [0, 0], answers
    return {
        name: [json.loads((folder / f"{name}_{rank}.json").read_text()) for rank in range(2)]
        for name in ("script", "spy")
    }


def test_ranks_of_two_nodes_are_told_apart(notes: dict[str, list[Any]]) -> None:
    assert [found["place"] for found in notes["script"]] == [[0, 0, 2], [1, 0, 2]]


@pytest.mark.parametrize("where", ["script", "spy"])
def test_no_two_ranks_draw_the_same_numbers(notes: dict[str, list[Any]], where: str) -> None:
    first, other = (found["draws"] for found in notes[where])
    assert [name for name in first if first[name] == other[name]] == []


def test_a_training_draws_from_its_seed_whatever_was_drawn_before(notes: dict[str, list[Any]]) -> None:
    # The script has the seed of the run, so both begin alike, though the script has drawn numbers in between.
    assert [found["draws"] for found in notes["spy"]] == [found["draws"] for found in notes["script"]]


def test_a_training_deals_its_envs_out_to_the_ranks(notes: dict[str, list[Any]]) -> None:
    assert [found["env_ids"] for found in notes["spy"]] == [list(range(12)), list(range(12, 20))]


def test_an_evaluation_deals_its_envs_out_to_the_ranks(notes: dict[str, list[Any]]) -> None:
    assert [found["evaluation_env_ids"] for found in notes["spy"]] == [[0, 1, 2, 3], [4, 5, 6]]


def test_the_envs_of_a_script_are_those_of_one_process_with_all_of_them(notes: dict[str, list[Any]]) -> None:
    assert [found["env_ids"] for found in notes["script"]] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    env = lockstep.make_env("cartpole_classic", 2 * NUM_ENVS, seed=11, device="cpu")
    starts = env.observations["actor"].tolist()
    env.close()
    assert [row for found in notes["script"] for row in found["observations"]] == starts
    assert len({str(row) for row in starts}) == 2 * NUM_ENVS


# --- ranks that don't belong together ------------------------------------------------------------------------------


def test_a_rank_with_another_config_is_refused_before_anything_is_written() -> None:
    command = ["-m", "lockstep", "train", "cartpole_classic", *SMALL, "--max_iterations", "1"]
    first, other = run_on_two_nodes(command, [*command, "--agent.gamma", "0.5"])
    assert [first[:2], other] == [(2, ""), (2, "", "")], (first, other)  # rank 0 says it for both
    host = socket.gethostname()
    assert first[2].startswith(
        f"lockstep: error: rank 1 on {host} differs from rank 0 on {host}: there agent.gamma is 0.5, here"
    )
    assert first[2].count("\n") == 1
    assert list(Path().iterdir()) == []


def test_a_rank_of_another_version_is_refused_when_a_script_joins(tmp_path: Path) -> None:
    # The metadata of an installed package, found before that of the one that is really there.
    installed = tmp_path / "other" / "lockstep_rl-0.0.7.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: lockstep-rl\nVersion: 0.0.7\n")
    path = os.pathsep.join([str(installed.parent), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    answers = run_on_two_nodes(["-c", JOINING], ["-c", JOINING], PYTHONPATH=path)
    host = socket.gethostname()
    there, here = "there lockstep is version 0.0.7", f"here {version('lockstep-rl')}"
    for code, _, errors in answers:
        assert code == 2, answers
        assert errors.startswith(f"rank 1 on {host} differs from rank 0 on {host}: {there}, {here}; start all ranks")
    assert list(Path().iterdir()) == []
