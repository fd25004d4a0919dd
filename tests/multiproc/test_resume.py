"""A run that was stopped and resumed is the run that was not."""

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.multiproc.commands import LOGS, SMALL, Command, lockstep, metrics_of, only_run, progress_of, train_small
from tests.unit.learner_fixtures import differences


def load(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = torch.load(path, weights_only=True)
    del content["wall_s"]
    content["config"].pop("max_iterations")
    return content


@pytest.mark.parametrize("recurrent", ["none", "gru", "lstm"])
def test_ten_iterations_resumed_for_ten_more_equal_twenty(recurrent: str) -> None:
    # Episodes of 40 steps end in every iteration somewhere, so resets and bootstraps are part of what is compared.
    options = ("--agent.recurrent", recurrent, "--env.max_episode_steps", "40", "--checkpoints.interval", "20")
    straight = train_small("cartpole_swingup", *options, "--max_iterations", "20")
    straight.parent.rename("straight")
    stopped = train_small("cartpole_swingup", *options, "--max_iterations", "10")
    resumed = lockstep("train", "--resume", str(stopped), "--max_iterations", "20")
    assert resumed.returncode == 0, resumed.stderr

    checkpoint = Path("checkpoints", "model_20.pt")
    (other,) = Path("straight").iterdir()
    assert differences(load(other / checkpoint), load(stopped / checkpoint)) == []
    lines = metrics_of(stopped)
    assert [line["iteration"] for line in lines] == list(range(1, 21))
    assert progress_of(stopped)["status"] == "finished"
    assert len(json.loads((stopped / "run.json").read_text())["attempts"]) == 2


def test_a_bare_resume_takes_the_newest_run_of_the_task() -> None:
    run = train_small("cartpole_classic", "--max_iterations", "2")
    resumed = lockstep("train", "cartpole_classic", "--resume", "--max_iterations", "3")
    assert resumed.returncode == 0, resumed.stderr
    assert progress_of(run)["iteration"] == 3


def test_a_checkpoint_starts_a_new_run_at_iteration_zero_with_the_same_weights() -> None:
    run = train_small("cartpole_classic", "--max_iterations", "2")
    start = lockstep(
        "train", "cartpole_classic", *SMALL, "--checkpoint", str(run / "checkpoints" / "latest"),
        "--max_iterations", "1", "--agent.learning_rate", "1e-30", "--agent.schedule", "fixed", "--run_name", "new",
    )  # fmt: skip
    assert start.returncode == 0, start.stderr
    (new,) = Path("logs/cartpole_classic").glob("*_new")
    one, other = load(run / "checkpoints" / "model_2.pt"), load(new / "checkpoints" / "model_1.pt")
    weights = [name for name in one["policy"] if "normalizer" not in name]
    assert all(torch.equal(one["policy"][name], other["policy"][name]) for name in weights)
    # The normaliser came along too and went on counting: 2 + 1 iterations of 8 steps in 16 envs.
    assert other["policy"]["actor_normalizer.count"] == 3 * 8 * 16
    assert other["iteration"] == 1


def test_a_run_from_a_checkpoint_remembers_it_from_the_start() -> None:
    run = train_small("cartpole_classic", "--max_iterations", "2")
    start = lockstep(
        "train", "cartpole_classic", *SMALL, "--checkpoint", str(run / "checkpoints" / "latest"),
        "--max_iterations", "1", "--run_name", "new",
    )  # fmt: skip
    assert start.returncode == 0, start.stderr
    (new,) = Path("logs/cartpole_classic").glob("*_new")
    # As a kill before the first iteration's checkpoint would leave it.
    (new / "checkpoints" / "model_1.pt").unlink()
    (new / "checkpoints" / "latest").unlink()
    first, trained = load(new / "checkpoints" / "model_0.pt"), load(run / "checkpoints" / "model_2.pt")
    assert differences(first["policy"], trained["policy"]) == []
    resumed = lockstep("train", "--resume", str(new))
    assert resumed.returncode == 0, resumed.stderr
    again = load(new / "checkpoints" / "model_1.pt")
    assert again["policy"]["actor_normalizer.count"] == 3 * 8 * 16


def test_a_new_learning_rate_is_used_and_without_one_the_schedule_goes_on() -> None:
    run = train_small("cartpole_classic", "--max_iterations", "2")
    rates = [record["learning_rate"] for record in metrics_of(run)]
    options = ("--agent.learning_rate", "3e-5", "--agent.schedule", "fixed", "--max_iterations", "3")
    assert lockstep("train", "--resume", str(run), *options).returncode == 0
    assert lockstep("train", "--resume", str(run), "--max_iterations", "4").returncode == 0
    after = [record["learning_rate"] for record in metrics_of(run)]
    assert after[:2] == rates
    assert after[2:] == pytest.approx([3e-5, 3e-5])


def test_a_picture_that_cannot_be_drawn_does_not_fail_a_run() -> None:
    finished = lockstep(
        "train", "cartpole_classic", *SMALL, "--max_iterations", "1", "--run_name", "$_$", MPLBACKEND="nonsense"
    )
    assert finished.returncode == 0, finished.stderr
    assert "Traceback" not in finished.stderr
    assert progress_of(only_run("cartpole_classic"))["status"] == "finished"


def test_a_name_with_signs_of_mathematics_gets_its_picture() -> None:
    run = train_small("cartpole_classic", "--max_iterations", "30", "--run_name", "$_$ 日本")
    assert (run / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_a_finished_run_that_is_resumed_stays_as_it_is() -> None:
    run = train_small("cartpole_classic", "--max_iterations", "2")
    before = progress_of(run)
    resumed = lockstep("train", "--resume", str(run))
    assert resumed.returncode == 0, resumed.stderr
    assert progress_of(run) == before
    assert before["env_steps"] == 2 * 8 * 16


@pytest.mark.parametrize(
    ("number", "status", "code"), [(signal.SIGINT, "interrupted", 130), (signal.SIGTERM, "preempted", 75)]
)
def test_a_signal_saves_and_the_run_goes_on(number: signal.Signals, status: str, code: int) -> None:
    training = Command("train", "cartpole_classic", *SMALL, "--max_iterations", "100000")
    training.wait_for(lambda: any(LOGS.glob("*/*/metrics.jsonl")))
    training.send(number)
    ended, output, errors = training.end()
    assert ended == code, errors
    assert "--resume" in output
    run = only_run("cartpole_classic")
    progress = progress_of(run)
    assert progress["status"] == status
    assert progress["checkpoint"] == f"checkpoints/model_{progress['iteration']}.pt"
    resumed = lockstep("train", "--resume", str(run), "--max_iterations", str(progress["iteration"] + 1))
    assert resumed.returncode == 0, resumed.stderr


def test_a_damaged_newest_checkpoint_gives_way_to_the_one_before() -> None:
    run = train_small("cartpole_classic", "--max_iterations", "4", "--checkpoints.interval", "2")
    newest = run / "checkpoints" / "model_4.pt"
    newest.write_bytes(newest.read_bytes()[:1000])
    resumed = lockstep("train", "--resume", str(run), "--max_iterations", "5")
    assert resumed.returncode == 0, resumed.stderr
    assert "model_4.pt" in resumed.stderr
    lines = metrics_of(run)
    assert [line["iteration"] for line in lines] == [1, 2, 3, 4, 5]


def test_two_processes_do_not_train_in_one_run_directory() -> None:
    first = Command("train", "cartpole_classic", *SMALL, "--max_iterations", "100000", stdout=subprocess.DEVNULL)
    try:
        first.wait_for(lambda: any(LOGS.glob("*/*/metrics.jsonl")))
        run = only_run("cartpole_classic")
        second = lockstep("train", "--resume", str(run))
        assert second.returncode == 2
        assert f"pid {first.process.pid}" in second.stderr
    finally:
        first.kill()
