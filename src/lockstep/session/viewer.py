"""A trained policy at work in MuJoCo's own viewer, in real time."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.core.config import merge
from lockstep.core.errors import UsageError
from lockstep.recipes.catalog import make_task, require_model
from lockstep.session.framework import framework_of
from lockstep.session.policy import load_policy
from lockstep.session.render_process import choose_camera

if TYPE_CHECKING:
    import mujoco

_CLOSE_S = 5.0
_INSTEAD = "use --video out.mp4 instead"


def watch(checkpoint: str | Path, seed: int | None = None, device: str = "auto") -> int:
    """Show episode after episode with the most likely actions, until the window is closed.

    Args:
        checkpoint: of any run.
        seed: of the episodes' starts; None for the run's own.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:<index>``, which computes the actions.

    Returns:
        how many env steps were shown.

    Raises:
        UsageError: no such checkpoint, nothing to be seen of its task, or no display.
    """
    require_display()
    policy = load_policy(checkpoint, device)
    config = merge(policy.config, {"device": device} | ({} if seed is None else {"seed": seed}))
    model_path = require_model(config)
    _require_window()
    task = make_task(config)
    import mujoco.viewer

    model = mujoco.MjModel.from_xml_path(str(model_path))
    data = mujoco.MjData(model)
    num_steps = 0
    with (
        closing(framework_of(config).frames(policy, config)) as frames,
        _ended_threads(),
        mujoco.viewer.launch_passive(model, data, show_left_ui=False, show_right_ui=False) as window,
    ):
        due_s = time.monotonic()
        for frame in frames:
            if not window.is_running():
                break
            with window.lock():
                data.qpos[:], data.qvel[:] = frame.qpos, frame.qvel
                mujoco.mj_forward(model, data)
                if num_steps == 0:
                    _point(window.cam, model, data)
            window.sync()
            num_steps += 1
            # What is late once, for a pause of the whole machine say, is not caught up with.
            due_s = max(due_s + task.step_duration_s, time.monotonic() - task.step_duration_s)
            time.sleep(max(0.0, due_s - time.monotonic()))
    return num_steps


@contextmanager
def _ended_threads() -> Iterator[None]:
    """Wait for threads that begin within the context: the viewer's draws on, and must not when the process ends."""
    before = set(threading.enumerate())
    try:
        yield
    finally:
        for thread in set(threading.enumerate()) - before:
            thread.join(_CLOSE_S)


def require_display(environment: Mapping[str, str] = os.environ, platform: str = sys.platform) -> None:
    """Refuse where no window can be opened.

    Raises:
        UsageError: there is no display, or the viewer can't run in this process.
    """
    if platform == "linux" and not (environment.get("DISPLAY") or environment.get("WAYLAND_DISPLAY")):
        raise UsageError(f"there is no display to open a viewer on (DISPLAY is not set); {_INSTEAD}")
    if platform == "darwin":
        raise UsageError(f"on macOS MuJoCo's viewer runs under its own mjpython alone; {_INSTEAD}")


def _require_window() -> None:
    """Open a window that nobody sees: the viewer would wait for ever for one that can't be opened.

    Raises:
        UsageError: the display does not answer, or shows no OpenGL.
    """
    import glfw

    glfw.ERROR_REPORTING = "ignore"
    try:
        problem = "can't be reached"
        if glfw.init():
            problem = "shows no OpenGL"
            glfw.window_hint(glfw.VISIBLE, glfw.FALSE)
            window = glfw.create_window(16, 16, "lockstep", None, None)
            glfw.default_window_hints()
            if window:
                glfw.destroy_window(window)
                return
    finally:
        glfw.terminate()
    display = os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    raise UsageError(f"no viewer can be opened: display {display!r} {problem}; {_INSTEAD}")


def _point(camera: mujoco.MjvCamera, model: mujoco.MjModel, data: mujoco.MjData) -> None:
    """Let the window begin with what a video would show; the user turns it from there."""
    import mujoco

    chosen = choose_camera(model, data)
    if isinstance(chosen, str):
        camera.type = mujoco.mjtCamera.mjCAMERA_FIXED
        camera.fixedcamid = mujoco.mj_name2id(model, mujoco.mjtObj.mjOBJ_CAMERA, chosen)
        return
    camera.type, camera.trackbodyid = chosen.type, chosen.trackbodyid
    camera.distance, camera.elevation, camera.azimuth = chosen.distance, chosen.elevation, chosen.azimuth
    camera.lookat[:] = chosen.lookat
