import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from lockstep.cli.main import main
from lockstep.session.video import Video

RESULTS = {
    "task": "pendulum",
    "checkpoint": "model.pt",
    "num_episodes": 3,
    "mean_return": 12.5,
    "std_return": float("nan"),
    "mean_episode_length": 100.0,
    "max_episode_length": 200,
    "reward/upright": 12.5,
}


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What the session was asked to play."""
    calls: list[tuple[Any, ...]] = []

    def play(*arguments: Any) -> dict[str, Any]:
        calls.append(arguments)
        print("a library talks")
        return RESULTS

    module = types.ModuleType("lockstep.session.play")
    vars(module)["play"] = play
    monkeypatch.setitem(sys.modules, "lockstep.session.play", module)
    return calls


def make_run(path: Path) -> Path:
    (path / "checkpoints").mkdir(parents=True)
    (path / "config.yaml").write_text("task: pendulum\n", encoding="utf-8")
    (path / "run.json").write_text("{}", encoding="utf-8")
    return path


def test_a_checkpoint_is_played_with_what_was_asked_for(
    played: list[tuple[Any, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["play", "--checkpoint", "model.pt", "--num-episodes=3", "--seed", "7", "--device", "cpu"]) == 0
    assert main(["play", "--checkpoint=model.pt"]) == 0
    assert main(["play", "--checkpoint=m.pt", "--video", "a.mp4", "--video_size", "32x16", "--video_seconds=2.5"]) == 0
    assert played == [
        (Path("model.pt"), 3, 7, "cpu", None),
        (Path("model.pt"), 64, None, "auto", None),
        (Path("m.pt"), 64, None, "auto", Video(Path("a.mp4"), 32, 16, 2.5)),
    ]
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split() == ["mean_return", "12.5"] for line in lines)
    assert [line.split() for line in lines if line.startswith("video")] == [["video", "a.mp4"]]


def test_json_is_one_object_and_nothing_else(played: list[tuple[Any, ...]], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["play", "--checkpoint", "model.pt", "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {**RESULTS, "std_return": None}
    assert printed.err == "a library talks\n"


def test_a_run_stands_for_its_latest_checkpoint(played: list[tuple[Any, ...]], tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    for name in ("model_10.pt", "model_20.pt"):
        (run / "checkpoints" / name).write_bytes(b"")
    (run / "checkpoints" / "latest").symlink_to("model_20.pt")
    assert main(["play", "--run", str(run)]) == 0
    assert played[0][0].resolve() == run / "checkpoints" / "model_20.pt"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "what to play? Give --run RUN_DIR or --checkpoint PATH"),
        (["--run", "a", "--checkpoint", "b"], "both --run and --checkpoint are given; keep one"),
        (["--run", "nowhere"], "nowhere"),
        (["--run", 300 * "x"], "(file name too long)"),
        (["--checkpoint", 300 * "x"], "can't be looked at (file name too long)"),
        (["--checkpoint", "m.pt", "--video", "f.gif"], "must be a file that ends in .mp4, as in --video out.mp4"),
        (["--checkpoint", "m.pt", "--video", "f.mp4", "--video_size", "big"], "video_size 'big' must be WIDTHxHEIGHT"),
        (["--checkpoint", "m.pt", "--video", "f.mp4", "--video_seconds", "x"], "video_seconds must be a number"),
        (["--checkpoint", "m.pt", "--video_size", "64x64"], "name its file with --video out.mp4"),
        (["--checkpoint", "m.pt", "--viewer", "--json"], "leave --json out"),
        (["--checkpoint", "m.pt", "--viewer"], "there is no display"),
        (["--checkpoint", "m.pt", "--video_length", "200"], "--video_seconds S"),
        (["--checkpoint", "m.pt", "--num_episodes", "0"], "num_episodes must be at least 1, not 0"),
        (["--checkpoint", "m.pt", "--num_episodes", "many"], "num_episodes must be a whole number, not 'many'"),
        (["--checkpoint", "m.pt", "--seed", "-1"], "seed must be at least 0, not -1"),
        (["--checkpoint", "m.pt", "--seed", str(2**63)], "seed must be at most 9223372036854775807"),
        (["--checkpoint", "m.pt", "--json=perhaps"], "json must be true or false, not 'perhaps'"),
        (["--checkpoint", "m.pt", "m2.pt"], "unexpected 'm2.pt'"),
        (["--chekpoint", "m.pt"], "did you mean '--checkpoint'?"),
        (["--load_run", "x"], "--run RUN_DIR"),
        (["--task", "x"], "the checkpoint knows its task"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    played: list[tuple[Any, ...]],
    argv: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    assert main(["play", *argv]) == 2
    printed = capsys.readouterr()
    assert words in printed.err
    assert len(printed.err.splitlines()) == 1
    assert printed.out == ""
    assert played == []


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["play", "--checkpoint", "--help"]) == 0
    assert "--num_episodes N" in capsys.readouterr().out


words = st.sampled_from(
    ["--run", "--checkpoint", "--num_episodes", "--seed", "--json", "--device=", "1", "-1", "x", ""]
)


@hypothesis_settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(argv=st.lists(words | st.text() | st.text().map("--{}".format), max_size=6))
def test_any_command_line_ends_with_0_or_2(played: list[tuple[Any, ...]], argv: list[str]) -> None:
    assert main(["play", *argv]) in (0, 2)
