"""What adapters of other people's learners check alike: names and values below ``library``, settings of ``agent``."""

import inspect
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from lockstep.core.config import show
from lockstep.core.errors import LockstepError, RunError, UsageError, in_one_line, nearest
from lockstep.learn.agent_config import AgentConfig
from lockstep.learn.config import TrainConfig
from lockstep.learn.observer import nonfinite_in_words

MOST = 2**31 - 1
"""The largest count."""
_LARGE = 1e9
_WIDEST = 2**16


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


# --- values ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Allowed:
    """What a setting of a library may be."""

    words: str
    """As it stands after "must be"."""
    accepts: Callable[[Any], bool]


Rules = Mapping[str, Any]
"""By a setting's name an ``Allowed``, or ``Rules`` for a group of settings."""


def number(low: float = -_LARGE, high: float = _LARGE) -> Allowed:
    """Return what takes a number between two, both of them included."""
    words = "a number" if low == -_LARGE and high == _LARGE else f"a number from {low:g} to {high:g}"
    return Allowed(words, lambda value: _is_number(value) and low <= value <= high)


def count(low: int = 1, high: int = MOST, reason: str = "") -> Allowed:
    """Return what takes a whole number between two, both included; ``reason`` says where the bounds are from."""
    words = f"a whole number from {low} to {high}{reason}"
    return Allowed(words, lambda value: _is_whole(value) and low <= value <= high)


def widths(shortest: int = 0, special: int = 1) -> Allowed:
    """Return what takes a list of so many widths of layers or more; ``special`` is a number that stands for one."""
    words = f"a list of whole numbers from 1 to {_WIDEST} such as [64, 64]"
    words += "" if special == 1 else f", or {special}"
    return Allowed(words, lambda value: _are(value, lambda each: WIDTH.accepts(each) or each == special, shortest))


def one_of(*choices: str, any_case: bool = False) -> Allowed:
    """Return what takes one of some texts, in capital letters too where these are the same to the library."""
    *others, last = choices
    return Allowed(
        f"{', '.join(others)} or {last}" if others else last,
        lambda value: isinstance(value, str) and (value.lower() if any_case else value) in choices,
    )


def either(*kinds: Allowed) -> Allowed:
    """Return what takes whatever one of several takes."""
    words = " or ".join(kind.words for kind in kinds)
    return Allowed(words, lambda value: any(kind.accepts(value) for kind in kinds))


def interval(low: float = -_LARGE, high: float = _LARGE) -> Allowed:
    """Return what takes a list of two numbers, the first the smaller one."""
    bounds = number(low, high)
    return Allowed(
        f"a list of two numbers from {low:g} to {high:g}, the smaller one first",
        lambda value: _are(value, bounds.accepts) and len(value) == 2 and value[0] < value[1],
    )


WIDTH = count(1, _WIDEST)
FLAG = Allowed("true or false", lambda value: isinstance(value, bool))
TEXT = Allowed("text", lambda value: isinstance(value, str))
TEXTS = Allowed("a list of names", lambda value: _are(value, TEXT.accepts))
MAPPING = Allowed("a mapping", lambda value: isinstance(value, Mapping))
NOTHING = Allowed("none", lambda value: value is None)
ANYTHING = Allowed("anything", lambda value: True)
NOT_NEGATIVE = number(0)
SHARE = number(0, 1)


def like(default: Any) -> Allowed:
    """Return what takes values of the kind of a default, with None as much as the default says of it: anything."""
    if isinstance(default, bool):
        return FLAG
    if isinstance(default, int):
        return count(1 if default > 0 else 0) if default >= 0 else number()
    if isinstance(default, float):
        return NOT_NEGATIVE if default > 0.0 else number()
    if isinstance(default, str):
        return TEXT
    return MAPPING if isinstance(default, Mapping) else ANYTHING


