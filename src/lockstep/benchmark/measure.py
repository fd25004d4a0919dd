"""One door to the benchmarks that measure."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lockstep.core.registry import load

if TYPE_CHECKING:
    from lockstep.benchmark.options import Options
    from lockstep.benchmark.schema import Bundle
    from lockstep.learn.config import TrainConfig

_BENCHMARKS = {
    "startup": "lockstep.benchmark.startup.job:benchmark_startup",
    "runtime": "lockstep.benchmark.runtime_job:benchmark_runtime",
    "training": "lockstep.benchmark.training:benchmark_training",
}


def measure(
    config: TrainConfig, options: Options, prepare: Callable[[], object], finish: Callable[[Bundle], None]
) -> None:
    """Do the benchmark that is asked for. All processes of the job call it.

    Args:
        config: of the training that it is about.
        options: of the benchmark.
        prepare: called on rank 0 before anything is built; raises what stands in the way of ``finish``.
        finish: writes and shows the bundle, on rank 0.

    Raises:
        UsageError: whatever can't work, found before anything is built.
        RunError: what was measured failed, or the disk refused.
    """
    load(_BENCHMARKS[options.kind])(config, options, prepare, finish)
