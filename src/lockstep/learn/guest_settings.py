"""What adapters of other people's learners check alike: names below ``library``, and settings of ``agent``."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from lockstep.core.config import show
from lockstep.core.errors import UsageError, nearest
from lockstep.learn.agent_config import AgentConfig


def require_known(where: str, given: Mapping[str, Any], known: Collection[str], whose: str) -> None:
    """Check the names of some settings of a library.

    Args:
        where: they stand, such as ``library.config``.
        given: settings by name.
        known: the names that there are.
        whose: settings they are, in words.

    Raises:
        UsageError: a name is unknown; with the nearest that is known.
    """
    for name, value in given.items():
        if name not in known:
            raise UsageError(f"{where}.{name} {show(value)} is no setting of {whose}{nearest(name, sorted(known))}")


def require_unchanged(agent: AgentConfig, names: Iterable[str], rl_library: str) -> None:
    """Raise UsageError if a setting that the library has no counterpart for is not at its default."""
    for name in names:
        value = getattr(agent, name)
        if value != type(agent).model_fields[name].default:
            raise UsageError(f"agent.{name} {value} is not available with rl_library {rl_library}; leave it out")
