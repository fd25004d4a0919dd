"""Which devices of a JAX job are its ranks, and how they are called."""

from __future__ import annotations

import os
import re
from collections import Counter
from typing import TYPE_CHECKING, Any

import jax
from jax._src import xla_bridge

from lockstep.core.errors import UsageError
from lockstep.distributed.isolation import DEVICE, given_gpu, placement_problem
from lockstep.distributed.local_devices import has_cuda_plugin

if TYPE_CHECKING:
    from lockstep.distributed.jax_mesh import RankMesh

_DEVICE = re.compile(r"auto|cpu|cuda(:[0-9]+)?")
_FORCED = re.compile(r"--xla_force_host_platform_device_count=([0-9]+)")


def in_words(mesh: RankMesh) -> str:
    """Return the ranks in words: ``4 ranks (4 CPU devices of this process)``, ``2 ranks (1 GPU in each process)``."""
    devices = list(mesh.mesh.devices.flat)
    ranks = f"{len(devices)} rank{'s' if len(devices) > 1 else ''}"
    per_process = sorted(set(Counter(each.process_index for each in devices).values()))
    names = " or ".join(f"{count} {_noun(devices[0], count)}" for count in per_process)
    if mesh.is_multiprocess:
        return f"{ranks} ({names} in each of {len({each.process_index for each in devices})} processes)"
    return ranks if len(devices) == 1 else f"{ranks} ({names} of this process)"


def name_of(device: Any) -> str:
    """Return a device's name as it stands in ``run.json``: ``cpu:0``, ``cuda:0`` and what kind of GPU it is."""
    if device.platform == "cpu":
        return f"cpu:{device.local_hardware_id if device.local_hardware_id is not None else device.id}"
    return f"cuda:{device.local_hardware_id} ({device.device_kind})"


def kind_of(device: Any) -> str:
    """Return what a device is: ``cpu``, or a GPU by its name."""
    return "cpu" if device.platform == "cpu" else f"cuda ({device.device_kind})"


def choose_platform(device: str, num_devices: int) -> None:
    """Tell JAX what to start, if it has not started.

    Raises:
        UsageError: not a device, or one that this process could not be given.
    """
    if not _DEVICE.fullmatch(device):
        raise UsageError(f"device {device!r} is unknown; use auto, cpu, cuda or cuda:<index>")
    problem = placement_problem()
    if problem is not None and device != "cpu":
        raise UsageError(problem)
    if xla_bridge.backends_are_initialized():
        return
    if device == "auto" and os.environ.get(DEVICE) == "cpu":
        device = "cpu"
    if device != "auto":
        # A GPU that is asked for must not become the CPU without a word, nor may a GPU be taken up for nothing.
        jax.config.update("jax_platforms", "cpu" if device == "cpu" else "cuda,cpu")
    if num_devices and device in ("auto", "cpu") and not _FORCED.search(os.environ.get("XLA_FLAGS", "")):
        options: Any = jax.config
        # A script that has asked for more may use the others itself.
        options.update("jax_num_cpu_devices", max(num_devices, options.jax_num_cpu_devices))


def choose_devices(device: str, num_devices: int) -> list[Any]:
    """Return the devices of all processes that are ranks.

    Raises:
        UsageError: there are none of that kind, or not as many.
    """
    kind, _, index = device.partition(":")
    try:
        found = jax.devices() if kind == "auto" else jax.devices(kind)
    except (RuntimeError, AssertionError) as error:  # JAX asserts that a platform of JAX_PLATFORMS has started
        reason = str(error).strip().partition("\n")[0] or f"JAX_PLATFORMS is {os.environ.get('JAX_PLATFORMS')!r}"
        raise UsageError(f"device {device!r} was asked for and JAX has none ({reason}); use --device cpu") from None
    if kind == "auto" and found[0].platform == "cpu" and given_gpu() is not None and has_cuda_plugin():
        # Its peers may well compute on their GPUs: this rank must not become the slow one without a word.
        raise UsageError(f"this rank has GPU {given_gpu()}, which JAX can't use; see nvidia-smi, or use --device cpu")
    chosen: list[Any] = []
    for process in range(jax.process_count()):
        own = [each for each in found if each.process_index == process]
        if index:
            if int(index) >= len(own):
                raise UsageError(f"device {device!r} is not there; JAX sees {len(own)} GPU(s), from cuda:0 on")
            own = [own[int(index)]]
        if num_devices > len(own):
            raise UsageError(
                f"num_devices {num_devices} is more than the {len(own)} {_noun(found[0], len(own))} that JAX has in "
                f"{'this process' if jax.process_count() == 1 else f'process {process}'}; use --num_devices 0 for all"
                f"{_how_to_get_more(found[0])}"
            )
        chosen += own[: num_devices or None]
    return chosen


def _how_to_get_more(device: Any) -> str:
    if device.platform != "cpu":
        return ""
    return ", or start JAX with more (it had started before: set JAX_NUM_CPU_DEVICES)"


def _noun(device: Any, count: int) -> str:
    noun = "CPU device" if device.platform == "cpu" else "GPU"
    return f"{noun}{'s' if count != 1 else ''}"
