"""From the words of a command line to values by setting name. What a flag takes follows from its setting's type.

Nothing is validated here: values stay text (or lists of text), and ``lockstep.core.config.merge`` does the rest, for
flags just as for overlay files.
"""

import re
import types
from collections import deque
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from lockstep.core.config import show
from lockstep.core.errors import UsageError

_FLAG = re.compile(r"-(?!$|[\d.]|(inf|infinity|nan)\b)", re.IGNORECASE)  # -1, -.5, -1,1 and -inf are values
_TRUE_WORDS = ("true", "yes", "on", "1", "t", "y")  # those that pydantic knows
_SEQUENCES = (tuple, list, frozenset, set)
_SWITCH_WORDS = (*_TRUE_WORDS, "false", "no", "off", "0", "f", "n")


class Takes(Enum):
    """How many of the words after a flag belong to it."""

    ONE = "one value"
    SWITCH = "true or false, or nothing for true"
    MANY = "one or more values, as 64,64 or [64,64] or 64 64"
    OPTIONAL = "one value or none"
    UNKNOWN = "whatever follows"


@dataclass(frozen=True)
class Arguments:
    """A command line taken apart: ``flags`` maps a name with underscores to the words it was given."""

    positionals: list[str] = field(default_factory=list)
    flags: dict[str, list[str]] = field(default_factory=dict)

    def last(self, name: str) -> str | None:
        """Return the word given to a flag, or None if the flag or the word is absent."""
        words = self.flags.get(name)
        return words[-1] if words else None


def parse(
    argv: Sequence[str],
    lookup: Callable[[str], Takes],
    repeatable: Container[str] = (),
    names: Container[str] = (),
) -> Arguments:
    """Take a command line apart.

    ``lookup`` says what a flag takes and raises UsageError for an unknown one. A word in ``names`` (of tasks) is
    never taken by a flag whose value may be left out.

    Raises:
        UsageError: a flag given twice, or without its value.
    """
    arguments = Arguments()
    words = deque(argv)
    while words:
        word = words.popleft()
        name = flag_name(word)
        if name is None:
            arguments.positionals.append(word)
            continue
        _, equals, value = word.partition("=")
        takes = lookup(name)
        if name in arguments.flags and name not in repeatable:
            raise UsageError(f"--{name} is given twice; keep one")
        values = [value] if equals else []
        while not equals and words and _belongs(words[0], takes, len(values), names):
            values.append(words.popleft())
        if not values and takes in (Takes.ONE, Takes.MANY):
            raise UsageError(f"--{name} needs a value{_mend_for_dash(name, words)}")
        arguments.flags.setdefault(name, []).extend(values)
    return arguments


def take_out(argv: Sequence[str], own: Mapping[str, Takes], final: str) -> tuple[list[str], list[str], list[str]]:
    """Part a command line in three, each in its order: the flags in ``own`` with their values, what is left, and
    every word after the value of the flag ``final``, whatever it looks like.
    """
    taken: list[str] = []
    others: list[str] = []
    words = deque(argv)
    while words:
        word = words.popleft()
        name = flag_name(word)
        if name is None or name not in own:
            others.append(word)
            continue
        taken.append(word)
        if "=" not in word and words and _belongs(words[0], own[name], 0, ()):
            taken.append(words.popleft())
        if name == final:
            break
    return taken, others, list(words)


def flag_name(word: str) -> str | None:
    """Return the name of the flag that a word is, with underscores, or None if it is none."""
    if not _FLAG.match(word):
        return None
    spelled = word.partition("=")[0]
    return spelled.removeprefix("--").replace("-", "_") if spelled.startswith("--") else spelled


def takes_of(setting: FieldInfo) -> Takes:
    """Return what the flag of a setting takes."""
    kinds = {_kind(member) for member in _members(setting.annotation)}
    if kinds & set(_SEQUENCES):
        return Takes.MANY
    return Takes.SWITCH if bool in kinds else Takes.ONE


def is_inside_mapping(name: str, known: Mapping[str, FieldInfo]) -> bool:
    """Return whether a dotted name lies in one of the settings that are mappings of whatever names, as ``library``."""
    parts = name.split(".")
    outer = (".".join(parts[:end]) for end in range(1, len(parts)))
    return all(parts) and any(is_mapping(known[each]) for each in outer if each in known)


