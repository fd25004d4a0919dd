"""Pictures of a task's model, drawn in this process: what Gymnasium calls ``rgb_array``."""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lockstep.core.errors import RunError
from lockstep.session.render_process import choose_camera
from lockstep.session.video import RENDERER, find_renderer

if TYPE_CHECKING:
    import mujoco

WIDTH, HEIGHT = 480, 480  # pixels


def choose_renderer(model_path: Path) -> None:
    """See to it that MuJoCo will find a renderer that works here, unless it has been chosen or imported already.

    MuJoCo decides while it is imported, so this is to be called before any env is made.

    Raises:
        UsageError: there is none; with what to install.
    """
    if "mujoco" in sys.modules or os.environ.get(RENDERER):
        return
    chosen = find_renderer(model_path, WIDTH, HEIGHT)
    if chosen:
        os.environ[RENDERER] = chosen


class Pictures:
    """Draws poses of a model, from a camera that it chooses at the first."""

    def __init__(self, model_path: Path) -> None:
        self._path = model_path
        self._renderer: mujoco.Renderer | None = None

    def __call__(self, qpos: np.ndarray) -> np.ndarray:
        """Return a picture ``(HEIGHT, WIDTH, 3)`` uint8 of a pose ``qpos (nq,)``.

        Raises:
            RunError: nothing can be rendered in this process.
        """
        import mujoco

        if self._renderer is None:
            self._model = mujoco.MjModel.from_xml_path(str(self._path))
            self._data = mujoco.MjData(self._model)
            self._renderer = self._open()
            # By an exit handler younger than EGL's own, or the renderer would find its display gone, and say so.
            close = weakref.finalize(self, self._renderer.close)
            close.atexit = False
            atexit.register(close)
        self._data.qpos[:] = qpos
        mujoco.mj_fwdKinematics(self._model, self._data)
        if not hasattr(self, "_camera"):
            self._camera = choose_camera(self._model, self._data)
        self._renderer.update_scene(self._data, self._camera)
        picture: np.ndarray = self._renderer.render()
        return picture

    def _open(self) -> mujoco.Renderer:
        import mujoco

        try:
            return mujoco.Renderer(self._model, HEIGHT, WIDTH)
        except Exception as error:  # what a driver or PyOpenGL may raise is not told anywhere
            raise RunError(
                f"nothing can be rendered in this process ({error}); set {RENDERER}=egl or osmesa before it starts"
            ) from error
