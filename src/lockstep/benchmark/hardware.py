"""What a process of the job runs on: its node, its cores, and the GPU behind each of its ranks."""

import os
import platform
import re
import socket
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import psutil  # type: ignore[import-untyped]

from lockstep.benchmark.schema import GpuHardware, NodeHardware, Versions
from lockstep.core.environment import allowed_cores, describe, versions
from lockstep.core.errors import UsageError
from lockstep.core.gpu_mask import Gpu, gpu_of_entry, visible_devices

_INDEX = re.compile(r"cuda(?::([0-9]+))?")


def own_node(gpus: Sequence[Gpu]) -> NodeHardware:
    """Return this node, as number 0: who knows the others numbers them."""
    hardware = describe()["hardware"]
    return NodeHardware(
        node=0,
        host=socket.gethostname(),
        platform=platform.platform(),
        cpu=hardware["cpu"],
        num_cores=hardware["num_cores"] or 1,
        num_allowed_cores=cores_of_job(),
        memory_bytes=psutil.virtual_memory().total,
        gpus=tuple(
            GpuHardware(
                name=gpu.name,
                uuid=gpu.uuid,
                pci_bus_id=gpu.pci_bus_id,
                memory_bytes=gpu.memory_bytes or None,
                driver=gpu.driver,
            )
            for gpu in gpus
        ),
    )


def cores_of_job() -> int:
    """Return how many cores the job may keep busy on this node: a rank may be bound to some of them."""
    own = allowed_cores()
    try:
        starter = psutil.Process().parent()
        return own if starter is None else max(own, allowed_cores(pid=starter.pid))
    except (psutil.Error, OSError):
        return own


def own_cores() -> tuple[int, ...] | None:
    """Return the cores that this process may run on; None where the system has no such thing."""
    return tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else None


def gpu_of(device: str, gpus: Sequence[Gpu], mask: str | None, device_order: str | None = None) -> Gpu | None:
    """Return the GPU that a device of this process is, None if it is none or can't be told.

    NVML counts all GPUs, CUDA those of the mask, so an index alone says nothing.

    Args:
        device: as torch and JAX name it here: ``cuda``, ``cuda:1``, ``cuda:0 (NVIDIA H100)``, ``cpu``.
        gpus: what ``find_gpus`` returned.
        mask: CUDA_VISIBLE_DEVICES.
        device_order: CUDA_DEVICE_ORDER.
    """
    found = _INDEX.match(device)
    if found is None:
        return None
    try:
        entries = visible_devices(mask, gpus)
    except UsageError:
        return None
    index = int(found.group(1) or 0)
    return gpu_of_entry(entries[index], gpus, device_order) if index < len(entries) else None


def installed(gpus: Sequence[Gpu]) -> Versions:
    """Return what is installed here. Frameworks are asked only if they are loaded."""
    packages: dict[str, str | None] = dict(versions())
    for name in ("jaxlib", "mujoco-mjx", "warp-lang", "mujoco-warp", "genesis-world"):
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            packages[name] = None
    torch: Any = sys.modules.get("torch")
    cuda = nccl = None
    if torch is not None:
        cuda = torch.version.cuda
        nccl = ".".join(map(str, torch.cuda.nccl.version())) if cuda and torch.cuda.is_available() else None
    return Versions(
        python=platform.python_version(),
        packages=packages,
        driver=gpus[0].driver if gpus else None,
        cuda=cuda,
        nccl=nccl,
    )
