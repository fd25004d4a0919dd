"""``lockstep benchmark``: what it takes, what it refuses, and one small benchmark of each kind in this process."""

import json
from pathlib import Path

import numpy as np
import pytest

from lockstep.benchmark.bundle import read_bundle
from lockstep.benchmark.options import Options
from lockstep.cli.benchmark_request import launched, read
from lockstep.cli.main import main

SMALL = (
    "cartpole_balance", "--device", "cpu", "--num_envs", "4", "--agent.num_steps_per_env", "4",
    "--agent.num_learning_epochs", "1", "--agent.num_mini_batches", "1", "--agent.actor_hidden_dims", "8",
    "--agent.critic_hidden_dims", "8", "--env.num_physics_threads", "1", "--env.max_episode_steps", "20",
)  # fmt: skip
JAX = ("--ml_framework", "jax")


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return the one line by which a command line is refused."""
    assert main(["benchmark", *words]) == 2
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert out == ""
    assert line.startswith("lockstep: error: ")
    return line.removeprefix("lockstep: error: ")


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), "what is to be measured? Give one of startup, runtime, training, startup_multigpu"),
        (("trainig", "x"), "unknown benchmark 'trainig'; did you mean 'training'?"),
        (("--num_envs", "3"), "what is measured comes first, as in lockstep benchmark training TASK, not '--num_envs'"),
        (("training",), "no task is given"),
        (("training", *SMALL, "--resume"), "--resume: a benchmark starts anew"),
        (("training", *SMALL, "--checkpoint", "x"), "--checkpoint: a benchmark starts anew"),
        (("training", *SMALL, "--max_iterations", "3"), "--max_iterations: the measured iterations are --iterations K"),
        (("training_multigpu", *SMALL, "--num_gpus", "2", "--max_restarts=1"), "--max_restarts: a benchmark that has"),
        (("training_multigpu", "--script", "x.py"), "--script: a benchmark measures what lockstep trains"),
        (("training", *SMALL, "--warm_up", "0"), "warm_up must be at least 1, not 0"),
        (("training", *SMALL, "--iterations", "1.5"), "iterations must be a whole number, not '1.5'"),
        (("training", *SMALL, "--iterations"), "--iterations needs a value"),
        (("training", *SMALL, "--output", "."), "output . is a folder"),
        (("training", *SMALL, "--output", "/dev/null/x.json"), "output /dev/null can't be made, since /dev/null is no"),
        (("training", *SMALL, "--output", "/dev/null"), "output /dev/null is no regular file; give the path of a file"),
        (
            ("training", *SMALL, "--output", "x" * 240),
            "output xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx...: the name is",
        ),
        (("training", *SMALL, "--warmup", "3"), "unknown flag '--warmup'; did you mean '--warm_up'?"),
        (("training", *SMALL, "--num_env", "3"), "unknown flag '--num_env'; did you mean '--num_envs'?"),
        (
            ("training", *SMALL, "--num_gpus", "2"),
            "--num_gpus says where ranks run, and lockstep benchmark training measures one process; use ",
        ),
        (("training", *SMALL, "--repetitions", "2"), "--repetitions belongs to lockstep benchmark startup"),
        (("training", *SMALL, "--success_return", "2"), "--success_return says what --check_success asks for"),
        (
            ("training", *SMALL, "--check_success", "--success_return", "inf"),
            "success_return must be a number, not 'inf'",
        ),
        (("runtime", *SMALL, "--video"), "--video belongs to lockstep benchmark training"),
        (("startup", *SMALL, "--iterations", "2"), "--iterations belongs to runtime and training"),
        (("training_multigpu", *SMALL, "--num_gpus", "2", "--video"), "--video can't be had with training_multigpu"),
        (
            ("training_multigpu", *SMALL, "--num_gpus", "2", "--capture-env-sensors"),
            "--capture_env_sensors can't be had with training_multigpu: it keeps what the envs of one process give",
        ),
        (
            ("training_multigpu", *SMALL, "--num_gpus", "2", "--check_success"),
            "--check_success can't be had with training_multigpu: an evaluation is no part of the measured throughput",
        ),
    ],
)
def test_what_can_not_be_is_refused_in_one_line(
    words: tuple[str, ...], expected: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert refusal(capsys, *words).startswith(expected)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", [("--help",), ("training", "--help"), ("runtime_multigpu", "x", "-h")])
def test_help(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["benchmark", *words]) == 0
    assert capsys.readouterr().out.startswith("usage: lockstep benchmark WHAT")


def test_own_flags_and_those_of_a_training_may_stand_in_any_order() -> None:
    config, options = read(
        "training", ["--iterations", "7", *SMALL, "--output=a.json", "--check-success", "--warm_up=2"]
    )
    assert options == Options("training", output=Path("a.json"), warm_up=2, iterations=7, check_success=True)
    assert (config.task, config.num_envs) == ("cartpole_balance", 4)


def test_what_ranks_are_given() -> None:
    words = ["--num_gpus", "2", *SMALL, "--iterations", "7", "--output", "a b.json", "--dry_run"]
    launch, work, dry_run = launched("training", words, [], {})
    assert launch.num_gpus == 2
    assert dry_run
    assert work.words == ("-m", "lockstep", "benchmark", "training", "--iterations=7", "--output=a b.json", *SMALL)
    assert work.envs_by_rank == (4, 4)
    assert not work.saves


# --- one of each ---------------------------------------------------------------------------------------------------


def test_a_training_is_measured_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["benchmark", "training", *SMALL, "--warm_up", "1", "--iterations", "3"]) == 0
    (path,) = Path("logs/benchmark").iterdir()
    assert path.name.startswith("training_cartpole_balance_torch_1_rank_")
    said = capsys.readouterr().out
    assert f"written: {path}" in said
    bundle = read_bundle(path)
    assert bundle.runtime is not None
    assert f"{bundle.runtime.steps_per_s:,.0f} env steps/s" in said
    assert (bundle.runtime.iterations, bundle.runtime.env_steps) == (3, 3 * 4 * 4)
    assert (bundle.kind, bundle.world_size, bundle.workload_scope) == ("training", 1, "global")
    assert bundle.runtime.split is not None
    assert sum(bundle.runtime.split.model_dump().values()) == pytest.approx(bundle.runtime.iteration_s.mean, rel=0.01)
    assert bundle.learning is not None and len(bundle.learning.curve) == 4
    assert not list(Path("logs").glob("cartpole_balance"))  # no run


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_runtime_is_measured(framework: str) -> None:
    devices = ("--num_devices", "1") if framework == "jax" else ()
    words = (*SMALL, "--ml_framework", framework, *devices, "--warm_up", "1", "--iterations", "3", "--output", "b.json")
    assert main(["benchmark", "runtime", *words]) == 0
    bundle = read_bundle(Path("b.json"))
    assert bundle.runtime is not None
    assert bundle.runtime.env_steps == 3 * 4 * 4
    assert bundle.ranks[0].env_steps == 3 * 4 * 4
    assert (bundle.run.ml_framework, bundle.workload_scope) == (framework, "per_rank")


def test_devices_of_jax_are_ranks() -> None:
    words = (*SMALL, *JAX, "--num_devices", "2", "--warm_up", "1", "--iterations", "2", "--output", "b.json")
    assert main(["benchmark", "training", *words]) == 0
    bundle = read_bundle(Path("b.json"))
    assert (bundle.world_size, bundle.num_processes, bundle.total_envs) == (2, 1, 8)
    assert bundle.runtime is not None
    assert bundle.runtime.split is None and bundle.runtime.split_note is not None
    assert bundle.runtime.warm_up.compile_s is not None and bundle.runtime.warm_up.compile_s > 0
    assert bundle.runtime.env_steps == 2 * 2 * 4 * 4


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_what_sensors_gave_and_whether_it_has_learned(framework: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = (*SMALL, "--ml_framework", framework, "--warm_up", "1", "--iterations", "1", "--output", "b.json")
    asked = ("--capture_env_sensors", "--check_success", "--success_return", "1000")
    assert main(["benchmark", "training", *words, *asked]) == 1
    said = capsys.readouterr()
    assert "--check_success asks for" in said.err
    assert "not learned: mean return" in said.out
    bundle = read_bundle(Path("b.json"))
    assert bundle.learning is not None and bundle.learning.success is not None
    success = bundle.learning.success
    assert (success.reached, success.needed_return) == (False, 1000.0)
    assert success.mean_return == bundle.learning.metrics["eval/mean_return"]
    assert bundle.runtime is not None and bundle.runtime.iterations == 1
    with np.load(str(bundle.artifacts.env_sensors)) as sensors:
        assert sensors["observations/actor"].shape == (20, 4, 5)
        assert sensors["done"].sum() > 0
        assert np.isfinite(sensors["reward/upright"]).all()


RUNNERS = """
import torch
from lockstep.core.types import Comm

