"""Typed configs: the base class, merging settings from any source into one, and the way to YAML and back.

Overlay files and command-line flags go the same way: both become nested mappings, ``combine`` puts them over one
another, and ``merge`` lays the result over a typed config, which validates it. Whatever is wrong with a value, the
user reads one line: which setting, what is allowed, the value seen.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo

from lockstep.core.errors import UsageError, nearest

MAX_OVERLAY_BYTES = 256 * 1024  # a config has a few dozen lines; a wrong file should not be parsed for minutes


class Config(BaseModel):
    """A typed, immutable set of settings; unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


ConfigT = TypeVar("ConfigT", bound=Config)


def settings(config: Config) -> dict[str, FieldInfo]:
    """Return every setting by its dotted name, in order; a group appears as the settings it holds."""
    found: dict[str, FieldInfo] = {}
    for name, field in type(config).model_fields.items():
        value = getattr(config, name)
        if isinstance(value, Config):
            found.update({f"{name}.{inner}": inner_field for inner, inner_field in settings(value).items()})
        else:
            found[name] = field
    return found


def groups(config: Config) -> dict[str, Config]:
    """Return every group of settings, such as ``agent``, by its dotted name."""
    found: dict[str, Config] = {}
    for name in type(config).model_fields:
        value = getattr(config, name)
        if isinstance(value, Config):
            found[name] = value
            found.update({f"{name}.{inner}": group for inner, group in groups(value).items()})
    return found


def combine(lower: Mapping[str, Any], upper: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``lower`` with ``upper`` laid over it, mapping by mapping; an empty (None) section changes nothing."""
    combined = dict(lower)
    for name, value in upper.items():
        below = combined.get(name)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            combined[name] = combine(below, value)
        elif not (isinstance(below, Mapping) and value is None):
            combined[name] = value
    return combined


def merge(config: ConfigT, overrides: Mapping[str, Any], inside: str = "") -> ConfigT:
    """Return ``config`` with ``overrides`` (nested by group) laid over it, validated.

    A group keeps the type of its current value, so the settings of a task's own ``EnvConfig`` stay known.

    Args:
        config: what is below.
        overrides: what is laid over it.
        inside: the group that ``config`` is, such as ``agent``, by which messages name its settings.

    Raises:
        UsageError: an unknown setting (with the nearest known one) or a value that is not allowed.
    """
    prefix = f"{inside}." if inside else ""
    _check_names(config, overrides, prefix, [f"{prefix}{name}" for name in (*settings(config), *groups(config))])
    return _merged(config, overrides, prefix)


def check_names(config: Config, overrides: Mapping[str, Any]) -> None:
    """Raise UsageError, with the nearest known one, if ``overrides`` has a name that ``config`` does not."""
    _check_names(config, overrides, "", [*settings(config), *groups(config)])


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'agent.gamma'?"`` for ``gamma`` or ``agent.gama``, or ``""`` when none is close."""
    known = list(known)
    namesakes = [candidate for candidate in known if _last_part(candidate) == _last_part(name)]
    if namesakes:
        return f"; did you mean {' or '.join(repr(candidate) for candidate in namesakes)}?"
    return nearest(name, known)


def show(value: object) -> str:
    """Return a value as it stands in a message: on one line and not too long."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to write out integers of more than 4300 digits
        return "a number of thousands of digits"
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"


def to_yaml(config: Config) -> str:
    """Return the whole config as YAML that ``load_overlay`` and ``merge`` turn into an equal config."""
    values = config.model_dump(mode="json", serialize_as_any=True)
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def load_overlay(path: str | Path) -> dict[str, Any]:
    """Return the nested settings of a YAML file; an empty file has none.

    Plain YAML with unique text keys; anchors, aliases and tags of other types are refused. A number such as ``1e-5``
    is a number, as in YAML 1.2.

    Raises:
        UsageError: no such file, too big, not UTF-8, not YAML, or not a mapping; the line names the file and place.
    """
    source = f"config file {str(path)!r}"
    text = _read_text(path, source)
    try:
        values = yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f" line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise UsageError(f"{source}{place}: {_one_line(error.problem or error.context or 'not YAML')}") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise UsageError(f"{source} line {line}: the character {error.character!r} is not allowed in YAML") from None
    except RecursionError:
        raise UsageError(f"{source}: nested too deeply to be a config") from None
    except (LookupError, AttributeError):  # from PyYAML's constructors, of what a tag such as !!bool is put before
        raise UsageError(f"{source}: a value does not fit the tag (!!...) before it; leave the tag out") from None
    except (ValueError, OverflowError, yaml.YAMLError) as error:  # PyYAML lets a malformed number through to int()
        raise UsageError(f"{source}: a value is not valid YAML: {_one_line(str(error))}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise UsageError(f"{source}: expected settings such as 'num_envs: 512', got {show(values)}")
    return values


def _check_names(config: Config, overrides: Mapping[str, Any], prefix: str, known: list[str]) -> None:
    for name, value in overrides.items():
        dotted = f"{prefix}{name}"
        if name in type(config).model_fields:
            current = getattr(config, name)
            if isinstance(current, Config) and isinstance(value, Mapping):
                _check_names(current, value, f"{dotted}.", known)
        elif dotted in known:
            group, _, setting = dotted.rpartition(".")
            raise UsageError(f"write {dotted!r} nested, as in {group}: {{{setting}: {show(value)}}}")
        else:
            raise UsageError(f"unknown setting {show(dotted)} with value {show(value)}{suggestion(dotted, known)}")


def _merged(config: ConfigT, overrides: Mapping[str, Any], prefix: str) -> ConfigT:
    values = {name: getattr(config, name) for name in type(config).model_fields}
    for name, value in overrides.items():
        dotted = f"{prefix}{name}"
        current = values[name]
        if isinstance(current, Config) and not isinstance(value, Config):
            values[name] = _merged(current, _section(dotted, value, current), f"{dotted}.")
        elif isinstance(current, Config) and not isinstance(value, type(current)):
            raise UsageError(f"{dotted} must be {type(current).__name__}, not {type(value).__name__}")
        elif isinstance(value, bool) and isinstance(current, int | float) and not isinstance(current, bool):
            raise UsageError(f"{dotted} must be a number, not {value!r}")  # pydantic would take true for 1
        else:
            values[name] = value
    try:
        return type(config).model_validate(values)
    except ValidationError as error:
        raise UsageError(_explain(error, prefix, config)) from None


def _section(dotted: str, value: object, current: Config) -> Mapping[str, Any]:
    if value is None:  # 'agent:' with every line below it commented out
        return {}
    if not isinstance(value, Mapping):
        first = next(iter(type(current).model_fields))
        raise UsageError(f"{dotted} is a group of settings such as {dotted}.{first}, not {show(value)}")
    return value


def _explain(error: ValidationError, prefix: str, config: Config) -> str:
    """Word the first of pydantic's errors as one line: the setting, what is allowed, the value seen."""
    first = error.errors(include_url=False)[0]
    location = first["loc"]
    name = prefix + (str(location[0]) if location else "")
    name += "".join(f"[{part}]" for part in location[1:] if isinstance(part, int))
    if first["type"] == "value_error":  # a validator of ours, which words the whole line itself
        message = _one_line(str(first["ctx"]["error"]))
        return f"{name}: {message}" if location else f"{prefix.rstrip('.')}{': ' if prefix else ''}{message}"
    if first["type"] in ("missing", "too_long", "tuple_type") and (count := _num_values(config, location[0])):
        example = yaml.safe_dump(list(getattr(config, str(location[0]))), default_flow_style=True).strip()
        return f"{prefix}{location[0]} must be a list of {count} such as {example}, not {show(first['input'])}"
    message = _one_line(first["msg"])
    allowed = re.sub(r", (unable to|got a) .*", "", message).removeprefix("Input should be ")
    if allowed == message:
        return f"{name}: {message}, but it is {show(first['input'])}"
    wording = {
        "a valid integer": "a whole number",
        "a valid number": "a number",
        "a valid boolean": "true or false",
        "a valid string": "text (in a YAML file, put it in quotes)",
        "a valid tuple": "a list such as [64, 64]",
    }
    return f"{name} must be {wording.get(allowed, allowed)}, not {show(first['input'])}"


def _num_values(config: Config, name: int | str) -> int | None:
    """Return how many values a setting has, such as the two ends of a range; None if that is not fixed."""
    kind = type(config).model_fields[str(name)].annotation
    return len(get_args(kind)) if get_origin(kind) is tuple and Ellipsis not in get_args(kind) else None


def parse_value(words: Sequence[str]) -> Any:
    """Return what the words of a flag are in YAML: a number, true or false, a list, else the text itself."""
    text = " ".join(words)
    try:
        return yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, OverflowError, RecursionError):
        return text


