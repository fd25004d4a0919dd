"""Where each rank runs and what it runs: noted in ``run.json``, and compared before anything is built."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.core.environment import git_of_lockstep, versions
from lockstep.core.errors import UsageError
from lockstep.distributed.topology import from_environment
from lockstep.recipes.libraries import library_of

if TYPE_CHECKING:
    from lockstep.learn.config import TrainConfig

_ALIKE = {
    "lockstep": "lockstep is version {}",
    "torch": "torch is version {}",
    "jax": "jax is version {}",
    "library": "{}",
    "git": "lockstep's checkout is at {}",
    "config": "",
}


def describe_rank(config: TrainConfig | None, device: object, framework: str = "torch") -> dict[str, Any]:
    """Return this process's place (rank, host, pid, device, cores) and what must be alike in all processes.

    A script of the user's own has no config that could be compared.
    """
    topology = from_environment()
    git = git_of_lockstep()
    installed = versions()
    return {
        "rank": topology.rank,
        "local_rank": topology.local_rank,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "device": str(device),
        "visible_gpus": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "cores": sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "working_folder": str(Path.cwd()),
        "lockstep": installed["lockstep"],
        framework: installed[framework],
        "library": None if config is None else _library_in_words(config, installed),
        # None also stands for a git that did not answer in time, which says nothing.
        "git": None if git is None else f"{git['commit']}{' with changes' if git['dirty'] else ''}",
        "config": {} if config is None else config.model_dump(mode="json"),
    }


def _library_in_words(config: TrainConfig, installed: dict[str, str | None]) -> str | None:
    """Return which version of another library learns here; None: lockstep's own does, or it is not installed."""
    distribution = library_of(config).distribution
    version = None if distribution is None else installed.get(distribution.name)
    return None if distribution is None or version is None else f"{distribution.name} is version {version}"


def compare(ranks: list[dict[str, Any]]) -> None:
    """Check that all ranks run the same code with the same config.

    Raises:
        UsageError: naming the first rank, and its host, that differs from rank 0. Every rank raises the same.
    """
    first = ranks[0]
    for other in ranks[1:]:
        for name, words in _ALIKE.items():
            if None not in (other.get(name), first.get(name)) and other[name] != first[name]:
                there, here = words.format(other[name]), first[name]
                if name == "config":
                    there, here = _first_difference(other[name], first[name])
                raise UsageError(
                    f"rank {other['rank']} on {other['host']} differs from rank 0 on {first['host']}: there {there}, "
                    f"here {here}; start all ranks with the same code and arguments",
                    shared=True,
                )


def _first_difference(there: dict[str, Any], here: dict[str, Any], prefix: str = "") -> tuple[str, Any]:
    """Return the first setting that differs, with its value there, and its value here."""
    for name in {**here, **there}:
        one, other = there.get(name), here.get(name)
        if isinstance(one, dict) and isinstance(other, dict) and one != other:
            return _first_difference(one, other, f"{prefix}{name}.")
        if one != other:
            return f"{prefix}{name} is {one!r}", repr(other)
    return "nothing", "nothing"
