"""Poses of a model as a file that any player shows, from real renderers in processes of their own."""

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import mujoco
import numpy as np
import pytest

from lockstep.core.errors import RunError, UsageError
from lockstep.session.render_process import choose_camera
from lockstep.session.video import Video, as_video, find_renderer, render, run_apart, stride_of
from tests.unit.video_fixtures import MODEL_PATH, change, read_back, require_renderer

SWING = np.stack((np.zeros(12), np.linspace(0.0, 2.0, 12)), axis=1)
"""The cart stands still and the pole falls: (num_frames, nq)."""


@pytest.fixture(scope="module")
def renderer() -> str:
    return require_renderer()


def small(path: str) -> Video:
    return as_video(path, "96x64")


def shoot(video: Video, renderer: str, is_enough: bool = False) -> None:
    assert MODEL_PATH is not None
    render(video, MODEL_PATH, SWING, 25.0, renderer, lambda: is_enough)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_every_pose_is_a_picture(renderer: str, tmp_path: Path) -> None:
    shoot(small("new/folder/a.mp4"), renderer)
    shown = read_back(tmp_path / "new" / "folder" / "a.mp4")
    assert shown.pictures.shape == (12, 64, 96, 3)
    assert shown.fps == 25.0
    assert change(shown, 0, 11) > 0.3  # the sky is black, and the pole is thin
    assert names(tmp_path / "new" / "folder") == ["a.mp4"]


def test_a_video_that_is_given_up_leaves_the_old_one(renderer: str, tmp_path: Path) -> None:
    (tmp_path / "a.mp4").write_bytes(b"old")
    with pytest.raises(RunError, match=r"video a.mp4 can't be rendered: it was asked to stop"):
        shoot(small("a.mp4"), renderer, is_enough=True)
    assert names(tmp_path) == ["a.mp4"]
    assert (tmp_path / "a.mp4").read_bytes() == b"old"


@pytest.fixture
def file_size_limit() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (600, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_video_that_the_disk_refuses_leaves_nothing(renderer: str, tmp_path: Path, file_size_limit: None) -> None:
    with pytest.raises(RunError, match=r"can't write a.mp4: file too large; raise the limit"):
        shoot(small("a.mp4"), renderer)
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("path", "size", "seconds", "words"),
    [
        ("a.avi", "64x64", None, "must be a file that ends in .mp4"),
        ("a", "64x64", None, "must be a file that ends in .mp4"),
        ("folder.mp4", "64x64", None, "is a folder; give the name of a file"),
        ("file/a.mp4", "64x64", None, "can't be made, since"),
        ("a.mp4", "64", None, "video_size '64' must be WIDTHxHEIGHT"),
        ("a.mp4", "63x64", None, "both even"),
        ("a.mp4", "64x8", None, "from 16 to 4096"),
        ("a.mp4", "9000x64", None, "from 16 to 4096"),
        ("a.mp4", "64x64", 0.0, "video_seconds must be above 0 and at most 3600, not 0"),
        ("a.mp4", "64x64", float("nan"), "not nan"),
    ],
)
def test_what_can_not_be_is_refused(path: str, size: str, seconds: float | None, words: str, tmp_path: Path) -> None:
    (tmp_path / "folder.mp4").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(UsageError) as error:
        as_video(path, size, seconds)
    assert words in str(error.value)
    assert names(tmp_path) == ["file", "folder.mp4"]


def test_pictures_are_at_most_thirty_a_second() -> None:
    # Every second, every, every fourth step; 25, 20, 25 and 30 pictures a second.
    assert [stride_of(duration_s) for duration_s in (0.02, 0.05, 0.01, 1 / 30)] == [2, 1, 4, 1]


# --- renderers that do not work --------------------------------------------------------------------------------------


def refused(environment: dict[str, str]) -> str:
    assert MODEL_PATH is not None
    with pytest.raises(UsageError) as error:
        find_renderer(MODEL_PATH, 64, 64, {**os.environ, "MUJOCO_GL": "", **environment})
    assert len(str(error.value).splitlines()) == 1
    return str(error.value)


def module(folder: Path, name: str, source: str) -> dict[str, str]:
    """Return an environment in which a module of this source is imported by that name."""
    (folder / f"{name}.py").write_text(source, encoding="utf-8")
    return {"PYTHONPATH": str(folder)}


