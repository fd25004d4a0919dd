"""Which device each rank of this node gets, and who else is using it."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.core.errors import UsageError
from lockstep.core.gpu_mask import Gpu, device_of_rank, gpu_of_entry, visible_devices

MIN_FREE_SHARE = 0.5
"""Of a GPU's memory; below it the dry run warns."""


@dataclass(frozen=True)
class RankPlace:
    """The device of one rank of this node."""

    local_rank: int
    entry: str | None
    """What the rank's CUDA_VISIBLE_DEVICES will be; None for the CPU."""
    gpu: Gpu | None = None
    """None on the CPU, and where CUDA's order of the GPUs is not known."""


@dataclass(frozen=True)
class GpuUser:
    """A process that holds memory of a GPU."""

    pid: int
    name: str
    memory_bytes: int | None


@dataclass(frozen=True)
class GpuUse:
    """The state of a GPU before the job starts."""

    free_bytes: int
    total_bytes: int
    users: tuple[GpuUser, ...]


def visible(environment: Mapping[str, str], gpus: Sequence[Gpu]) -> list[str]:
    """Return the entries of CUDA_VISIBLE_DEVICES, or those it would have; none on a machine without NVIDIA GPUs.

    Raises:
        UsageError: the mask names something that is not there.
    """
    return visible_devices(environment.get("CUDA_VISIBLE_DEVICES"), gpus) if gpus else []


def place_ranks(
    num_ranks: int | None, device: str, several: bool, environment: Mapping[str, str], gpus: Sequence[Gpu]
) -> tuple[RankPlace, ...]:
    """Return the device of each rank of this node.

    Args:
        num_ranks: how many; None for one per visible GPU.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:<index>``, as in a config.
        several: whether the job has more ranks on other nodes.
        environment: with the mask.
        gpus: of this machine.

    Raises:
        UsageError: there is no such device, or not one for each rank.
    """
    if device == "cpu":
        if num_ranks is None:
            raise UsageError("on the CPU the number of ranks must be given: add --num_gpus N to --device cpu")
        return tuple(RankPlace(local_rank, None) for local_rank in range(num_ranks))
    if device not in ("auto", "cuda") and not device.startswith("cuda:"):
        raise UsageError(f"device {device!r} is unknown; use auto, cpu or cuda")
    entries = visible(environment, gpus)
    if not entries:
        raise UsageError(f"{_why_none(environment, gpus)}; use --num_gpus N --device cpu for N ranks on CPU cores")
    count = len(entries) if num_ranks is None else num_ranks
    if device.startswith("cuda:"):
        if count > 1 or several:
            raise UsageError(
                f"device {device!r} is one GPU, and every rank gets its own; leave --device out, and choose GPUs by "
                "CUDA_VISIBLE_DEVICES"
            )
        entries = [_entry_of(device, entries)]
    device_of_rank(count - 1, count, entries)
    order = environment.get("CUDA_DEVICE_ORDER")
    return tuple(
        RankPlace(local_rank, entries[local_rank], gpu_of_entry(entries[local_rank], gpus, order))
        for local_rank in range(count)
    )


def use_of(gpu: Gpu, nvml: Any = None) -> GpuUse | None:
    """Return a GPU's free memory and the processes on it; None if NVML does not say.

    Args:
        gpu: one of ``find_gpus``.
        nvml: instead of the module ``pynvml``.
    """
    if nvml is None:
        import pynvml  # type: ignore[import-untyped]

        nvml = pynvml
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        users: dict[int, GpuUser] = {}
        for ask in (nvml.nvmlDeviceGetComputeRunningProcesses, nvml.nvmlDeviceGetGraphicsRunningProcesses):
            with contextlib.suppress(nvml.NVMLError):
                for process in ask(handle):
                    users[process.pid] = GpuUser(process.pid, _name_of(process.pid), process.usedGpuMemory)
        return GpuUse(int(memory.free), int(memory.total), tuple(users.values()))
    except nvml.NVMLError:
        return None
    finally:
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


def _name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "another container's or user's process"


def _why_none(environment: Mapping[str, str], gpus: Sequence[Gpu]) -> str:
    if not gpus:
        return "this machine has no NVIDIA GPU, or no driver for it"
    return f"CUDA_VISIBLE_DEVICES={environment.get('CUDA_VISIBLE_DEVICES', '')} hides every GPU"


def _entry_of(device: str, entries: Sequence[str]) -> str:
    index = device.removeprefix("cuda:")
    if not index.isdecimal() or int(index) >= len(entries):
        raise UsageError(f"device {device!r} is not there; visible are cuda:0 to cuda:{len(entries) - 1}")
    return entries[int(index)]
