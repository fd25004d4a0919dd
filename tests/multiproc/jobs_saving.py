"""What the ranks of a pool do in the tests of checkpoints."""

from pathlib import Path
from typing import Any

from lockstep.core.interrupts import StopRequest
from lockstep.core.null_run_directory import NullRunDirectory
from lockstep.core.progress import Progress
from lockstep.core.run_directory import RunDirectory
from lockstep.core.types import Comm
from lockstep.learn.torch import loop
from lockstep.session.observer import RunObserver
from tests.multiproc.jobs_training import config_of, training_on


class OwnTime(RunObserver):
    """Its clock goes on by so many seconds with each iteration; it notes of which iterations there are checkpoints."""

    def __init__(self, seconds: float, **arguments: Any) -> None:
        self.now_s = 0.0
        self.seconds = seconds
        self.saved: list[int] = []
        super().__init__(**arguments, clock=lambda: self.now_s)

    def record(self, metrics: Any) -> None:
        self.now_s += self.seconds
        super().record(metrics)

    def save(self, iteration: int, content: Any) -> None:
        self.saved.append(iteration)
        super().save(iteration, content)


def save_by_clock(comm: Comm, seconds: float, folder: Path) -> tuple[list[int], list[str]]:
    """Train for 10 iterations with a checkpoint every 3 seconds of rank 0.

    Args:
        comm: the ranks.
        seconds: an iteration's duration, as this rank sees it.
        folder: for rank 0's run.

    Returns:
        Of which iterations this rank has saved, and the names of the files.
    """
    settings = {"num_envs": 4, "max_iterations": 10, "checkpoints": {"interval": 1000, "interval_s": 3.0, "keep": 10}}
    config = config_of(settings, "cartpole_classic")
    training = training_on(comm, config)
    run = RunDirectory.create(folder, "t", "", "x: 1\n", {}, 10) if comm.rank == 0 else NullRunDirectory(folder)
    progress = Progress("t", run.path, on_screen=False)
    observer = OwnTime(
        seconds, config=config, run=run, progress=progress, request=StopRequest(), so_far=training.so_far
    )
    with observer:
        loop.train(training, observer)
        observer.settle()
    run.close()
    training.env.close()
    return observer.saved, sorted(path.name for path in run.checkpoints())