def rules_of(kind: Callable[..., Any]) -> dict[str, Allowed]:
    """Return what the arguments of a function or class may be, by their defaults."""
    found = {}
    for name, parameter in inspect.signature(kind).parameters.items():
        default = parameter.default
        if _is_whole(default) and "float" in str(parameter.annotation):
            default = float(default)
        found[name] = like(default)
    return found


def require_values(where: str, given: Mapping[str, Any], rules: Rules) -> None:
    """Check the values of some settings of a library.

    Args:
        where: they stand, such as ``library.config``.
        given: settings by name.
        rules: what they may be. A setting without a rule may be anything, but no number within it infinite, NaN or
            beyond what a float32 holds; where there are ``Rules``, None stands for a group that has nothing.

    Raises:
        UsageError: a value is not allowed; with its name, and what is.
    """
    for name, value in given.items():
        rule, dotted = rules.get(name, ANYTHING), f"{where}.{name}"
        if isinstance(rule, Mapping):
            if not isinstance(value, Mapping | None):
                raise UsageError(f"{dotted} must be a mapping, not {show(value)}")
            require_values(dotted, value or {}, rule)
        elif not rule.accepts(value):
            raise UsageError(f"{dotted} must be {rule.words}, not {show(value)}")
        else:
            _require_finite(dotted, value)


def _require_finite(where: str, value: Any) -> None:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            _require_finite(f"{where}.{name}", inner)
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            _require_finite(f"{where}[{index}]", inner)
    elif isinstance(value, int | float) and not abs(value) <= 3e38:
        raise UsageError(f"{where} must be a number that is finite, of 3e38 at most, not {show(value)}")


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return _is_whole(value) or (isinstance(value, float) and math.isfinite(value))


def _are(values: Any, accepts: Callable[[Any], bool], shortest: int = 0) -> bool:
    return isinstance(values, list | tuple) and len(values) >= shortest and all(map(accepts, values))


# --- what only the library itself can tell ---------------------------------------------------------------------------


@contextmanager
def refused_in_words(config: TrainConfig) -> Iterator[None]:
    """Return the context in which a learner is made: what its library raises of ``config.library`` becomes one line.

    Without settings of the library, it is none of these that was wrong; nor is it where memory or a device is lacking,
    or a module or file.

    Raises:
        UsageError: whatever else is raised; that is its cause.
    """
    try:
        yield
    except (LockstepError, MemoryError, ImportError, OSError):
        raise
    except Exception as error:
        if not config.library or _is_of_machine(error):
            raise
        names = ", ".join(f"library.{name}" for name in config.library)
        raise UsageError(
            f"rl_library {config.rl_library} does not take its settings ({names}): {in_one_line(error)}"
        ) from error


def _is_of_machine(error: Exception) -> bool:
    """Return whether an error of a framework tells of memory, of a device or of other ranks."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if kinds & {"OutOfMemoryError", "AcceleratorError", "DistError"}:
        return True
    return "allocate memory" in str(error) or str(error).startswith("RESOURCE_EXHAUSTED")


@contextmanager
def breakdown_in_words(iteration: int, first_nonfinite: Callable[[], str], rank: int) -> Iterator[None]:
    """Return the context in which a library collects and learns: what it raises over numbers that are not finite.

    The state is not saved: other ranks may be in the middle of something else, and saving takes all of them.

    Args:
        iteration: that is running, counted from 1.
        first_nonfinite: returns what of this rank is not finite any more, "" if all is.
        rank: this one.

    Raises:
        RunError: something was raised, and a number is not finite; that is the cause of it, and not of the error.
    """
    try:
        yield
    except LockstepError:
        raise
    except Exception as error:
        try:
            found = first_nonfinite()
        except Exception:  # of a device that answers no more: the first error says why
            found = ""
        if not found:
            raise
        cause = f"{found} on rank {rank}, of which the library says {in_one_line(error)}"
        raise RunError(nonfinite_in_words(iteration, cause, "")) from error