def test_a_choice_that_does_not_work_is_refused() -> None:
    message = refused({"MUJOCO_GL": "crayons"})
    assert "MUJOCO_GL=crayons" in message
    assert "invalid value" in message
    assert "unset it" in message


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere MuJoCo's default is all there is")
def test_without_any_renderer_it_says_what_to_install(tmp_path: Path) -> None:
    message = refused(module(tmp_path, "OpenGL", "raise ImportError('no OpenGL here')"))
    assert "egl: ImportError: no OpenGL here; osmesa: ImportError: no OpenGL here" in message
    assert "apt-get install libosmesa6" in message


def test_a_driver_that_never_answers_is_not_waited_for(tmp_path: Path) -> None:
    assert MODEL_PATH is not None
    silent = module(tmp_path, "imageio_ffmpeg", "import time\ntime.sleep(600)")
    with pytest.raises(UsageError, match=r"\(egl: it took more than 0.2 s\)"):
        find_renderer(MODEL_PATH, 64, 64, {**os.environ, **silent, "MUJOCO_GL": "egl"}, timeout_s=0.2)


@pytest.mark.parametrize(
    ("deed", "words"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "egl: its process died of SIGSEGV)"),
        ("print('fine', file=sys.stderr, flush=True); os.kill(os.getpid(), 9)", "egl: its process died of SIGKILL)"),
        ("os.kill(os.getpid(), signal.SIGRTMIN + 1)", "egl: its process died of signal 35)"),
        ("os._exit(3)", "egl: its process ended with exit code 3)"),
        ("print('no screen', file=sys.stderr, flush=True); os._exit(3)", "egl: no screen)"),
    ],
)
def test_a_driver_that_ends_the_process_is_survived(deed: str, words: str, tmp_path: Path) -> None:
    driver = module(tmp_path, "imageio_ffmpeg", f"import os, signal, sys\n{deed}")
    assert words in refused(driver | {"MUJOCO_GL": "egl"})


def test_a_process_apart_is_ended_when_its_time_is_up() -> None:
    command = [sys.executable, "-c", "import time; print('at work', flush=True); time.sleep(600)"]
    assert run_apart(command, b"", os.environ, timeout_s=0.3) == (None, "it took more than 0.3 s")
    with pytest.raises(OSError, match="nothing"):
        run_apart(["./nothing"], b"", os.environ, timeout_s=1.0)


def test_it_ends_with_its_parent(renderer: str) -> None:
    """A process that is told of a parent that is gone ends at once, before it has read anything."""
    command = [sys.executable, "-m", "lockstep.session.render_process", "1"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        assert process.wait(60) == -9


# --- cameras ---------------------------------------------------------------------------------------------------------

ROBOT = """
<mujoco>
  <worldbody>
    <geom type="plane" size="50 50 1"/>
    {cameras}
    <body pos="7 0 1"><freejoint/><geom type="sphere" size="0.2"/>
      <body pos="0.5 0 0"><joint type="hinge"/><geom type="sphere" size="0.1"/></body>
    </body>
  </worldbody>
</mujoco>
"""


def camera_of(xml: str) -> str | mujoco.MjvCamera:
    model = mujoco.MjModel.from_xml_string(xml)
    data = mujoco.MjData(model)
    mujoco.mj_fwdKinematics(model, data)
    return choose_camera(model, data)


def test_a_camera_of_the_models_own_is_taken() -> None:
    side, track = '<camera name="side" pos="0 0 2"/>', '<camera name="track" pos="0 0 3"/>'
    assert camera_of(ROBOT.format(cameras=side + track)) == "track"
    assert camera_of(ROBOT.format(cameras=side)) == "side"


def test_else_one_follows_the_robot_and_sees_all_of_it() -> None:
    camera = camera_of(ROBOT.format(cameras=""))
    assert isinstance(camera, mujoco.MjvCamera)
    assert (camera.type, camera.trackbodyid) == (mujoco.mjtCamera.mjCAMERA_TRACKING, 1)
    assert 1.0 < camera.distance < 4.0  # of a robot of 0.8 m, not of a floor of 100 m


def test_a_model_in_which_nothing_moves_is_seen_whole() -> None:
    camera = camera_of('<mujoco><worldbody><geom type="sphere" size="1"/></worldbody></mujoco>')
    assert isinstance(camera, mujoco.MjvCamera)
    assert camera.type == mujoco.mjtCamera.mjCAMERA_FREE
