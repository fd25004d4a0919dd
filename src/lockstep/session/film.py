"""A trained policy at work, as poses of the model: for a video, or to look on."""

from __future__ import annotations

import math
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from lockstep.recipes.catalog import make_task, require_model
from lockstep.session.framework import framework_of
from lockstep.session.video import Video, as_video, find_renderer, render, stride_of

if TYPE_CHECKING:
    from lockstep.learn.config import TrainConfig
    from lockstep.session.policy import Policy


class Poses(NamedTuple):
    """What a video shows."""

    qpos: np.ndarray  # (num_frames, nq) float64
    fps: float
    """Poses per simulated second."""


def check_rendering(config: TrainConfig, timeout_s: float) -> str:
    """Return the renderer by which the config's task can be filmed here.

    Args:
        config: of the training.
        timeout_s: how long it may take to find out.

    Raises:
        UsageError: there is none, none that answers in time, or nothing to be seen of the task.
    """
    video = as_video("video.mp4")
    return find_renderer(require_model(config), video.width, video.height, timeout_s=timeout_s)


@dataclass(frozen=True)
class Filming:
    """A film that is about to be made: all that can be wrong before there is anything to show has been looked at."""

    config: TrainConfig
    video: Video
    model_path: Path
    renderer: str

    @classmethod
    def of(cls, config: TrainConfig, video: Video) -> Filming:
        """Return the film of a policy in its task, as it will be once there is one.

        Args:
            config: with the device, the seed and the env's settings.
            video: that is asked for.

        Raises:
            UsageError: the task has no model, or nothing can be rendered here.
        """
        model_path = require_model(config)
        return cls(config, video, model_path, find_renderer(model_path, video.width, video.height))

    def film(self, policy: Policy) -> None:
        """Show a policy's most likely actions in the first env of an evaluation: one episode, or so many seconds.

        Raises:
            RunError: it could not be rendered or written.
        """
        poses = record(policy, self.config, self.video.seconds)
        render(self.video, self.model_path, poses.qpos, poses.fps, self.renderer)


def record(policy: Policy, config: TrainConfig, seconds: float | None) -> Poses:
    """Return the poses of the first env of an evaluation, from its start on.

    Args:
        policy: whose most likely actions are taken.
        config: with the device, the seed and the env's settings.
        seconds: how long, through as many episodes as it takes; None for one whole episode.
    """
    task = make_task(config)
    stride = stride_of(task.step_duration_s)
    fps = 1.0 / (stride * task.step_duration_s)
    num_frames = math.inf if seconds is None else max(1, round(seconds * fps))
    kept: list[np.ndarray] = []
    with closing(framework_of(config).frames(policy, config)) as shown:
        for step, frame in enumerate(shown):
            if len(kept) >= num_frames or (seconds is None and step > 0 and frame.starts_episode):
                break
            if step % stride == 0:
                kept.append(frame.qpos)
    return Poses(np.stack(kept), fps)
