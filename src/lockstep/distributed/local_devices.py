"""How many devices a JAX process will have, told before JAX is started: each of them is a rank."""

import importlib.util
import os
import re
from collections.abc import Callable, Mapping, Sequence

from lockstep.core.gpu_mask import Gpu, find_gpus, visible_devices

_CUDA_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")
_FORCED_CPU_DEVICES = re.compile(r"--xla_force_host_platform_device_count=(\d+)")


def count_local_devices(
    device: str,
    num_devices: int,
    world_size: int,
    environment: Mapping[str, str] = os.environ,
    gpus_of_machine: Callable[[], Sequence[Gpu]] = find_gpus,
) -> int:
    """Return the devices of each process of a JAX job.

    Args:
        device: as in a config: ``auto``, ``cpu``, ``cuda`` or ``cuda:<index>``.
        num_devices: as in a config: 0 for all there are.
        world_size: processes of the job; of several each has one GPU to itself.
        environment: with CUDA_VISIBLE_DEVICES, and what makes JAX split a CPU (JAX_NUM_CPU_DEVICES, XLA_FLAGS).
        gpus_of_machine: finds them, whatever the mask says.

    Raises:
        UsageError: CUDA_VISIBLE_DEVICES names something that is not there.
    """
    if num_devices:
        return num_devices
    if device.startswith("cuda:"):
        return 1
    if device != "cpu" and has_cuda_plugin():
        gpus = gpus_of_machine()
        visible = visible_devices(environment.get("CUDA_VISIBLE_DEVICES"), gpus) if gpus else []
        if visible:
            return len(visible) if world_size == 1 else 1
    forced = environment.get("JAX_NUM_CPU_DEVICES", "")
    if forced.isdecimal() and int(forced):
        return int(forced)
    in_flags = _FORCED_CPU_DEVICES.search(environment.get("XLA_FLAGS", ""))
    return max(1, int(in_flags.group(1))) if in_flags else 1


def has_cuda_plugin() -> bool:
    """Return whether JAX is installed with what it needs for NVIDIA GPUs."""
    return any(importlib.util.find_spec(name) for name in _CUDA_PLUGINS)
