"""Names that stand for things: a typed registry, and loading what an import string points to."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

from lockstep.core.errors import UsageError, nearest

T = TypeVar("T")


class Registry(Generic[T]):
    """Entries by name, in the order in which they were registered."""

    def __init__(self, kind: str) -> None:
        """``kind`` is what an entry is called in messages, such as ``task``."""
        self._kind = kind
        self._entries: dict[str, T] = {}

    def register(self, name: str, entry: T) -> T:
        """Add an entry and return it.

        Raises:
            UsageError: the name is taken.
        """
        if name in self._entries:
            raise UsageError(f"{self._kind} '{name}' is registered already; choose another name")
        self._entries[name] = entry
        return entry

    def get(self, name: str) -> T:
        """Return the entry of that name.

        Raises:
            UsageError: there is none; the line offers the nearest name and lists all.
        """
        if name not in self._entries:
            known = f"known: {', '.join(self._entries) or 'none'}"
            raise UsageError(f"unknown {self._kind} {name!r}{nearest(str(name), self._entries)} ({known})")
        return self._entries[name]

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def look_in_current_folder() -> None:
    """Let modules of the user's be found in the current folder, as ``python -m`` does and a command does not."""
    folder = str(Path.cwd())
    if not {"", folder} & set(sys.path):
        sys.path.insert(0, folder)


def load(import_string: str) -> Any:
    """Import ``package.module:name`` and return what it names.

    An exception raised by the module itself passes through, with its traceback.

    Raises:
        UsageError: not such a string, no such module, a package the module needs is missing, or no such name in it.
    """
    module_name, colon, name = import_string.partition(":")
    parts = module_name.split(".")
    if not colon or not name.isidentifier() or not all(part.isidentifier() for part in parts):
        raise UsageError(f"{import_string!r} is not of the form 'package.module:name'")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise UsageError(f"cannot import '{import_string}': there is no module '{error.name}'") from None
        raise UsageError(f"cannot import '{import_string}': it needs '{error.name}', which is not installed") from error
    if not hasattr(module, name):
        raise UsageError(f"module '{module_name}' has no '{name}'{nearest(name, vars(module))}")
    return getattr(module, name)
