"""One GPU, one set of kernel caches and one share of the cores for each rank, before anything can touch CUDA.

What is set, in the environment, so that child processes of a rank have it too:

- CUDA_VISIBLE_DEVICES: entry LOCAL_RANK of the list that was there, else LOCAL_RANK. Every rank sees its GPU as
  ``cuda:0``. CUDA reads it once, when it is initialised.
- LOCKSTEP_DEVICE: the same entry; ``cpu`` if there is no GPU, or if the launcher has set that (all are then hidden);
  ``none`` if no GPU could be given to it, see ``placement_problem``.
- QD_VISIBLE_DEVICE, TI_VISIBLE_DEVICE: Quadrants (under Genesis) and Taichi read a number, never a UUID, and only in
  their Vulkan backend: it counts Vulkan's devices, which know no CUDA mask and which its loader sorts by the PCI bus,
  as NVML does. So this is NVML's index. On CUDA both take the first device that the mask shows.
- MUJOCO_EGL_DEVICE_ID, EGL_DEVICE_ID (pyrender, Genesis): positions in EGL's list of devices, found by UUID.
- the kernel caches of ``kernel_caches``; LOCKSTEP_THREADS of ``cores``; LOCKSTEP_ISOLATED, which names the rank.
"""

import ctypes
import os
import sys
import warnings
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.core.errors import UsageError
from lockstep.core.gpu_mask import Gpu, device_of_rank, find_gpus, gpu_of_entry, visible_devices
from lockstep.distributed import cores, kernel_caches
from lockstep.distributed.egl import device_uuids
from lockstep.distributed.topology import ISOLATED, Topology, from_environment, identity, is_isolated

DEVICE = "LOCKSTEP_DEVICE"
_MASK = "CUDA_VISIBLE_DEVICES"
_PROBLEM = "LOCKSTEP_PLACEMENT_PROBLEM"

# mujoco.egl asks EGL for this many devices and refuses to look for one beyond them.
_MUJOCO_EGL_DEVICES = 10

_MAY_USE_CUDA = ("torch", "jax", "warp", "genesis", "quadrants", "taichi", "mujoco.egl")


def has_gpu_files(folder: Path = Path("/dev")) -> bool:
    """Return whether the system has files of NVIDIA GPUs, which it has even where NVML is not installed."""
    return any(folder.glob("nvidia[0-9]*")) or (folder / "dxg").exists()  # the latter under Windows


def cuda_is_initialised() -> bool:
    """Return whether any library of this process has initialised CUDA's driver, without doing so.

    ``torch.cuda.is_available()`` is enough for that, though torch then says that it has not initialised CUDA.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        return bool(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) == 0)  # else CUDA_ERROR_NOT_INITIALIZED
    except (OSError, AttributeError):
        return False


@dataclass(frozen=True)
class Machine:
    """What isolation asks of the machine and of this process."""

    find_gpus: Callable[[], list[Gpu]] = find_gpus
    has_gpu_files: Callable[[], bool] = has_gpu_files
    egl_uuids: Callable[[], list[str | None]] = device_uuids
    cuda_is_initialised: Callable[[], bool] = cuda_is_initialised
    modules: Mapping[str, Any] = field(default_factory=lambda: sys.modules)


def isolate(environment: MutableMapping[str, str] = os.environ, machine: Machine | None = None) -> None:
    """Give this rank its own GPU, kernel caches and cores; with one process, or the second time, do nothing.

    A placement that can't be right raises nothing yet, since the rank may be about to compute on the CPU: all GPUs are
    hidden from it and ``placement_problem`` says why.

    Raises:
        UsageError: CUDA is initialised already, so that the rank can't be put on its GPU any more.
    """
    if is_isolated(environment):
        return
    gpus: list[Gpu | None] = []
    try:
        topology = from_environment(environment)
    except UsageError as error:
        _hide_gpus(environment, "none", str(error))
    else:
        if topology.world_size == 1:
            return
        gpus = _place(environment, topology, machine or Machine())
        kernel_caches.assign(environment, topology.local_rank)
        cores.settle(environment, topology, [None if gpu is None else gpu.pci_bus_id for gpu in gpus])
    environment[ISOLATED] = identity(environment)


def placement_problem(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return why this rank could not be given a GPU, in one line; None if it has one or is to use the CPU."""
    return environment.get(_PROBLEM) if is_isolated(environment) else None


