"""Which NVIDIA GPUs there are, and which a CUDA_VISIBLE_DEVICES shows. NVML is asked, so CUDA stays untouched."""

import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.core.errors import UsageError

_HIDES_ALL = ("", "-1", "NoDevFiles")
"""Masks that show no GPU: empty, the one in the CUDA manual, and SLURM's for a job without GPUs."""

_SHORT_UUID = len("GPU-8932f937")

# The last of these is how drivers before R470 named an instance: parent, GPU instance, compute instance.
_UUID = re.compile(r"GPU-[0-9a-fA-F][0-9a-fA-F-]*")
_MIG_UUID = re.compile(r"MIG-[0-9a-fA-F][0-9a-fA-F-]*")
_OLD_MIG = re.compile(r"MIG-(GPU-[0-9a-fA-F][0-9a-fA-F-]*)/[0-9]+/[0-9]+")


@dataclass(frozen=True)
class Gpu:
    """One NVIDIA GPU of this machine."""

    index: int
    """NVML's, which counts in the order of the PCI bus."""
    uuid: str
    """``GPU-`` and 32 hexadecimal digits in five groups."""
    name: str
    pci_bus_id: str
    """As under /sys/bus/pci/devices: ``0000:07:00.0``."""
    memory_bytes: int
    """Total; 0 where NVML does not say."""
    driver: str
    mig_uuids: tuple[str, ...] = ()
    """``MIG-...`` of each instance that the GPU is cut into."""


def find_gpus() -> list[Gpu]:
    """Return the machine's NVIDIA GPUs in the order of the PCI bus, whatever the mask says; none without a driver."""
    import pynvml  # type: ignore[import-untyped]

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    found: list[Gpu] = []
    try:
        driver = _text(pynvml.nvmlSystemGetDriverVersion())
        for index in range(pynvml.nvmlDeviceGetCount()):
            # A GPU that has fallen off the bus answers nothing, and CUDA does not count it either.
            with contextlib.suppress(pynvml.NVMLError):
                found.append(_describe(pynvml, index, driver))
    except pynvml.NVMLError:
        pass
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()
    return found


def _describe(pynvml: Any, index: int, driver: str) -> Gpu:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    pci = pynvml.nvmlDeviceGetPciInfo(handle)
    memory_bytes = 0
    with contextlib.suppress(pynvml.NVMLError):  # chips that share the host's memory do not support the question
        memory_bytes = int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
    return Gpu(
        index=index,
        uuid=_text(pynvml.nvmlDeviceGetUUID(handle)),
        name=_text(pynvml.nvmlDeviceGetName(handle)),
        pci_bus_id=f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}.0",
        memory_bytes=memory_bytes,
        driver=driver,
        mig_uuids=_mig_uuids(pynvml, handle),
    )


def _mig_uuids(pynvml: Any, handle: Any) -> tuple[str, ...]:
    found: list[str] = []
    with contextlib.suppress(pynvml.NVMLError):  # most GPUs can't be cut up, and say so by an error
        if pynvml.nvmlDeviceGetMigMode(handle)[0] != pynvml.NVML_DEVICE_MIG_ENABLE:
            return ()
        for index in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
            with contextlib.suppress(pynvml.NVMLError):  # not every place is taken
                found.append(_text(pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index))))
    return tuple(found)


def _text(answer: str | bytes) -> str:
    return answer.decode() if isinstance(answer, bytes) else answer


def visible_devices(mask: str | None, gpus: Sequence[Gpu]) -> list[str]:
    """Return the entries of a CUDA_VISIBLE_DEVICES in the order in which CUDA numbers the GPUs.

    CUDA silently cuts the list at the first entry that it does not understand; here that is an error.

    Args:
        mask: the variable's value, None if it is not set.
        gpus: what ``find_gpus`` returned; if that is nothing, only the syntax is checked.

    Raises:
        UsageError: an entry is malformed, repeated, unknown, or out of range, or some are indices and some UUIDs.
    """
    if mask is None:
        return [str(index) for index in range(len(gpus))]
    if mask.strip() in _HIDES_ALL:
        return []
    entries = [entry.strip() for entry in mask.split(",")]
    if not entries[-1]:
        entries.pop()  # "0," is common and means the same to CUDA
    devices = [_checked(entry, mask, gpus) for entry in entries]
    kinds = {_kind(device) for device in devices}
    if len(kinds) > 1:
        raise UsageError(f"CUDA_VISIBLE_DEVICES={mask} mixes {' and '.join(sorted(kinds))}; name all GPUs the same way")
    seen: dict[str, str] = {}
    for device in devices:
        identity = _identity(device, gpus)
        if identity in seen:
            twice = (
                f"{device} twice" if seen[identity] == device else f"one GPU twice, as {seen[identity]} and {device}"
            )
            raise UsageError(f"CUDA_VISIBLE_DEVICES={mask} names {twice}; name each GPU once")
        seen[identity] = device
    return devices


