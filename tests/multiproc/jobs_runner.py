"""What ranks do in the tests of runners of one's own."""

from pathlib import Path
from typing import Any

import torch

from lockstep.core.config import merge
from lockstep.core.errors import LockstepError
from lockstep.core.interrupts import StopReason
from lockstep.core.types import Comm
from lockstep.learn.torch import checkpoint
from lockstep.session.make_env import build_share
from lockstep.session.runner import check_runner, load_runner
from lockstep.session.user_runner import UserRunner
from tests.unit.learner_fixtures import small_config
from tests.unit.runner_fixtures import HERE


class Notes:
    """An observer that keeps what it is told, and asks for a stop in iteration ``stop_in``."""

    save_due = False

    def __init__(self, stop_in: int | None = None) -> None:
        self.metrics: list[dict[str, Any]] = []
        self.saved: dict[str, Any] = {}
        self._stop_in = stop_in

    @property
    def stop_requested(self) -> StopReason | None:
        return "preempted" if self.metrics and self.metrics[-1]["iteration"] == self._stop_in else None

    def record(self, metrics: dict[str, Any]) -> None:
        self.metrics.append(metrics)

    def save(self, iteration: int, content: dict[str, Any]) -> None:
        self.saved = content

    def save_failure(self, iteration: int, content: dict[str, Any]) -> Path | None:
        return None


def run(
    comm: Comm,
    runner: str,
    num_envs: list[int],
    max_iterations: int = 4,
    resume: Path | None = None,
    save: Path | None = None,
    stop_in: int | None = None,
) -> dict[str, Any]:
    """Run a runner; only rank 0 reads ``resume``, a checkpoint. Return what it recorded and saved, or what failed."""
    config = merge(
        small_config(runner=f"{HERE}:{runner}", dtype="float64", sentinel_interval=2),
        {"num_envs": num_envs, "max_iterations": max_iterations},
    )
    check_runner(config, comm.world_size)
    torch.set_default_dtype(torch.float64)
    shares = config.envs_by_rank(comm.world_size)
    env = build_share(config, shares, comm.rank)
    notes = Notes(stop_in)
    try:
        user_runner = UserRunner(load_runner(config.runner), config, env, comm)
        if resume is not None:
            user_runner.load_state_dict(checkpoint.load(resume) if comm.rank == 0 else None, resume)
        status = user_runner.train(notes, None)
    except LockstepError as error:
        return {"error": str(error), "metrics": notes.metrics}
    finally:
        torch.set_default_dtype(torch.float32)
        env.close()
    if save is not None and comm.rank == 0:
        checkpoint.save(notes.saved, save)
    return {"status": status, "metrics": notes.metrics, "state": notes.saved["state"]}
