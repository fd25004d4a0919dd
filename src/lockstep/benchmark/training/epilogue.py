"""What is done with the policy after the measured part of a training, by the one process that there is then."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.benchmark.options import SUCCESS_SHARE, Options
from lockstep.benchmark.schema import Artifacts, Bundle, Success
from lockstep.core.errors import RunError
from lockstep.recipes.catalog import make_task
from lockstep.session import clip
from lockstep.session.env_sensors import capture_env_sensors

if TYPE_CHECKING:
    from lockstep.learn.config import TrainConfig
    from lockstep.learn.observer import Metrics
    from lockstep.session.framework import Framework


class Epilogue:
    """Films the policy, keeps what sensors gave to it, and judges it, as the options ask for.

    Args:
        config: of the training.
        options: of the benchmark, with the place of its bundle.
        framework: of the training.
    """

    def __init__(self, config: TrainConfig, options: Options, framework: Framework) -> None:
        self._config, self._options, self._framework = config, options, framework
        self._content: dict[str, Any] | None = None
        self._iteration = 0

    def keep(self, iteration: int, content: dict[str, Any]) -> None:
        """Take the state of the training at its end."""
        if self._options.has_epilogue:
            self._iteration, self._content = iteration, content

    def finish(self, bundle: Bundle, metrics: Metrics, finish: Callable[[Bundle], None]) -> str:
        """Do what is asked for, and hand on the bundle with what came of it; return nothing.

        Raises:
            RunError: there is no film, or the policy has not learned; the bundle was handed on all the same.
        """
        problems: list[str] = []
        if self._options.check_success:
            success = self._success(metrics)
            if not success.reached:
                problems.append(
                    f"the policy reached a mean return of {success.mean_return:.4g}, and --check_success asks for "
                    f"{success.needed_return:.4g}; train longer (--iterations N)"
                )
            learning = bundle.learning and bundle.learning.model_copy(update={"success": success})
            bundle = bundle.model_copy(update={"learning": learning})
        if self._content is not None and (self._options.video or self._options.capture_env_sensors):
            artifacts, problem = self._artifacts(self._content)
            bundle = bundle.model_copy(update={"artifacts": artifacts})
            problems += [problem] if problem else []
        finish(bundle)
        if problems:
            raise RunError("; ".join(problems))
        return ""

    def _success(self, metrics: Metrics) -> Success:
        reached = metrics.get("eval/mean_return")
        if reached is None:
            raise RunError("--check_success needs an evaluation, and this learner has made none; leave it out")
        needed = self._options.success_return
        if needed is None:
            task = make_task(self._config)
            max_episode_steps = task.max_episode_steps or self._config.env.max_episode_steps
            needed = SUCCESS_SHARE * task.max_step_reward * max_episode_steps
        return Success(mean_return=float(reached), needed_return=needed, reached=float(reached) >= needed)

    def _artifacts(self, content: dict[str, Any]) -> tuple[Artifacts, str]:
        """Make the film and the file of sensors beside the bundle; return them, and what went wrong."""
        assert self._options.output is not None
        stem = self._options.output.with_suffix("")
        video, sensors = Path(f"{stem}_video.mp4"), Path(f"{stem}_sensors.npz")
        made, problem = Artifacts(), ""
        with tempfile.TemporaryDirectory() as folder:
            suffix = ".pt" if self._framework.name == "torch" else ""
            checkpoint = Path(folder) / f"model_{self._iteration}{suffix}"
            self._framework.save(content, checkpoint)
            if self._options.capture_env_sensors:
                capture_env_sensors(checkpoint, sensors)
                made = made.model_copy(update={"env_sensors": str(sensors)})
            if self._options.video:
                problem = clip.make_clip(checkpoint, video, lambda: False)
                made = made if problem else made.model_copy(update={"video": str(video)})
        return made, f"there is no {video}: {problem}" if problem else ""
