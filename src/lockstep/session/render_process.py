"""A process of its own that renders: poses of a MuJoCo model on stdin, a video file on the disk.

``python -m lockstep.session.render_process PARENT_PID``. MuJoCo decides on a renderer while it is imported, by the
variable MUJOCO_GL, and a graphics driver that fails may take its process along: neither is a training's business, or
that of the process that plays.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from lockstep.core.errors import in_one_line
from lockstep.core.process_control import end_with_parent

if TYPE_CHECKING:
    import mujoco

CAMERAS = ("track", "side")
"""Names of the cameras that a model may have for this; the first that there is is taken."""
_SHADOW_SIZE = 2048
_DISTANCE = 3.5  # of the camera from what it follows, in radii of that: all of it is in view
_ELEVATION_DEG, _AZIMUTH_DEG = -20.0, 120.0


@dataclass(frozen=True)
class Job:
    """What is to be rendered."""

    model_path: str
    width: int
    height: int
    fps: float
    output: str = ""
    """Of the video; empty to render and encode nothing that stays."""


def to_bytes(job: Job, qpos: np.ndarray) -> bytes:
    """Return what the process is to be given: one line of JSON, then the poses ``(num_frames, nq)`` in float64."""
    header = asdict(job) | {"shape": qpos.shape}
    return json.dumps(header).encode() + b"\n" + qpos.astype(np.float64).tobytes()


def main(stream: IO[bytes]) -> int:
    """Render what ``stream`` holds; say in one line on stderr what went wrong, and return the exit code."""
    try:
        header = json.loads(stream.readline())
        shape = header.pop("shape")
        poses = np.frombuffer(stream.read(), dtype=np.float64).reshape(shape)
        _render(Job(**header), poses)
    except Exception as error:  # what a driver, PyOpenGL or ffmpeg may raise is not told anywhere
        print(in_one_line(error), file=sys.stderr)  # noqa: T201
        return 1
    return 0


def _render(job: Job, poses: np.ndarray) -> None:
    import imageio_ffmpeg
    import mujoco

    imageio_ffmpeg.get_ffmpeg_exe()  # raises where there is none
    if not hasattr(mujoco, "Renderer"):  # MuJoCo keeps to itself why; to import its part again brings that out
        importlib.import_module(f"mujoco.{os.environ.get('MUJOCO_GL') or 'glfw'}")
    model = mujoco.MjModel.from_xml_path(job.model_path)
    frame = model.vis.global_  # how large a picture may be is the model's to say
    frame.offwidth, frame.offheight = max(frame.offwidth, job.width), max(frame.offheight, job.height)
    # Two thirds of a software renderer's time would go into shadows sharper than anybody can see.
    model.vis.quality.shadowsize = min(model.vis.quality.shadowsize, _SHADOW_SIZE)
    data = mujoco.MjData(model)
    poses = poses if poses.size else data.qpos[None].copy()
    with mujoco.Renderer(model, job.height, job.width) as renderer, _writer(job) as append:
        camera: str | mujoco.MjvCamera | None = None
        for qpos in poses:
            data.qpos[:] = qpos
            mujoco.mj_fwdKinematics(model, data)
            camera = camera or choose_camera(model, data)
            renderer.update_scene(data, camera)
            append(renderer.render())
    if job.output:
        # A full disk ends ffmpeg, which tells nobody.
        num_written, _ = imageio_ffmpeg.count_frames_and_secs(job.output)
        if num_written != len(poses):
            raise OSError(f"only {num_written} of {len(poses)} pictures are in the file")


@contextlib.contextmanager
def _writer(job: Job) -> Iterator[Callable[[np.ndarray], object]]:
    import imageio.v2

    if not job.output:
        yield lambda picture: None
        return
    # Without a macro block size of 1, imageio would change the size of the pictures.
    settings: dict[str, Any] = {"fps": job.fps, "macro_block_size": 1, "ffmpeg_log_level": "error"}
    writer: Any = imageio.v2.get_writer(Path(job.output), **settings)
    with writer:
        yield writer.append_data


def choose_camera(model: mujoco.MjModel, data: mujoco.MjData) -> str | mujoco.MjvCamera:
    """Return the name of the model's own camera, or one that follows its first body, with all of it in view.

    Args:
        model: that is shown.
        data: at the first pose, kinematics computed.
    """
    import mujoco

    own = [name for name in CAMERAS if mujoco.mj_name2id(model, mujoco.mjtObj.mjOBJ_CAMERA, name) >= 0]
    if own:
        return own[0]
    camera = mujoco.MjvCamera()
    mujoco.mjv_defaultFreeCamera(model, camera)
    moving = np.flatnonzero(model.body_weldid[model.geom_bodyid] > 0)
    if model.nbody < 2 or moving.size == 0:
        return camera
    free = np.flatnonzero(model.jnt_type == mujoco.mjtJoint.mjJNT_FREE)
    root = int(model.jnt_bodyid[free[0]]) if free.size else 1
    offsets = np.linalg.norm(data.geom_xpos[moving] - data.subtree_com[root], axis=1)
    camera.type, camera.trackbodyid = mujoco.mjtCamera.mjCAMERA_TRACKING, root
    camera.distance = _DISTANCE * float((offsets + model.geom_rbound[moving]).max())
    camera.elevation, camera.azimuth = _ELEVATION_DEG, _AZIMUTH_DEG
    return camera


if __name__ == "__main__":
    end_with_parent(signal.SIGKILL, int(sys.argv[1]))
    sys.exit(main(sys.stdin.buffer))
