"""Training loops of the user's own: refused before anything is built, or run like lockstep's."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import lockstep
from lockstep.cli.main import main
from lockstep.cli.train_request import read
from lockstep.core.errors import RunError, UsageError
from lockstep.distributed.torch_comm import SoloComm
from lockstep.learn.config import TrainConfig
from lockstep.learn.torch.checkpoint import load
from lockstep.learn.torch.loop import PpoRunner
from lockstep.session.make_env import build_env
from lockstep.session.runner import check_learner, check_runner, load_runner
from lockstep.session.train import train
from lockstep.session.user_runner import UserRunner
from tests.unit.learner_fixtures import small_config
from tests.unit.runner_fixtures import HERE, Alone, Fitting


def config_of(runner: str, **overrides: Any) -> TrainConfig:
    settings: dict[str, Any] = {"logger": "none", "evaluation": {"interval": 0}, "max_iterations": 4}
    return small_config(runner=f"{HERE}:{runner}", **settings | overrides)


def refused(runner: str, world_size: int = 1, **arguments: Any) -> str:
    with pytest.raises(UsageError) as refusal:
        check_runner(config_of(runner), world_size, **arguments)
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


# --- refusals --------------------------------------------------------------------------------------------------------


def test_the_class_says_why_it_needs_one_process() -> None:
    check_runner(config_of("OneArmed"), 1)
    assert refused("OneArmed", 4) == (
        f"runner {HERE}:OneArmed can't train on 4 ranks: it drives the one arm in the laboratory; run it with one "
        "process"
    )


def test_several_ranks_need_the_mixin() -> None:
    check_runner(config_of("Alone"), 1)
    check_runner(config_of("Fitting"), 2)
    line = refused("Alone", 2)
    assert line.startswith(f"runner {HERE}:Alone can't train on 2 ranks: it does not derive from lockstep.distributed.")
    assert line.endswith("or run it with one process")


def test_the_built_in_learner_may_say_so_too(monkeypatch: pytest.MonkeyPatch) -> None:
    check_learner(small_config(), 2)
    monkeypatch.setattr(PpoRunner, "distributed_unsupported", "it has too much to remember", raising=False)
    check_learner(small_config(), 1)
    check_learner(config_of("Alone"), 2)  # it has another one
    with pytest.raises(UsageError, match="algorithm ppo can't train on 2 ranks: it has too much to remember; run it"):
        check_learner(small_config(), 2)


@pytest.mark.parametrize(
    ("runner", "words"),
    [
        ("Fittin", f"module '{HERE}' has no 'Fittin'; did you mean 'Fitting'?"),
        ("function", "is a function, not a class; name the class itself"),
        ("HERE", "is a str, not a class"),
        ("Idle", "has no method train(observer, evaluation_env)"),
        ("Bare", "is not made as Bare(config, env, comm)"),
        ("Deaf", "does not take (observer, evaluation_env)"),
    ],
)
def test_what_is_no_runner_is_refused(runner: str, words: str) -> None:
    assert words in refused(runner)


@pytest.mark.parametrize("text", ["nonsense", "own_runner.py:Runner", "a.b:", ":Runner", "1a:B", "a b:C", "nowhere:C"])
def test_what_is_no_import_path_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"runner: .*give --runner my_package\.module:Class"):
        load_runner(text)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("1 / 0", r"ZeroDivisionError: division by zero \(broken_runner.py:1\)"),
        ("\nclass", "SyntaxError: invalid syntax"),
        ("raise SystemExit(0)", r"SystemExit: 0 \(broken_runner.py:1\)"),
        ("raise ValueError('first\\nsecond')", "ValueError: first "),
        ("import torchh", "it needs 'torchh', which is not installed"),
    ],
)
def test_a_module_that_fails_is_named_with_the_place(source: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("broken_runner.py").write_text(source)
    with pytest.raises(UsageError, match=words) as refusal:
        load_runner("broken_runner:Runner")
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(("starts_from", "method"), [("resume", "state_dict"), ("checkpoint", "state_dict")])
def test_going_on_needs_a_state(starts_from: str, method: str) -> None:
    check_runner(config_of("Fitting"), 1, starts_from=starts_from)
    assert f"has no {method}(), which --{starts_from} needs" in refused("Alone", starts_from=starts_from)


def test_the_command_line_and_the_launcher_refuse_alike(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["cartpole_classic", "--runner", f"{HERE}:Alone"]
    assert read(words, world_size=1).config.runner == f"{HERE}:Alone"
    with pytest.raises(UsageError, match="can't train on 2 ranks"):
        read(words, world_size=2)
    launcher = ["train_multigpu", *words, "--num_gpus", "2", "--device", "cpu", "--dry_run"]
    assert main(launcher) == 2
    assert capsys.readouterr().err.startswith(f"lockstep: error: runner {HERE}:Alone can't train on 2 ranks")
    assert list(Path().iterdir()) == []


def test_a_rank_refuses_before_it_waits_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="it drives the one arm"):
        train(config_of("OneArmed"))


# --- training --------------------------------------------------------------------------------------------------------


def metrics_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_runner_gets_the_run_directory_of_any_training() -> None:
    outcome = train(config_of("Fitting"))
    assert outcome.status == "finished"
    metrics = metrics_of(outcome.run_path)
    assert [entry["iteration"] for entry in metrics] == [1, 2, 3, 4]
    assert [entry["env_steps"] for entry in metrics] == [16, 32, 48, 64]  # 8 envs, 2 steps each
    assert all(entry["wall_s"] > 0 and entry["steps_per_s"] > 0 and entry["mean_return"] > 0 for entry in metrics)
    progress = json.loads((outcome.run_path / "progress.json").read_text())
    assert (progress["iteration"], progress["status"]) == (4, "finished")
    content = load(outcome.run_path / "checkpoints" / "latest")
    assert content["config"]["runner"] == f"{HERE}:Fitting"
    assert content["state"]["iteration"] == 4


def test_a_runner_that_keeps_nothing_and_knows_no_ranks() -> None:
    metrics = metrics_of(train(config_of("Alone")).run_path)
    assert [(entry["iteration"], entry["mean_return"]) for entry in metrics] == [(count, 1.5) for count in (1, 2, 3, 4)]


def test_a_resumed_runner_goes_on_where_it_was() -> None:
    at_once = load(train(config_of("Fitting")).run_path / "checkpoints" / "latest")
    first = train(config_of("Fitting", max_iterations=2))
    again = train(config_of("Fitting", max_iterations=4), resume=first.run_path)
    content = load(again.run_path / "checkpoints" / "latest")
    metrics = metrics_of(again.run_path)
    assert [entry["iteration"] for entry in metrics] == [1, 2, 3, 4]
    assert metrics[2]["wall_s"] > metrics[1]["wall_s"]  # both attempts count
    assert content["env_steps"] == at_once["env_steps"]
    assert content["state"]["optimizer"]["state"][0]["step"] == 4


def test_a_new_run_from_weights() -> None:
    first = train(config_of("Fitting", max_iterations=1))
    outcome = train(config_of("Fitting", max_iterations=1), checkpoint=first.run_path / "checkpoints" / "latest")
    began, ended = (load(outcome.run_path / "checkpoints" / f"model_{number}.pt") for number in (0, 1))
    weights = load(first.run_path / "checkpoints" / "latest")["state"]["model"]["weight"]
    assert torch.equal(began["state"]["model"]["weight"], weights)
    assert not torch.equal(ended["state"]["model"]["weight"], weights)
    assert (began["state"]["iteration"], ended["state"]["iteration"]) == (0, 1)


def test_a_stop_is_agreed_on_and_told() -> None:
    outcome = train(config_of("Preempted"))
    assert (outcome.status, outcome.exit_code) == ("preempted", 75)
    assert json.loads((outcome.run_path / "progress.json").read_text())["iteration"] == 2


def test_a_run_goes_on_with_the_runner_it_had() -> None:
    first = train(config_of("Fitting", max_iterations=1))
    with pytest.raises(UsageError, match=f"is of runner {HERE}:Fitting, not of runner {HERE}:Preempted"):
        train(config_of("Preempted"), resume=first.run_path)
    with pytest.raises(UsageError, match=f"is of runner {HERE}:Fitting, not of lockstep's own learner"):
        train(small_config(logger="none"), resume=first.run_path)
    own = train(small_config(logger="none", max_iterations=1, evaluation={"interval": 0}))
    with pytest.raises(UsageError, match="is of lockstep's own learner, not of runner"):
        train(config_of("Fitting"), checkpoint=own.run_path / "checkpoints" / "latest")
    with pytest.raises(UsageError, match="is of iteration 1, past max_iterations 0"):
        UserRunner(Fitting, config_of("Fitting"), env := build_env(config_of("Fitting")), SoloComm())._share(
            load(first.run_path / "checkpoints" / "latest"), "it", 0
        )
    env.close()


def test_only_its_own_code_plays_its_policy() -> None:
    run = train(config_of("Fitting", max_iterations=1)).run_path
    with pytest.raises(UsageError, match=f"is of runner {HERE}:Fitting, whose policy its own code alone can run"):
        lockstep.load_policy(run)


def test_train_must_say_how_it_ended() -> None:
    with pytest.raises(RunError, match="returned None; it must return one of finished, interrupted, preempted"):
        train(config_of("Silent"))
    (run,) = Path("logs/cartpole_classic").iterdir()
    assert json.loads((run / "progress.json").read_text())["status"] == "failed"


def test_a_state_that_could_not_be_read_back_is_refused_when_it_is_saved() -> None:
    with pytest.raises(UsageError, match=r"state\.inner\.0 is a TrainConfig, which is neither saved nor sent"):
        train(config_of("Pickled"))


def test_a_runner_of_the_current_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    Path("folder_runner.py").write_text(f"from {HERE} import Alone\n\n\nclass Mine(Alone):\n    pass\n")
    kind = load_runner("folder_runner:Mine")
    assert issubclass(kind, Alone)
    monkeypatch.delitem(sys.modules, "folder_runner")


def test_a_mixin_without_modules_says_so() -> None:
    class Empty(Fitting):
        def __init__(self) -> None:
            self.comm = SoloComm()

    with pytest.raises(UsageError, match=r"Empty has no module among its attributes; let replicated\(\) return"):
        Empty().broadcast()
