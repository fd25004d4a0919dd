"""A trained policy filmed: with ``lockstep play``, and at the end of a training."""

import json
import shutil
from pathlib import Path

import pytest

import lockstep
from lockstep.cli.main import main
from lockstep.core.config import merge
from lockstep.core.errors import RunError
from lockstep.learn.config import TrainConfig
from lockstep.session import film
from lockstep.session.film import record
from lockstep.session.framework import framework_of
from tests.unit.video_fixtures import change, read_back, require_renderer

SMALL = {"num_envs": 4, "max_iterations": 1, "device": "cpu", "logger": "none", "evaluation": {"interval": 0}}


def config_with(log_root: Path | str, **settings: object) -> TrainConfig:
    return lockstep.make_config("cartpole_balance", log_root=str(log_root), **{**SMALL, **settings})


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lockstep.train(config_with(tmp_path_factory.mktemp("logs"))).run_path


def test_one_episode_is_recorded_to_its_end(run: Path) -> None:
    policy = lockstep.load_policy(run, "cpu")
    length = framework_of(policy.config).evaluate(policy, policy.config, 1).lengths[0]
    poses = record(policy, policy.config, None)
    assert poses.qpos.shape == (-(-int(length) // 2), 2)  # every second of the episode's states
    assert poses.fps == 25.0
    assert length < 200  # seconds below go on from there


def test_seconds_go_through_episodes(run: Path) -> None:
    policy = lockstep.load_policy(run, "cpu")
    one, several = record(policy, policy.config, None), record(policy, policy.config, 8.0)
    assert several.qpos.shape == (200, 2)
    assert (several.qpos[: len(one.qpos)] == one.qpos).all()
    assert abs(several.qpos[:, 1]).max() < 1.6  # whoever has fallen has been put up again
    other = record(policy, merge(policy.config, {"seed": 5}), 0.01)
    assert other.qpos.shape == (1, 2)
    assert (other.qpos != one.qpos[:1]).all()


def test_play_films_and_reports(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    require_renderer()
    play = ["play", "--run", str(run), "--num_episodes", "2", "--device", "cpu", "--json"]
    assert main(play) == 0
    without = json.loads(capsys.readouterr().out)
    assert main([*play, "--video", "out/a.mp4", "--video_size", "160x96", "--video_seconds", "1.2"]) == 0
    assert json.loads(capsys.readouterr().out) == without
    shown = read_back(tmp_path / "out" / "a.mp4")
    assert shown.pictures.shape == (30, 96, 160, 3)
    assert shown.fps == 25.0
    assert change(shown, 0, 20) > 0.02


def test_a_film_that_the_disk_refuses_costs_no_evaluation(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluated: list[object] = []
    monkeypatch.setattr(framework_of(config_with("logs")), "evaluate", lambda *arguments: evaluated.append(arguments))

    def refuse(*arguments: object) -> None:
        raise RunError("no space left on device")

    monkeypatch.setattr(film, "find_renderer", lambda *arguments: "egl")
    monkeypatch.setattr(film, "render", refuse)
    with pytest.raises(RunError, match="no space left"):
        lockstep.play(run, num_episodes=2, device="cpu", video="a.mp4")
    assert evaluated == []


def test_more_episodes_than_fit_leave_no_film(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    require_renderer()
    play = ["play", "--run", str(run), "--num_episodes", "1000000000000", "--device", "cpu"]
    assert main([*play, "--video", "a.mp4", "--video_size", "64x64"]) == 2
    assert "need at least" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_what_has_no_model_can_not_be_seen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {**SMALL, "log_root": str(tmp_path / "logs")}
    classic = lockstep.train(lockstep.make_config("cartpole_classic", **settings)).run_path
    assert main(["play", "--run", str(classic), "--video", "a.mp4"]) == 2
    assert "task cartpole_classic has no MuJoCo model" in capsys.readouterr().err
    assert not (tmp_path / "a.mp4").exists()


UNABLE = {
    "no renderer": ({"MUJOCO_GL": "crayons"}, "nothing can be rendered with MUJOCO_GL=crayons"),
    "no time": ({"MUJOCO_GL": "egl", "LOCKSTEP_TIMEOUT_S": "0.2"}, "it took more than 0.1 s"),  # others would not wait
}


@pytest.mark.parametrize("case", UNABLE)
def test_a_training_that_goes_on_survives_a_clip_that_can_not_be_made(
    case: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have gone on elsewhere than where it began."""
    variables, words = UNABLE[case]
    own = shutil.copytree(run, tmp_path / "logs" / run.name, symlinks=True)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    outcome = lockstep.train(config_with("logs", video=True, max_iterations=2), resume=own)
    assert (outcome.exit_code, outcome.run_path) == (0, own)
    progress = json.loads((own / "progress.json").read_text())
    assert (progress["status"], progress["iteration"]) == ("finished", 2)
    said = capsys.readouterr().out
    assert said.count(f"warning: there is no {own}/videos/model_2.mp4: ") == 1
    assert words in said
    assert not list(own.glob("videos/*"))


def test_a_finished_training_is_not_looked_at_for_a_renderer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCKSTEP_RUN_KEY", "a job")
    first = lockstep.train(config_with("logs"), resume="auto")
    monkeypatch.setenv("MUJOCO_GL", "crayons")
    assert lockstep.train(config_with("logs", video=True), resume="auto") == first
    assert f"nothing to do: {first.run_path} is finished" in capsys.readouterr().out


@pytest.mark.parametrize("case", UNABLE)
def test_a_training_that_can_not_be_filmed_does_not_begin(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    variables, words = UNABLE[case]
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main(["train", "cartpole_balance", "--video", "--num_envs", "4", "--max_iterations", "1"]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert len(error.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
