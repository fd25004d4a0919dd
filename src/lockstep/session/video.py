"""Videos of a MuJoCo model: what may be asked for, which renderer works here, and the file, whole or not at all."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lockstep.core.errors import RunError, UsageError
from lockstep.core.files import is_folder, require_place, unfinished
from lockstep.distributed.topology import environment_apart
from lockstep.session.render_process import Job, to_bytes

RENDERER = "MUJOCO_GL"
"""The variable by which MuJoCo, and its users, choose a renderer."""
MAX_FPS = 30.0
DEFAULT_SIZE = "640x480"
_MAX_PIXELS = 4096
_CHECK_S, _RENDER_S = 60.0, 1800.0
_POLL_S = 0.1


@dataclass(frozen=True)
class Video:
    """A video that is asked for, checked; see ``as_video``."""

    path: Path
    width: int
    height: int
    seconds: float | None
    """Its length, through as many episodes as it takes; None for one whole episode."""


def as_video(path: Video | str | Path, size: str = DEFAULT_SIZE, seconds: float | None = None) -> Video:
    """Return a video that is asked for, checked.

    Args:
        path: of the file, which ends in ``.mp4``; its folder is made if it is not there. A ``Video`` stays as it is.
        size: width x height in pixels, as ``1280x720``.
        seconds: its length; None for one whole episode.

    Raises:
        UsageError: what is asked for can't be.
    """
    if isinstance(path, Video):
        return path
    path = Path(path)
    if path.suffix.lower() != ".mp4":
        raise UsageError(f"video {str(path)!r} must be a file that ends in .mp4, as in --video out.mp4")
    require_place("video", path.absolute().parent)
    if is_folder(path):
        raise UsageError(f"video {path} is a folder; give the name of a file, as in --video {path / 'out.mp4'}")
    match = re.fullmatch(r"(\d{1,6})x(\d{1,6})", size.lower())
    width, height = (int(match[1]), int(match[2])) if match else (0, 0)
    if not all(16 <= pixels <= _MAX_PIXELS and pixels % 2 == 0 for pixels in (width, height)):
        raise UsageError(
            f"video_size {size!r} must be WIDTHxHEIGHT in pixels, both even and from 16 to {_MAX_PIXELS}, as 1280x720"
        )
    if seconds is not None and not 0 < seconds <= 3600:
        raise UsageError(f"video_seconds must be above 0 and at most 3600, not {seconds:g}")
    return Video(path, width, height, seconds)


def stride_of(step_duration_s: float) -> int:
    """Return every how many-th env step is shown: as many as that there are ``MAX_FPS`` pictures a second at most."""
    return max(1, math.ceil(1.0 / (MAX_FPS * step_duration_s) - 1e-9))


def find_renderer(
    model_path: Path,
    width: int,
    height: int,
    environment: Mapping[str, str] = os.environ,
    timeout_s: float = math.inf,
) -> str:
    """Return the value of MUJOCO_GL by which a picture of the model can be rendered here; "" for MuJoCo's default.

    The user's choice counts. Else it is EGL, which needs no display and uses a GPU if there is one, or OSMesa, which
    needs neither. Each is tried in a process of its own.

    Args:
        model_path: the MJCF file.
        width: of the picture, in pixels.
        height: of the picture, in pixels.
        environment: where the user's choice is looked up; the processes get it.
        timeout_s: how long all of them may take together; none gets more than a minute.

    Raises:
        UsageError: none works; with what to install.
    """
    given = environment.get(RENDERER, "").strip()
    candidates = [given] if given else ["egl", "osmesa"] if sys.platform == "linux" else [""]
    each_s = min(_CHECK_S, timeout_s / len(candidates))
    reasons = []
    for name in candidates:
        job = Job(str(model_path), width, height, MAX_FPS)
        try:
            _run(job, np.empty((0, 0)), name, environment, timeout_s=each_s)
            return name
        except RunError as error:
            reasons.append(f"{name or 'default'}: {error}")
    tried = "; ".join(reasons)
    if given:
        raise UsageError(f"nothing can be rendered with {RENDERER}={given} ({tried}); unset it, or choose another one")
    raise UsageError(
        f"nothing can be rendered here ({tried}); install a renderer with: apt-get install libosmesa6, or, for a GPU, "
        f"libegl1 and its driver, or choose one with {RENDERER}=egl, osmesa or glfw"
    )


def render(
    asked: Video,
    model_path: Path,
    qpos: np.ndarray,
    fps: float,
    renderer: str,
    is_enough: Callable[[], bool] = lambda: False,
) -> None:
    """Render poses and write the video, which appears whole or not at all.

    Args:
        asked: where, and how large.
        model_path: the MJCF file.
        qpos: ``(num_frames, nq)``.
        fps: pictures per second.
        renderer: that ``find_renderer`` returned.
        is_enough: asked ten times a second whether to give up.

    Raises:
        RunError: it could not be rendered or written.
    """
    asked.path.absolute().parent.mkdir(parents=True, exist_ok=True)
    with unfinished(asked.path) as temporary:
        temporary.touch()  # a folder that takes no file is told in our words, not in those of ffmpeg
        job = Job(str(model_path), asked.width, asked.height, fps, str(temporary))
        try:
            _run(job, qpos, renderer, os.environ, _RENDER_S, is_enough)
        except RunError as error:
            raise RunError(f"video {asked.path} can't be rendered: {error}") from error
        temporary.replace(asked.path)


def run_apart(
    command: Sequence[str],
    content: bytes,
    environment: Mapping[str, str],
    timeout_s: float,
    is_enough: Callable[[], bool] = lambda: False,
) -> tuple[int | None, str]:
    """Run a command in a process of its own, which never outlives the call.

    Args:
        command: with its arguments.
        content: that it is given on stdin.
        environment: that it gets.
        timeout_s: how long it may take.
        is_enough: asked ten times a second whether to give up.

    Returns:
        its exit code, None if it was ended, and the last line that it has said on stderr, or why it was ended.

    Raises:
        OSError: it could not be started.
    """
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=dict(environment),
        start_new_session=True,  # Ctrl-C is for this process, which ends the other
    )
    end_s = time.monotonic() + timeout_s
    given: bytes | None = content
    with process:
        try:
            while True:
                try:
                    _, said = process.communicate(given, timeout=_POLL_S)
                    lines = said.decode(errors="replace").strip().splitlines()
                    return process.returncode, lines[-1] if lines else ""
                except subprocess.TimeoutExpired:
                    given = None  # what it was given first is still on its way
                if time.monotonic() > end_s:
                    return None, f"it took more than {timeout_s:g} s"
                if is_enough():
                    return None, "it was asked to stop"
        finally:
            process.kill()


def why_it_failed(code: int | None, said: str) -> str:
    """Return in words what ``run_apart`` returned of a process that did not end well."""
    if code is None:
        return said
    if code < 0:  # whatever it said last was said before it knew
        return f"its process died of {_signal_name(-code)}"
    return said or f"its process ended with exit code {code}"


def _run(
    job: Job,
    qpos: np.ndarray,
    renderer: str,
    environment: Mapping[str, str],
    timeout_s: float,
    is_enough: Callable[[], bool] = lambda: False,
) -> None:
    """Render in a process of its own.

    Raises:
        RunError: it failed; with its reason.
    """
    variables = environment_apart(environment)
    variables.pop(RENDERER, None)
    command = [sys.executable, "-m", "lockstep.session.render_process", str(os.getpid())]
    variables |= {RENDERER: renderer} if renderer else {}
    try:
        code, said = run_apart(command, to_bytes(job, qpos), variables, timeout_s, is_enough)
    except OSError as error:
        raise RunError(error.strerror or str(error)) from error
    if code != 0:
        raise RunError(why_it_failed(code, said))


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
