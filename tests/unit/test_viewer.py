"""MuJoCo's viewer, on a display of software where there is one, and refusals where there is none."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.core.errors import UsageError
from lockstep.session.viewer import require_display, watch
from tests.unit.export_fixtures import torch_checkpoint

CLOSED_AFTER_A_SECOND = """
import sys, threading
import mujoco.viewer
from lockstep.session.viewer import watch

launch = mujoco.viewer.launch_passive

def launch_and_close(*arguments, **named):
    window = launch(*arguments, **named)
    threading.Timer(1.0, window.close).start()
    return window

mujoco.viewer.launch_passive = launch_and_close
print("shown", watch(sys.argv[1], device="cpu"))
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return torch_checkpoint(tmp_path_factory.mktemp("run") / "model_7.pt", task="cartpole_balance")


@pytest.mark.skipif(shutil.which("xvfb-run") is None, reason="needs a display of software: apt-get install xvfb")
def test_it_shows_episodes_until_it_is_closed(checkpoint: Path) -> None:
    command = ["xvfb-run", "-a", sys.executable, "-c", CLOSED_AFTER_A_SECOND, str(checkpoint)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    word, count = result.stdout.split()[-2:]
    assert word == "shown"
    assert int(count) > 5


def test_a_display_is_needed() -> None:
    for environment in ({"DISPLAY": ":0"}, {"WAYLAND_DISPLAY": "wayland-0"}):
        require_display(environment, "linux")
    with pytest.raises(UsageError, match=r"there is no display .* use --video out.mp4 instead"):
        require_display({"DISPLAY": ""}, "linux")
    with pytest.raises(UsageError, match="mjpython"):
        require_display({"DISPLAY": ":0"}, "darwin")


def test_a_display_that_does_not_answer_is_refused(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISPLAY", ":4711")
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    with pytest.raises(UsageError, match="display ':4711' can't be reached"):
        watch(checkpoint, device="cpu")


def test_what_has_no_model_can_not_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISPLAY", ":4711")
    with pytest.raises(UsageError, match="no MuJoCo model"):
        watch(torch_checkpoint(tmp_path / "model_7.pt"), device="cpu")
