"""Faults that a soak plants in a training: copied as ``sitecustomize.py`` to where its ranks look for modules first.

A rank takes the order ``planted.json`` (kind, rank, phase) of the folder SOAK_FOLDER when it comes to the phase, and
renames it to ``struck.json``: every order is carried out once. Until the file ``hurry`` is there each phase begins with
a pause, of another length every time, so that ranks wait for one another and there is time to strike.
"""

import importlib.util
import json
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

MODULE = "lockstep.learn.torch.training"
PAUSE_S = 0.02


class Plant(MetaPathFinder):
    """Waits for the module that iterates, and gives its two phases a pause and a fault."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        spec.loader = Planted(spec.loader)
        return spec


class Planted(Loader):
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        self._loader.exec_module(module)
        module.collect = disturbed(module.collect, "rollout")
        module.Ppo.update = disturbed(module.Ppo.update, "update")


def disturbed(work: Callable[..., Any], phase: str) -> Callable[..., Any]:
    folder, rank = Path(os.environ["SOAK_FOLDER"]), int(os.environ["RANK"])
    pauses = random.Random(os.getpid())

    def disturbed_work(*arguments: Any) -> Any:
        if not (folder / "hurry").exists():
            time.sleep(pauses.uniform(0.0, 2 * PAUSE_S))
        fault = taken(folder, rank, phase)
        if fault == "exception":
            raise LookupError("planted by the soak")
        result = work(*arguments)
        if fault == "nan":
            arguments[4].rewards[0, 0] = float("nan")  # of the rollout that was just collected
        return result

    return disturbed_work


def taken(folder: Path, rank: int, phase: str) -> str:
    """Return the kind of fault that this rank is to commit in this phase now; empty for none."""
    order = folder / "planted.json"
    try:
        planted = json.loads(order.read_text())
    except OSError:
        return ""
    if (planted["rank"], planted["phase"]) != (rank, phase):
        return ""
    order.rename(folder / "struck.json")
    return str(planted["kind"])


if "SOAK_FOLDER" in os.environ and "RANK" in os.environ:
    sys.meta_path.insert(0, Plant())