class Few:
    num_records = 2
    def __init__(self, config, env, comm):
        self.env = env
    def train(self, observer, evaluation_env):
        for _ in range(self.num_records):
            self.env.step(torch.zeros((self.env.num_envs, 1)))
            observer.record({"mean_return": float("nan"), "loss/x": float("inf")})
        return "finished"

class Never(Few):
    num_records = 0

class Enough(Few):
    num_records = 4

class Asked(Few):
    num_records = 4
    def train(self, observer, evaluation_env):
        import os, signal
        super().train(observer, evaluation_env)
        os.kill(os.getpid(), signal.SIGTERM)
        while observer.stop_requested is None:
            pass
        return observer.stop_requested
"""


@pytest.mark.parametrize(("runner", "num_records"), [("Few", 2), ("Never", 0)])
def test_a_runner_that_records_too_little_is_told(
    runner: str, num_records: int, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("odd_runners.py").write_text(RUNNERS)
    words = (*SMALL, "--runner", f"odd_runners:{runner}", "--warm_up", "1", "--iterations", "3", "--output", "b.json")
    assert main(["benchmark", "training", *words]) == 1
    assert f"the learner has recorded {num_records} iterations, and 1 to warm up and 3" in capsys.readouterr().err
    assert not Path("b.json").exists()


def test_what_a_runner_records_need_not_be_finite() -> None:
    Path("odd_runners.py").write_text(RUNNERS)
    words = (*SMALL, "--runner", "odd_runners:Enough", "--warm_up", "1", "--iterations", "3", "--output", "b.json")
    assert main(["benchmark", "training", *words]) == 0
    bundle = read_bundle(Path("b.json"))
    assert bundle.learning is not None
    assert bundle.learning.metrics["mean_return"] is None
    assert bundle.work is None


def test_a_benchmark_that_is_asked_to_stop_leaves_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    Path("odd_runners.py").write_text(RUNNERS)
    words = (*SMALL, "--runner", "odd_runners:Asked", "--warm_up", "1", "--iterations", "3", "--output", "b.json")
    assert main(["benchmark", "training", *words]) == 75
    assert "preempted: a benchmark that is stopped has measured nothing" in capsys.readouterr().err
    assert not Path("b.json").exists()


def test_a_link_leads_to_what_is_replaced() -> None:
    Path("there").mkdir()
    Path("there/old.json").write_text("old")
    Path("link.json").symlink_to("there/old.json")
    words = (*SMALL, "--warm_up", "1", "--iterations", "1", "--output", "link.json")
    assert main(["benchmark", "runtime", *words]) == 0
    assert Path("link.json").is_symlink()
    assert read_bundle(Path("there/old.json")).kind == "runtime"


def test_sac_is_measured_once_it_learns() -> None:
    words = (
        "cartpole_classic", *JAX, "--algorithm", "sac", "--device", "cpu", "--num_devices", "1", "--num_envs", "16",
        "--agent.learning_starts", "500", "--agent.num_updates", "1", "--agent.batch_size", "16",
        "--agent.actor_hidden_dims", "8", "--agent.critic_hidden_dims", "8", "--warm_up", "2", "--iterations", "2",
    )  # fmt: skip
    assert main(["benchmark", "training", *words, "--output", "b.json"]) == 0
    bundle = read_bundle(Path("b.json"))
    assert bundle.runtime is not None
    # An iteration is 16 x 8 env steps: 4 of them until 500, then the 2 of the warm-up.
    assert bundle.runtime.warm_up.iterations == 6
    assert bundle.runtime.warm_up.env_steps == 6 * 128


def test_a_policy_that_is_good_enough(capsys: pytest.CaptureFixture[str]) -> None:
    words = (*SMALL, "--warm_up", "1", "--iterations", "1", "--output", "b.json", "--check_success")
    assert main(["benchmark", "training", *words]) == 0  # which for so short a time even a new one is
    success = json.loads(Path("b.json").read_text())["learning"]["success"]
    assert success["reached"] is True
    assert success["needed_return"] == pytest.approx(0.8 * 20)
    assert "learned: mean return" in capsys.readouterr().out
