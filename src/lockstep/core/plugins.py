"""What other installed packages register with lockstep, by entry points; nothing of theirs is imported to list it."""

from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType

from lockstep.core.errors import UsageError


@cache
def registered(group: str) -> Mapping[str, tuple[EntryPoint, ...]]:
    """Return the entry points of a group by name; several of one name are of several packages."""
    found: dict[str, dict[str, EntryPoint]] = {}
    for entry_point in entry_points(group=group):
        # A package that is on the path twice, such as an editable install and its wheel, registers nothing twice.
        found.setdefault(entry_point.name, {}).setdefault(f"{package_of(entry_point)} {entry_point.value}", entry_point)
    return MappingProxyType({name: tuple(several.values()) for name, several in found.items()})


def the_only_one(group: str, kind: str, name: str) -> EntryPoint | None:
    """Return the entry point of that name; None if there is none.

    Args:
        group: of entry points, such as ``lockstep.tasks``.
        kind: what one of them is called in messages, such as ``task``.
        name: of the entry point.

    Raises:
        UsageError: several packages register the name; they are named.
    """
    several = registered(group).get(name, ())
    if len(several) > 1:
        packages = " and ".join(sorted({package_of(entry_point) for entry_point in several}))
        raise UsageError(f"{kind} '{name}' is registered by {packages}; uninstall all but one of them")
    return several[0] if several else None


def package_of(entry_point: EntryPoint) -> str:
    """Return the name of the distribution that an entry point is of."""
    return entry_point.dist.name if entry_point.dist is not None else "a package without a name"
