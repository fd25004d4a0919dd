"""What a run ran on: versions, git state, hardware. Nothing here imports torch, JAX or MuJoCo or touches CUDA."""

import contextlib
import importlib.metadata
import math
import os
import platform
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from lockstep.core.gpu_mask import find_gpus

_DISTRIBUTIONS = {
    "lockstep": "lockstep-rl",
    "torch": "torch",
    "jax": "jax",
    "mujoco": "mujoco",
    "numpy": "numpy",
}
_LIBRARIES = (
    "rsl-rl-lib",
    "rl-games",
    "skrl",
    "stable-baselines3",
    "gymnasium",
    "envpool",
    "brax",
    "gymnax",
    "playground",
)
"""Other people's learners and envs, named where they are installed."""


def describe() -> dict[str, Any]:
    """Return versions, git state, host and hardware, ready for ``run.json``; what can't be found out is None."""
    return {
        "command": sys.argv,
        "versions": {"python": platform.python_version(), **versions()},
        "git": {"lockstep": git_of_lockstep(), "working_folder": git_state(Path.cwd())},
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "hardware": {
            "cpu": _cpu_model(),
            "num_cores": os.cpu_count(),
            "num_allowed_cores": allowed_cores(),
            "memory_bytes": psutil.virtual_memory().total,
            "gpus": gpus(),
        },
    }


def versions() -> dict[str, str | None]:
    """Return the installed version of each package that shapes a result.

    None stands for one that is not installed; learners and envs of others are left out then.
    """
    found = {name: _version(distribution) for name, distribution in _DISTRIBUTIONS.items()}
    others = {name: _version(name) for name in _LIBRARIES}
    return found | {name: version for name, version in others.items() if version is not None}


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def git_state(folder: Path) -> dict[str, Any] | None:
    """Return ``{"commit": str, "dirty": bool}`` of the checkout around ``folder``, None if there is none.

    Dirty means that a file known to git differs from the commit; untracked files do not count.
    """
    commit = _git(folder, "rev-parse", "--verify", "HEAD")
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return None if commit is None or changes is None else {"commit": commit, "dirty": bool(changes)}


def gpus() -> list[dict[str, Any]]:
    """Return name, UUID, memory (bytes) and driver of every NVIDIA GPU of the machine, asked through NVML."""
    return [
        {"name": gpu.name, "uuid": gpu.uuid, "memory_bytes": gpu.memory_bytes or None, "driver": gpu.driver}
        for gpu in find_gpus()
    ]


def allowed_cores(
    cgroup_root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup"), pid: int = 0
) -> int:
    """Return how many cores a process may keep busy: CPU affinity and cgroup quota, rounded up, at least 1.

    Args:
        cgroup_root: where control groups are.
        membership: says which of them this process is in.
        pid: of a process in the same groups; 0 for this one.

    Raises:
        OSError: there is no such process.
    """
    affinity = len(os.sched_getaffinity(pid)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [quota for group in _cpu_groups(cgroup_root, membership) if (quota := _cpu_quota(group)) is not None]
    return max(1, min([affinity, *(math.ceil(quota) for quota in quotas)]))


def _cpu_groups(root: Path, membership: Path) -> list[Path]:
    """Return the folders of every cgroup above this process that may limit its CPU time, versions 1 and 2."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return []
    groups: list[Path] = []
    for line in lines:  # version 2: "0::/path", version 1: "4:cpu,cpuacct:/path"
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            tops = [root, root / "unified"]
        elif "cpu" in controllers.split(","):
            tops = [root / "cpu", root / controllers]
        else:
            continue
        for top in tops:
            # Inside a container the path may be the host's, which is not visible there; its top is, and counts.
            group = top / path.lstrip("/")
            groups += [folder for folder in (group, *group.parents) if folder.is_relative_to(top)]
    return groups


def _cpu_quota(group: Path) -> float | None:
    """Return the CPU quota of one cgroup in cores, None for no limit."""
    try:
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota = (group / "cpu.cfs_quota_us").read_text().strip()
            period = (group / "cpu.cfs_period_us").read_text().strip()
        return float(quota) / float(period) if quota not in ("max", "-1") else None
    except (OSError, ValueError):
        return None


def _cpu_model() -> str | None:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine() or None


def git_of_lockstep() -> dict[str, Any] | None:
    """Return ``git_state`` of the checkout that lockstep runs from; None if it was installed elsewhere."""
    source = Path(__file__).resolve()
    # An installed copy may lie inside somebody else's checkout, whose commit would say nothing about lockstep.
    return git_state(source.parent) if _git(source.parent, "ls-files", "--", source.name) else None


def _git(folder: Path, *arguments: str) -> str | None:
    """Return what git prints, None if there is no git, no repository, no such object, or no answer in 2 s."""
    try:
        answer = subprocess.run(
            ["git", "--no-optional-locks", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=2,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None