def given_gpu(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the entry of CUDA_VISIBLE_DEVICES that isolation gave this rank, None if it gave it none."""
    device = environment.get(DEVICE) if is_isolated(environment) else None
    return None if device in ("cpu", "none") else device


def _place(environment: MutableMapping[str, str], topology: Topology, machine: Machine) -> list[Gpu | None]:
    """Show this rank its GPU alone; return the GPU of each rank of this node, None where it is not known."""
    nothing: list[Gpu | None] = [None] * topology.local_world_size
    mask = environment.get(_MASK)
    gpus = [] if environment.get(DEVICE) == "cpu" else machine.find_gpus()
    if environment.get(DEVICE) == "cpu" or not (gpus or machine.has_gpu_files()):
        _hide_gpus(environment, "cpu")
        return nothing
    try:
        if mask is None and not gpus:
            raise UsageError(
                "this machine has NVIDIA GPUs but NVML does not list them; see what nvidia-smi says, name the GPUs in "
                "CUDA_VISIBLE_DEVICES, or use --device cpu"
            )
        devices = visible_devices(mask, gpus)
        if not devices:  # the user's own wish
            _hide_gpus(environment, "cpu")
            return nothing
        entry = device_of_rank(topology.local_rank, topology.local_world_size, devices)
    except UsageError as error:
        _hide_gpus(environment, "none", str(error))
        return nothing
    if devices != [entry]:
        _check_import_order(machine)
    order = environment.get("CUDA_DEVICE_ORDER")
    placed = [gpu_of_entry(device, gpus, order) for device in devices[: topology.local_world_size]]
    environment[_MASK] = environment[DEVICE] = entry
    environment.pop(_PROBLEM, None)
    _point_simulators(environment, placed[topology.local_rank], machine)
    return placed


def _hide_gpus(environment: MutableMapping[str, str], device: str, problem: str | None = None) -> None:
    environment[_MASK] = ""
    environment[DEVICE] = device
    environment.pop(_PROBLEM, None)
    if problem is not None:
        environment[_PROBLEM] = problem


def _point_simulators(environment: MutableMapping[str, str], gpu: Gpu | None, machine: Machine) -> None:
    if gpu is None:
        return
    environment["QD_VISIBLE_DEVICE"] = environment["TI_VISIBLE_DEVICE"] = str(gpu.index)
    uuids = machine.egl_uuids()
    if gpu.uuid in uuids:
        place = uuids.index(gpu.uuid)
        environment["EGL_DEVICE_ID"] = str(place)
        if place < _MUJOCO_EGL_DEVICES:
            environment["MUJOCO_EGL_DEVICE_ID"] = str(place)


def _check_import_order(machine: Machine) -> None:
    user = _user_of_cuda(machine)
    if user is not None:
        raise UsageError(
            f"{user} has initialised CUDA, which can't be given this rank's own GPU any more; import lockstep before "
            "anything that uses CUDA"
        )
    early = [name for name in _MAY_USE_CUDA if name in machine.modules]
    if early:
        warnings.warn(
            f"{', '.join(early)} imported before lockstep: CUDA is untouched so far and this rank gets its own GPU; "
            "import lockstep first to be sure of it",
            stacklevel=5,  # where lockstep is imported
        )


def _user_of_cuda(machine: Machine) -> str | None:
    """Return who has initialised CUDA in this process, None if nobody has."""
    modules = machine.modules
    torch_cuda = getattr(modules.get("torch"), "cuda", None)
    if torch_cuda is not None and torch_cuda.is_initialized():
        return "torch"
    if {"cuda", "gpu", "rocm"} & set(getattr(modules.get("jax._src.xla_bridge"), "_backends", ())):
        return "jax"
    warp = modules.get("warp._src.context") or modules.get("warp.context")  # the latter before Warp 1.10
    if getattr(getattr(warp, "runtime", None), "cuda_devices", None):
        return "warp"
    return "an imported library" if machine.cuda_is_initialised() else None