def device_of_rank(local_rank: int, local_world_size: int, devices: Sequence[str]) -> str:
    """Return the entry of ``devices``, as from ``visible_devices``, that belongs to a rank of this node.

    Raises:
        UsageError: there are more ranks on this node than devices.
    """
    if local_world_size <= len(devices):
        return devices[local_rank]
    if not devices:
        raise UsageError(f"{_ranks(local_world_size)} on this node but no GPU visible; use --device cpu")
    count = len(devices)
    raise UsageError(
        f"{_ranks(local_world_size)} on this node but {count} GPU{'s' if count > 1 else ''} visible "
        f"(CUDA_VISIBLE_DEVICES={','.join(devices)}); use --num_gpus {count} or --device cpu"
    )


def gpu_of_entry(entry: str, gpus: Sequence[Gpu], device_order: str | None) -> Gpu | None:
    """Return the GPU that an entry of CUDA_VISIBLE_DEVICES names, None if that can't be known.

    Args:
        entry: an index, a UUID (its beginning is enough) or the id of a MIG instance, whose parent is returned.
        gpus: what ``find_gpus`` returned.
        device_order: the value of CUDA_DEVICE_ORDER. Unless it is ``PCI_BUS_ID``, CUDA counts from its fastest GPU
            on, so an index says nothing about NVML's where the GPUs are of different kinds.
    """
    if entry.isdecimal():
        same_order = device_order == "PCI_BUS_ID" or len({gpu.name for gpu in gpus}) == 1
        return gpus[int(entry)] if same_order and int(entry) < len(gpus) else None
    if entry.startswith("MIG-"):
        parent = _OLD_MIG.fullmatch(entry)
        if parent is None:
            return next((gpu for gpu in gpus if entry in gpu.mig_uuids), None)
        entry = parent.group(1)
    fitting = [gpu for gpu in gpus if gpu.uuid.startswith(entry)]
    return fitting[0] if len(fitting) == 1 else None


def _kind(device: str) -> str:
    return "indices" if device.isdecimal() else f"{device[:3]} ids"


def _identity(device: str, gpus: Sequence[Gpu]) -> str:
    """Return one text for all ways of writing the same GPU or MIG instance."""
    if device.startswith("GPU-") and (gpu := gpu_of_entry(device, gpus, None)) is not None:
        return gpu.uuid
    return device


def _checked(entry: str, mask: str, gpus: Sequence[Gpu]) -> str:
    """Return an entry as CUDA takes it, after finding the GPU that it names."""
    where = f"CUDA_VISIBLE_DEVICES={mask}"
    if re.fullmatch("[0-9]+", entry):
        if gpus and int(entry) >= len(gpus):
            there = "GPU 0" if len(gpus) == 1 else f"GPUs 0 to {len(gpus) - 1}"
            raise UsageError(f"{where} names GPU {entry}, but this machine has {there}; name GPUs that are there")
        return str(int(entry))
    if _UUID.fullmatch(entry):
        fitting = sum(gpu.uuid.startswith(entry) for gpu in gpus)
        if fitting > 1:
            raise UsageError(f"{where}: {entry} is the beginning of {fitting} UUIDs; write more of it")
        if gpus and not fitting:
            there = ", ".join(gpu.uuid[:_SHORT_UUID] for gpu in gpus)
            raise UsageError(f"{where} names {entry}, but this machine has {there}; name GPUs that are there")
        return entry
    if _MIG_UUID.fullmatch(entry) or _OLD_MIG.fullmatch(entry):
        if gpus and gpu_of_entry(entry, gpus, None) is None:
            there = ", ".join(uuid for gpu in gpus for uuid in gpu.mig_uuids) or "no MIG instance"
            raise UsageError(f"{where} names {entry}, but this machine has {there}; name instances that are there")
        return entry
    raise UsageError(
        f"{where}: '{entry}' is no GPU; name GPUs by index (0,1), by UUID (GPU-...) or MIG instances (MIG-...)"
    )


def _ranks(count: int) -> str:
    return f"{count} rank{'s' if count > 1 else ''}"
