"""Episodes of a trained policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lockstep.core.config import merge
from lockstep.core.errors import UsageError
from lockstep.recipes.catalog import make_task
from lockstep.session.film import Filming
from lockstep.session.framework import framework_of
from lockstep.session.make_env import least_bytes
from lockstep.session.policy import checkpoint_of, load_policy
from lockstep.session.process import check_memory, memory_errors_in_words
from lockstep.session.video import Video, as_video


def play(
    checkpoint: str | Path,
    num_episodes: int = 64,
    seed: int | None = None,
    device: str = "auto",
    video: Video | str | Path | None = None,
) -> dict[str, Any]:
    """Run whole episodes with the most likely actions, one per env, all at once.

    Args:
        checkpoint: of any run; a run directory stands for its newest.
        num_episodes: how many.
        seed: of the episodes' starts; None for the run's own.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:<index>``.
        video: a file that ends in ``.mp4``, of the first of the episodes; or what ``as_video`` returns.

    Returns:
        task, checkpoint, num_episodes, mean_return, std_return, mean_episode_length, max_episode_length (the time
        limit, in env steps); for each reward term reward/<term>, the mean over episodes of the term's sum; and for
        each metric of the task metric/<name>, its mean over env steps.

    Raises:
        UsageError: no such checkpoint, or one that this version can't play; more episodes than fit into this machine;
            or the video that is asked for can't be.
        RunError: the video could not be rendered or written.
    """
    if num_episodes < 1:
        raise UsageError(f"num_episodes must be at least 1, not {num_episodes}")
    checkpoint = checkpoint_of(checkpoint)  # what is loaded is what is reported
    policy = load_policy(checkpoint, device)
    update = {"device": device} | ({} if seed is None else {"seed": seed})
    config = merge(policy.config, update)
    task = make_task(config)
    check_memory(least_bytes(task, num_episodes, num_steps=1), num_episodes)
    if video is not None:
        # First, since a disk that refuses the film would take the report of the episodes with it.
        Filming.of(config, as_video(video)).film(policy)
    with memory_errors_in_words(num_episodes):
        episodes = framework_of(config).evaluate(policy, config, num_episodes)
    num_steps = episodes.lengths.sum()
    return {
        "task": config.task,
        "checkpoint": str(checkpoint),
        "num_episodes": num_episodes,
        "mean_return": float(episodes.returns.mean()),
        "std_return": float(episodes.returns.std()),
        "mean_episode_length": float(episodes.lengths.mean()),
        "max_episode_length": task.max_episode_steps or config.env.max_episode_steps,
        **{f"reward/{name}": float(values.mean()) for name, values in episodes.term_returns.items()},
        **{f"metric/{name}": float(values.sum() / num_steps) for name, values in episodes.metric_sums.items()},
    }