def _read_text(path: str | Path, source: str) -> str:
    try:
        with Path(path).open("rb") as file:
            content = file.read(MAX_OVERLAY_BYTES + 1)
        if len(content) > MAX_OVERLAY_BYTES:
            raise UsageError(f"{source}: larger than {MAX_OVERLAY_BYTES // 1024} KiB, so not a config")
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{source}: not UTF-8 text at byte {error.start}") from None
    except OSError as error:
        raise UsageError(f"{source}: {error.strerror or error}") from None
    except ValueError:
        raise UsageError(f"{source}: a path cannot contain a null character") from None


def _last_part(name: str) -> str:
    return name.lstrip("-").rpartition(".")[2]


def _one_line(text: str) -> str:
    return " ".join(text.split())


_LIST = "tag:yaml.org,2002:seq"


class _Loader(yaml.SafeLoader):
    """Safe YAML with unique text keys, without aliases (they can blow up) and without dates."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.composer.ComposerError(None, None, "aliases (*name) are not supported", mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.tag != "tag:yaml.org,2002:str":
                shown = show(key.value) if isinstance(key, yaml.ScalarNode) else "a list or mapping"
                raise yaml.constructor.ConstructorError(None, None, f"a key must be text, not {shown}", key.start_mark)
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{show(key.value)} is set twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Safe YAML that quotes every text which ``_Loader`` would read as something else."""


def _without(tag: str, resolvers: Mapping[str, list[Any]]) -> Iterator[tuple[str, list[Any]]]:
    for first_character, entries in resolvers.items():
        yield first_character, [entry for entry in entries if entry[0] != tag]


_Dumper.add_representer(list, lambda dumper, values: dumper.represent_sequence(_LIST, values, flow_style=True))

# YAML 1.1 asks for a dot and a signed exponent in floats; everybody writes 1e-5.
_FLOAT = re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$")
_Loader.yaml_implicit_resolvers = dict(_without("tag:yaml.org,2002:timestamp", _Loader.yaml_implicit_resolvers))
for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789"))
