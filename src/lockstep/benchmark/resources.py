"""What this process uses while it is measured, and what else is busy on its cores: sampled in a thread of its own."""

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import psutil  # type: ignore[import-untyped]

from lockstep.benchmark.schema import Record

INTERVAL_S = 0.5
_MAX_SHARE = 0.002  # of this process's time, for taking samples


class Sample(NamedTuple):
    """The state of this process at one time. Times are sums since something began: only differences say anything."""

    at_s: float
    cpu_s: float  # of all threads
    delay_s: float | None  # for which threads of this process were ready to run, and something else had the core
    gloo_delay_s: float | None  # the same for gloo's threads, which delay nothing but exchanges
    busy_s: float  # of the cores that this process may run on, whoever kept them busy
    memory_bytes: int
    gpus: tuple[tuple[float | None, float | None], ...]  # of each GPU: percent of its time, bytes; None: not told


class Interval(Record):
    """What was used from one sample to the next."""

    seconds: float
    cpu_s: float
    delay_s: float | None
    gloo_delay_s: float | None
    busy_s: float
    memory_bytes: int
    gpu_percent: tuple[float | None, ...]
    gpu_memory_bytes: tuple[float | None, ...]


class Threads:
    """The run delay of all threads of this process, those that have ended since included.

    Linux keeps for each thread how long it was ready to run without getting a core
    (``/proc/<pid>/task/<tid>/schedstat``, Documentation/scheduler/sched-stats.rst, in nanoseconds). Gloo's
    threads are apart: while they queue behind the thread that they work for, nobody waits for them.

    Args:
        folder: with a folder for each thread.
    """

    def __init__(self, folder: Path = Path("/proc/self/task")) -> None:
        self._folder = folder
        self._is_of_gloo: dict[str, bool] = {}
        self._seen: dict[str, int] = {}

    def read(self) -> tuple[float, float] | None:
        """Return seconds of delay since the threads began, of gloo's apart as the second; None where nobody counts."""
        with contextlib.suppress(OSError):
            for name in os.listdir(self._folder):  # noqa: PTH208 - iterdir() would make a Path of each
                with contextlib.suppress(OSError, ValueError):
                    if name not in self._is_of_gloo:
                        self._is_of_gloo[name] = "gloo" in (self._folder / name / "comm").read_text()
                    self._seen[name] = _delay_ns((self._folder / name / "schedstat").read_text())
        if not self._seen:
            return None
        of_gloo = sum(delay for name, delay in self._seen.items() if self._is_of_gloo[name])
        return (sum(self._seen.values()) - of_gloo) / 1e9, of_gloo / 1e9


@dataclass
class Sampler:
    """Takes samples at the beginning and the end, and every ``INTERVAL_S`` in between; a context manager.

    Args:
        cores: that this process may run on; None for all.
        gpu_uuids: of its GPUs.
    """

    cores: Sequence[int] | None
    gpu_uuids: Sequence[str] = ()
    samples: list[Sample] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._process, self._threads = psutil.Process(), Threads()
        self._gpus = _Gpus(self.gpu_uuids)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lockstep-resources", daemon=True)

    def __enter__(self) -> Self:
        self.samples.append(self.sample())
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        self.samples.append(self.sample())
        self._gpus.close()

    def sample(self) -> Sample:
        """Return how it is now."""
        times = self._threads.read()
        return Sample(
            at_s=time.perf_counter(),
            cpu_s=time.process_time(),
            delay_s=None if times is None else times[0],
            gloo_delay_s=None if times is None else times[1],
            busy_s=_busy_s(self.cores),
            memory_bytes=self._process.memory_info().rss,
            gpus=self._gpus.read(),
        )

    def intervals(self) -> list[Interval]:
        """Return what was used between the samples so far.

        The last sample may follow soon on the one before, and the system counts busy cores in hundredths of seconds: a
        short interval would say much of little, so it is part of the one before.
        """
        kept = self.samples[:1]
        for sample in self.samples[1:-1]:
            if self.samples[-1].at_s - sample.at_s >= INTERVAL_S / 2:
                kept.append(sample)
        kept += self.samples[1:][-1:]
        pairs = itertools.pairwise(kept)
        return [_between(before, after) for before, after in pairs if after.at_s > before.at_s]

    def _run(self) -> None:
        pause_s = INTERVAL_S
        while not self._ended.wait(pause_s):
            began = time.thread_time()
            self.samples.append(self.sample())
            pause_s = max(INTERVAL_S, (time.thread_time() - began) / _MAX_SHARE)


def _between(before: Sample, after: Sample) -> Interval:
    return Interval(
        seconds=after.at_s - before.at_s,
        cpu_s=max(0.0, after.cpu_s - before.cpu_s),
        delay_s=_more(before.delay_s, after.delay_s),
        gloo_delay_s=_more(before.gloo_delay_s, after.gloo_delay_s),
        busy_s=max(0.0, after.busy_s - before.busy_s),
        memory_bytes=after.memory_bytes,
        gpu_percent=tuple(percent for percent, _ in after.gpus),
        gpu_memory_bytes=tuple(num_bytes for _, num_bytes in after.gpus),
    )


def _delay_ns(counts: str) -> int:
    """Return the second of three counts: nanoseconds on a core, of delay, and turns.

    Raises:
        ValueError: these are no such counts.
    """
    _, delay, _ = counts.split()
    return int(delay)


def _more(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else max(0.0, after - before)


def _busy_s(cores: Sequence[int] | None) -> float:
    """Return the seconds for which cores were busy since the system began."""
    by_core = psutil.cpu_times(percpu=True)
    chosen = range(len(by_core)) if cores is None else [core for core in cores if core < len(by_core)]
    return sum(_busy(by_core[core]) for core in chosen)


def _busy(times: Any) -> float:
    # Guests are in user time already; time that the host has given to other machines is nobody's here.
    idle = times.idle + getattr(times, "iowait", 0.0) + getattr(times, "steal", 0.0)
    guests = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
    return float(sum(times) - idle - guests)


class _Gpus:
    """The GPUs of this process, asked through NVML by UUID: its index is not CUDA's."""

    def __init__(self, uuids: Sequence[str]) -> None:
        self._handles: list[Any] = []
        self._close: Callable[[], None] = lambda: None
        if not uuids:
            return
        import pynvml  # type: ignore[import-untyped]

        self._nvml = pynvml
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlInit()
            self._close = pynvml.nvmlShutdown
            self._handles = [pynvml.nvmlDeviceGetHandleByUUID(uuid.encode()) for uuid in uuids]

    def read(self) -> tuple[tuple[float | None, float | None], ...]:
        return tuple((self._percent(handle), self._memory(handle)) for handle in self._handles)

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self._close()

    def _percent(self, handle: Any) -> float | None:
        with contextlib.suppress(self._nvml.NVMLError):  # a part of a GPU (MIG) does not tell
            return float(self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        return None

    def _memory(self, handle: Any) -> float | None:
        with contextlib.suppress(self._nvml.NVMLError):
            for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(handle):
                if process.pid == os.getpid() and process.usedGpuMemory:
                    return float(process.usedGpuMemory)
        with contextlib.suppress(self._nvml.NVMLError):
            return float(self._nvml.nvmlDeviceGetMemoryInfo(handle).used)
        return None
