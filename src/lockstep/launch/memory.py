"""Whether the kernel has ended processes for want of memory: it kills them as anybody would, and keeps count."""

import contextlib
from pathlib import Path


def num_oom_kills(groups: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return how many processes of this one's control group were ended for want of memory; None if nobody counts.

    Args:
        groups: the groups of this process, a line each: ``number:controllers:path``.
        mount: where the control groups are.
    """
    for path in _counters(groups, mount):
        with contextlib.suppress(OSError, ValueError):
            for line in path.read_text().splitlines():
                name, _, count = line.partition(" ")
                if name == "oom_kill":
                    return int(count)
    return None


def _counters(groups: Path, mount: Path) -> list[Path]:
    """Return the files that may hold the count, of version 2 first; in a container the group may be the mount."""
    found: list[Path] = []
    with contextlib.suppress(OSError, ValueError):
        for line in groups.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                found = [mount / path.lstrip("/") / "memory.events", mount / "memory.events", *found]
            elif "memory" in controllers.split(","):
                found += [
                    mount / "memory" / path.lstrip("/") / "memory.oom_control",
                    mount / "memory/memory.oom_control",
                ]
    return found