def is_mapping(setting: FieldInfo) -> bool:
    """Return whether a setting is a mapping of whatever names."""
    return any(_kind(member) is dict for member in _members(setting.annotation))


def value_of(setting: FieldInfo, words: Sequence[str]) -> Any:
    """Return the words given to a setting's flag as a value for ``merge``: text, a list of texts, None or a choice."""
    members = _members(setting.annotation)
    text = " ".join(words)
    if type(None) in members and text.lower() in ("none", "null"):
        return None
    takes = takes_of(setting)
    if takes is Takes.MANY:
        parts = [part for part in re.split(r"[,\s]+", text.strip().strip("[]()")) if part]
        takes_one_too = any(_kind(member) not in (*_SEQUENCES, type(None)) for member in members)
        return parts[0] if takes_one_too and len(parts) == 1 else parts
    if takes is Takes.SWITCH and not words:
        return "true"
    choices = [choice for member in members if get_origin(member) is Literal for choice in get_args(member)]
    return next((choice for choice in choices if str(choice) == text), text)


def asks_for_help(argv: Sequence[str]) -> bool:
    """Return whether the user wants help, wherever the flag stands."""
    return "--help" in argv or "-h" in argv


def number(name: str, words: Sequence[str], minimum: int, maximum: int = 2**63 - 1) -> int:
    """Return a whole number given to a flag.

    Raises:
        UsageError: it is no whole number, or outside the limits.
    """
    text = words[-1] if words else ""
    try:
        value = int(text)
    except ValueError:
        raise UsageError(f"{name} must be a whole number, not {show(text)}") from None
    if value < minimum:
        raise UsageError(f"{name} must be at least {minimum}, not {value}")
    if value > maximum:
        raise UsageError(f"{name} must be at most {maximum}, not {show(value)}")
    return value


def path_of(arguments: Arguments, name: str) -> Path | None:
    """Return the path given to a flag, or None if it is absent or bare.

    Raises:
        UsageError: it is empty, or no path at all.
    """
    text = arguments.last(name)
    if text is None:
        return None
    if not text or "\0" in text:
        raise UsageError(f"--{name} needs a path, not {text!r}")
    return Path(text)


def switched_on(arguments: Arguments, name: str) -> bool:
    """Return whether a switch is given, bare or with a word for true.

    Raises:
        UsageError: its word means neither true nor false.
    """
    words = arguments.flags.get(name)
    if words and words[0].lower() not in _SWITCH_WORDS:
        raise UsageError(f"{name} must be true or false, not {show(words[0])}")
    return words is not None and (not words or words[0].lower() in _TRUE_WORDS)


def nested(dotted: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``{"agent": {"gamma": 1}}`` for ``{"agent.gamma": 1}``."""
    result: dict[str, Any] = {}
    for name, value in dotted.items():
        *outer, last = name.split(".")
        section = result
        for part in outer:
            section = section.setdefault(part, {})
        section[last] = value
    return result


def _belongs(word: str, takes: Takes, num_taken: int, names: Container[str]) -> bool:
    if _FLAG.match(word):
        return False
    if takes is Takes.UNKNOWN:
        return word not in names
    if num_taken > 0:
        return takes is Takes.MANY and re.match(r"[-+\d.]", word) is not None
    if takes is Takes.SWITCH:
        return word.lower() in _SWITCH_WORDS
    return takes is not Takes.OPTIONAL or word not in names


def _mend_for_dash(name: str, words: Sequence[str]) -> str:
    if not words or words[0].startswith("--"):
        return ""
    return f"; one that begins with '-' is written {f'--{name}={words[0]}'!r}"


def _kind(member: Any) -> Any:
    """Return ``tuple`` for ``tuple[int, ...]`` and ``int`` for ``Annotated[int, ...]``."""
    origin = get_origin(member)
    return get_args(member)[0] if origin is Annotated else origin or member


def _members(annotation: Any) -> list[Any]:
    """Return the alternatives of a union type, or the type alone."""
    if get_origin(annotation) in (Union, types.UnionType):
        return [inner for member in get_args(annotation) for inner in _members(member)]
    return [annotation]
