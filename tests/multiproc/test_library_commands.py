"""Other people's learners by the command line: a run is trained, played, exported and gone on with, in one process."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lockstep
from lockstep.cli.main import main
from tests.multiproc.commands import LOGS, SMALL_WITHOUT_MEMORY, metrics_of, only_run, progress_of

TASK = "cartpole_balance"
LIBRARIES = [("rsl_rl",), ("rl_games",), ("skrl",), ("skrl", "--ml_framework", "jax"), ("sb3",)]
OF_REPLAY = (
    *("--num_envs", "4", "--agent.num_steps_per_env", "8", "--agent.learning_starts", "16", "--agent.batch_size", "16"),
    *("--evaluation.interval", "0", "--logger", "none", "--device", "cpu"),
)


@pytest.fixture(scope="module", params=LIBRARIES, ids=" ".join)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two iterations."""
    folder = tmp_path_factory.mktemp(request.param[0])
    library: Sequence[str] = request.param
    total = ("--max_iterations", "2", "--log_root", str(folder))
    assert main(["train", TASK, *SMALL_WITHOUT_MEMORY, "--rl_library", *library, *total]) == 0
    return only_run(TASK, folder)


def test_it_is_trained(run: Path) -> None:
    first, last = metrics_of(run)
    assert (first["iteration"], last["iteration"]) == (1, 2)
    assert last["env_steps"] == 2 * 8 * 16
    assert any(name.startswith("loss/") for name in last)
    progress = progress_of(run)
    assert progress["status"] == "finished" and progress["iteration"] == 2
    assert (run / "checkpoints" / "latest").exists()


def test_it_is_played(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["play", "--run", str(run), "--num_episodes", "4", "--device", "cpu", "--json"]) == 0
    said: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert said["task"] == TASK and said["num_episodes"] == 4
    assert Path(said["checkpoint"]).name.startswith("model_2")
    assert 1 <= said["mean_episode_length"] <= said["max_episode_length"]
    assert {"mean_return", "std_return", "reward/upright"} <= said.keys()


def test_what_is_exported_decides_as_the_policy_that_is_loaded(run: Path) -> None:
    assert main(["export", "--run", str(run), "--format", "torchscript"]) == 0
    described = json.loads((run / "export" / "policy.json").read_text())
    assert described["task"] == TASK
    exported = torch.jit.load(str(run / "export" / "policy.pt"))
    observations = torch.randn((6, 5), generator=torch.Generator().manual_seed(1))
    actions: Any = lockstep.load_policy(run, device="cpu")(observations)
    np.testing.assert_allclose(exported(observations).numpy(), np.asarray(actions), rtol=1e-4, atol=1e-5)


def test_it_goes_on(run: Path) -> None:
    """The last, since the run is another one afterwards."""
    assert main(["train", "--resume", str(run), "--max_iterations", "3"]) == 0
    records = metrics_of(run)
    assert [record["iteration"] for record in records] == [1, 2, 3]
    assert records[-1]["env_steps"] == 3 * 8 * 16
    assert [path.name[:7] for path in (run / "checkpoints").iterdir() if path.name != "latest"].count("model_3") == 1


@pytest.mark.parametrize(
    "words",
    [
        ("gymnasium/Pendulum-v1", *SMALL_WITHOUT_MEMORY, "--agent.num_mini_batches", "4", "--rl_library", "rsl_rl"),
        ("gymnasium/CartPole-v1", *SMALL_WITHOUT_MEMORY, "--rl_library", "rl_games"),
        ("gymnasium/CartPole-v1", *SMALL_WITHOUT_MEMORY, "--rl_library", "skrl"),
        ("gymnasium/Pendulum-v1", *OF_REPLAY, "--rl_library", "sb3", "--algorithm", "td3"),
    ],
    ids=lambda words: f"{words[-1]} {words[0]}",
)
def test_envs_of_gymnasium_train_them_too(words: tuple[str, ...]) -> None:
    task, *others = words
    assert main(["train", task, *others, "--max_iterations", "3"]) == 0
    run = only_run(task)
    assert progress_of(run)["status"] == "finished" and len(metrics_of(run)) == 3
    assert any(name.startswith("loss/") for name in metrics_of(run)[-1])
    assert main(["play", "--run", str(run), "--num_episodes", "2", "--device", "cpu", "--json"]) == 0
    assert LOGS in run.parents
