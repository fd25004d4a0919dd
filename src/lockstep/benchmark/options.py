"""What a benchmark is asked for, beside the training that it is about."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.benchmark.schema import Kind
from lockstep.core.config import merge
from lockstep.core.errors import UsageError

if TYPE_CHECKING:
    from lockstep.learn.config import TrainConfig

TAG = "benchmark"
"""What processes wait for one another for, in messages."""
WARM_UP = 5
"""Iterations that are not measured: in them kernels are compiled, memory is got, and caches fill."""
ITERATIONS = 30
REPETITIONS = 3
SUCCESS_SHARE = 0.8
"""Of the most that an episode can give: what --check_success asks for where no return is named."""


@dataclass(frozen=True)
class Options:
    """How a benchmark is done."""

    kind: Kind
    command: tuple[str, ...] = ("lockstep", "benchmark")
    """Words of the command line, for the bundle."""
    output: Path | None = None
    """Of the bundle; None for a name of its own under ``log_root``."""
    warm_up: int = WARM_UP
    iterations: int = ITERATIONS
    repetitions: int = REPETITIONS
    """Warm starts, of a startup benchmark."""
    video: bool = False
    """Film the policy after the measured part."""
    capture_env_sensors: bool = False
    """Keep what a few envs give to the policy after the measured part."""
    check_success: bool = False
    """Evaluate the policy after the measured part, and fail if it has not learned."""
    success_return: float | None = None
    """What it must reach on average; None for a share of the most that an episode can give."""

    @property
    def has_epilogue(self) -> bool:
        """Whether something is done with the policy after the measured part."""
        return self.video or self.capture_env_sensors or self.check_success


_ONE_PROCESS = {
    "video": "a film needs one policy and one renderer, and would keep all other ranks waiting",
    "capture_env_sensors": "it keeps what the envs of one process give",
    "check_success": "an evaluation is no part of the measured throughput and would be one rank's",
}


def check_options(options: Options, num_processes: int) -> None:
    """Check that a job of so many processes can do what it is asked for.

    Raises:
        UsageError: it can't; with the reason.
    """
    for name, reason in _ONE_PROCESS.items():
        if getattr(options, name) and options.kind != "training":
            raise UsageError(f"--{name} belongs to lockstep benchmark training, which has a policy; leave it out")
        if getattr(options, name) and num_processes != 1:
            raise UsageError(
                f"--{name} can't be had with {options.kind}_multigpu: {reason}; leave it out, or use lockstep "
                f"benchmark {options.kind}"
            )


def config_for(config: "TrainConfig", options: Options) -> "TrainConfig":
    """Return the config that a benchmark runs: its own number of iterations, and nothing in between that is no part.

    Evaluations, checkpoints, loggers and videos are left out; everything else is the training's own.
    """
    total = options.warm_up + options.iterations
    last = 1 if options.has_epilogue else 0  # one more iteration, which is not measured and ends with an evaluation
    changes = {
        "max_iterations": total + last,
        "evaluation": {"interval": total + last if options.check_success else 0},
        "checkpoints": {"interval": total + last, "interval_s": 0.0},
        "logger": "none",
        "video": False,
    }
    return merge(config, changes)
