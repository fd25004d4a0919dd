"""What the ranks of a pool do in the tests of the training benchmark: train with something wrong, and count by hand."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from lockstep.benchmark.options import Options
from lockstep.benchmark.schema import Bundle
from lockstep.benchmark.training.job import benchmark_training
from lockstep.core.types import Comm
from lockstep.distributed.torch_collectives import _WaitOnHost
from lockstep.distributed.torch_direct import DirectExchange
from lockstep.envs.torch_env import TorchEnv
from lockstep.learn.torch.training import Training
from tests.multiproc.jobs_training import config_of

Fault = tuple[str, float]
_slept_s: list[float] = []
NUM_BUSY = 3
"""Busy loops for each core: a rank then gets a quarter of it."""


def benchmark(
    comm: Comm, settings: dict[str, Any], warm_up: int, iterations: int, fault: Fault = ("none", 0.0)
) -> dict[str, Any]:
    """Return the bundle, on rank 0, and what this rank has counted itself.

    ``num_steps`` env steps of its own in the measured iterations; by its own clock the seconds ``within_s`` these, and
    ``around_s`` them, from the end of the last iteration before them on; ``slept_s`` seconds of them.
    """
    _slept_s.clear()
    found: list[Bundle] = []
    steps: list[int] = []
    spans: list[tuple[float, float]] = []
    with contextlib.ExitStack() as patches:
        patches.enter_context(_FAULTS[fault[0]](comm.rank, fault[1]))
        patches.enter_context(_counted(steps, spans))
        options = Options("training", warm_up=warm_up, iterations=iterations)
        benchmark_training(config_of(settings, "cartpole_classic"), options, lambda: None, found.append)
    bundle = found[0].model_dump_json() if found else None
    measured = slice(warm_up, warm_up + iterations)
    return {
        "bundle": bundle,
        "num_steps": sum(steps[measured]),
        "within_s": sum(end - begin for begin, end in spans[measured]),
        "around_s": spans[measured][-1][1] - spans[warm_up - 1][1],
        "slept_s": sum(_slept_s[-len(_slept_s) * iterations // (warm_up + iterations) :]),
    }


@contextlib.contextmanager
def _patched(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, make(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextlib.contextmanager
def _counted(steps: list[int], spans: list[tuple[float, float]]) -> Iterator[None]:
    """Count env steps by the calls of the env, and note when each iteration begins and ends."""
    count = [0]

    def counting(original: Any) -> Any:
        def step(env: TorchEnv, action: Any) -> Any:
            count[0] += env.num_envs
            return original(env, action)

        return step

    def noting(original: Any) -> Any:
        def iterate(*arguments: Any) -> Any:
            count[0] = 0
            began = time.perf_counter()
            result = original(*arguments)
            steps.append(count[0])
            spans.append((began, time.perf_counter()))
            return result

        return iterate

    with _patched(TorchEnv, "step", counting), _patched(Training, "iterate", noting):
        yield


def _slow_env(rank: int, delay_s: float) -> contextlib.AbstractContextManager[None]:
    """Let each env step of rank 1 sleep; how long it did is noted, since a busy machine wakes it later."""

    def sleeping(original: Any) -> Any:
        def step(env: TorchEnv, action: Any) -> Any:
            if rank == 1:
                began = time.perf_counter()
                time.sleep(delay_s)
                _slept_s.append(time.perf_counter() - began)
            return original(env, action)

        return step

    return _patched(TorchEnv, "step", sleeping)


@contextlib.contextmanager
def _slow_exchanges(rank: int, delay_s: float) -> Iterator[None]:
    """Let every message between ranks be on its way for longer, the same for all ranks."""

    def sleeping(original: Any) -> Any:
        def wait(exchanges: Any, *arguments: Any) -> None:
            original(exchanges, *arguments)
            time.sleep(delay_s)
            last = exchanges._waits.pop()
            exchanges._waits.append(last._replace(seconds=last.seconds + delay_s))

        return wait

    with _patched(DirectExchange, "finish", sleeping), _patched(_WaitOnHost, "wait_for", sleeping):
        yield


@contextlib.contextmanager
def _busy_cores(rank: int, _: float) -> Iterator[None]:
    """Let busy loops take the core of this rank."""
    core = sorted(os.sched_getaffinity(0))[rank % len(os.sched_getaffinity(0))]
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    loop = f"import os; os.sched_setaffinity(0, {{{core}}})\nwhile os.getppid() == {os.getpid()}: pass"
    loops = [subprocess.Popen([sys.executable, "-c", loop]) for _ in range(NUM_BUSY)]
    try:
        yield
    finally:
        for each in loops:
            each.kill()
            each.wait()
        os.sched_setaffinity(0, before)


@contextlib.contextmanager
def _nothing(rank: int, _: float) -> Iterator[None]:
    yield


_FAULTS: dict[str, Callable[[int, float], contextlib.AbstractContextManager[None]]] = {
    "none": _nothing,
    "slow env": _slow_env,
    "slow exchanges": _slow_exchanges,
    "busy cores": _busy_cores,
}
