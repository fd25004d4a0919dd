"""A training that waits where a test wants it: copied as ``sitecustomize.py`` to where its ranks look for modules.

The file ``hold`` of the working folder has the number of iterations after which all ranks wait. They go on when it has
a larger one, and when they are asked to stop.
"""

import importlib.util
import os
import sys
import time
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

MODULES = ("lockstep.learn.torch.training", "lockstep.learn.jax.training")


class Plant(MetaPathFinder):
    """Waits for the module that iterates."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in MODULES:
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
        iterate = module.Training.iterate

        def held(training: Any, *arguments: Callable[[], object]) -> Any:
            asked = arguments[0] if arguments else lambda: None
            while training.iteration >= int(Path("hold").read_text()) and asked() is None:
                time.sleep(0.02)
            return iterate(training, *arguments)

        module.Training.iterate = held


if os.path.exists("hold"):  # noqa: PTH110 - nothing more than needed in every Python that starts
    sys.meta_path.insert(0, Plant())
