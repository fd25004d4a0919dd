"""Machines with GPUs that are not there: as values, and as a pynvml for real processes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from lockstep.core.gpu_mask import Gpu

UUIDS = [
    "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6",
    "GPU-8a11b2c3-0000-4000-8000-000000000001",
    "GPU-1f2e3d4c-0000-4000-8000-000000000002",
    "GPU-5a5a5a5a-0000-4000-8000-000000000003",
]
MIG_UUIDS = ("MIG-11111111-aaaa-5000-8000-000000000000", "MIG-22222222-bbbb-5000-8000-000000000000")

_SET_BY_ISOLATION = ("CUDA_", "EGL_", "JAX_", "MUJOCO_", "QD_", "TI_", "TORCHINDUCTOR_", "TRITON_", "WARP_")

FAKE_PYNVML = f"""
from types import SimpleNamespace
UUIDS = {UUIDS!r}
NVML_DEVICE_MIG_ENABLE = 1
class NVMLError(Exception): pass
def nvmlInit(): pass
def nvmlShutdown(): pass
def nvmlSystemGetDriverVersion(): return "580.0"
def nvmlDeviceGetCount(): return len(UUIDS)
def nvmlDeviceGetHandleByIndex(index): return index
def nvmlDeviceGetPciInfo(handle): return SimpleNamespace(domain=0, bus=0x17 + 16 * handle, device=0)
def nvmlDeviceGetMemoryInfo(handle): return SimpleNamespace(total=1 << 34)
def nvmlDeviceGetUUID(handle): return UUIDS[handle]
def nvmlDeviceGetName(handle): return "NVIDIA H200"
def nvmlDeviceGetMigMode(handle): raise NVMLError
"""


def make_gpus(*names: str, mig_of: int | None = None) -> list[Gpu]:
    """Return GPUs of these names (four alike by default); the one with index ``mig_of`` is cut in two."""
    return [
        Gpu(
            index=index,
            uuid=UUIDS[index],
            name=name,
            pci_bus_id=f"0000:{0x17 + 16 * index:02x}:00.0",
            memory_bytes=1 << 34,
            driver="580.0",
            mig_uuids=MIG_UUIDS if index == mig_of else (),
        )
        for index, name in enumerate(names or ("NVIDIA H200",) * 4)
    ]


def rank_environment(folder: Path, **changes: str) -> dict[str, str]:
    """Return the variables of local rank 1 of 4 on the second of two nodes, with a cache in ``folder``."""
    variables = {
        "RANK": "5",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "8",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29511",
        "TORCHELASTIC_RUN_ID": "a",
        "XDG_CACHE_HOME": str(folder / "cache"),
    }
    return variables | changes


def with_fake_pynvml(folder: Path) -> dict[str, str]:
    """Return the variables that let a Python process find four GPUs through NVML."""
    (folder / "fakes").mkdir(exist_ok=True)
    (folder / "fakes" / "pynvml.py").write_text(FAKE_PYNVML)
    return {"PYTHONPATH": str(folder / "fakes")}


def python(code: str, variables: dict[str, str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run code in a new interpreter, with these variables on top of this process's own but for what isolation sets."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(_SET_BY_ISOLATION)}
    return subprocess.run(
        [sys.executable, "-c", code],
        env=own | variables,
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
        **options,
    )


def answer(code: str, variables: dict[str, str], **options: Any) -> Any:
    """Return the JSON that the last line of a process's output is."""
    result = python(code, variables, **options)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])
