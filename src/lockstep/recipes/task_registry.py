"""Tasks by name: those registered here, the envs of suites, and what installed packages bring along."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib.metadata import EntryPoint

from lockstep.core.errors import UsageError, in_one_line, nearest
from lockstep.core.plugins import package_of, registered, the_only_one
from lockstep.core.registry import Registry, load
from lockstep.recipes.entries import TaskEntry
from lockstep.recipes.suites import SUITES, guest_entry, suite_of

GROUP = "lockstep.tasks"
"""Entry points: a task's name to the import string of its ``TaskEntry``, or of a function that returns it."""


class TaskRegistry(Registry[TaskEntry]):
    """What is registered here comes first, then the suites; packages are looked through last, and loaded when used."""

    def get(self, name: str) -> TaskEntry:
        """Return the task of that name.

        Raises:
            UsageError: there is none, with the nearest name; or it can't be had here, with the reason.
        """
        if name in self._entries:
            return self._entries[name]
        if suite_of(name) is not None:
            return guest_entry(name)
        entry_point = the_only_one(GROUP, self._kind, name) if isinstance(name, str) else None
        if entry_point is not None:
            return _load_entry(entry_point)
        examples = [suite.example for suite in map(SUITES.get, SUITES)]
        guess = nearest(str(name), [*self, *examples])
        raise UsageError(
            f"unknown {self._kind} {name!r}{guess} (known: {', '.join(self)}; and envs of others by prefix, such as "
            f"{', '.join(examples)})"
        )

    def __contains__(self, name: object) -> bool:
        """Return whether a name is one of a task; what a library has under a suite's prefix is not looked up."""
        return name in self._entries or suite_of(name) is not None or name in registered(GROUP)

    def __iter__(self) -> Iterator[str]:
        """Yield the names that can be listed: those registered here, then those of packages, loaded or not."""
        yield from self._entries
        yield from (name for name in registered(GROUP) if name not in self._entries and suite_of(name) is None)

    def origin(self, name: str) -> str:
        """Return a task's name with the package that registers it, as messages have it."""
        entry_point = None if name in self._entries else the_only_one(GROUP, self._kind, name)
        return f"{self._kind} '{name}'" + ("" if entry_point is None else f" of {package_of(entry_point)}")

    def hidden(self) -> Iterator[str]:
        """Yield, in words, what packages register in vain, since lockstep has the name itself."""
        for name, several in registered(GROUP).items():
            if name in self._entries or suite_of(name) is not None:
                packages = " and ".join(sorted({package_of(entry_point) for entry_point in several}))
                yield f"task '{name}' of {packages} is not to be had, since lockstep has one of that name; rename it"


@cache
def _load_entry(entry_point: EntryPoint) -> TaskEntry:
    what = f"task '{entry_point.name}' of {package_of(entry_point)}"
    try:
        found = load(entry_point.value)
        entry = found if isinstance(found, TaskEntry) else found()
    except UsageError as error:
        raise UsageError(f"{what} can't be loaded: {error}") from error
    except (Exception, SystemExit) as error:
        raise UsageError(f"{what} can't be loaded: {in_one_line(error)}; mend or uninstall that package") from error
    if not isinstance(entry, TaskEntry):
        raise UsageError(f"{what} is of type {type(entry).__name__}, not TaskEntry; mend the package's entry point")
    if entry.name != entry_point.name:
        raise UsageError(f"{what} calls itself {entry.name!r}; give its entry point that name")
    return entry
