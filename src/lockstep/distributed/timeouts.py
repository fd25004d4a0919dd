"""Times that variables of the environment set."""

import os
from collections.abc import Mapping

from lockstep.core.errors import UsageError

TIMEOUT_S = 600.0
"""How long an exchange between ranks may take; LOCKSTEP_TIMEOUT_S changes it."""
JOIN_TIMEOUT_S = 120.0
"""How long ranks wait for one another at the start; LOCKSTEP_JOIN_TIMEOUT_S changes it."""

_TOO_LONG_S = 1e7


def seconds(name: str, default_s: float, environment: Mapping[str, str] = os.environ) -> float:
    """Return how many seconds a variable sets.

    Args:
        name: of the variable.
        default_s: where it is not set.
        environment: where it is looked up.

    Raises:
        UsageError: it is no number of seconds above 0, or one that no timer takes.
    """
    text = environment.get(name, str(default_s))
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0.0 < found < _TOO_LONG_S:
        raise UsageError(f"{name} is {text!r}; give a number of seconds above 0")
    return found


def alone_s(environment: Mapping[str, str] = os.environ) -> float:
    """Return how many seconds one rank may work while the others wait for it in an exchange, and not for ever.

    Raises:
        UsageError: LOCKSTEP_TIMEOUT_S is no number of seconds.
    """
    return 0.5 * seconds("LOCKSTEP_TIMEOUT_S", TIMEOUT_S, environment)
