"""``docs/benchmark-schema.md``, made from the schema: ``python -m lockstep.benchmark.schema_page > docs/...``."""

import sys
from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from lockstep.benchmark.scaling.result import SCALING_SCHEMA_VERSION, ScalingResult
from lockstep.benchmark.schema import SCHEMA_VERSION, SCOPE_VALUES, Bundle

_INTRODUCTION = f"""\
# The result bundle

Made from `lockstep.benchmark.schema` by `python -m lockstep.benchmark.schema_page`; a test holds the two together.

`lockstep benchmark startup`, `runtime` and `training`, each also `_multigpu`, write one JSON file, on global rank 0, of
what every rank has measured. This is version {SCHEMA_VERSION} of it. Files of another version, with unknown or missing
fields, or with a number that is none are refused by whatever reads bundles.

Times are wall times in seconds unless they say otherwise. A rate is always work over time: never a mean of rates, and
never a figure of one rank times the number of ranks. Optional fields are null where something was not measured.
"""

_NAMES = {int: "integer", float: "number", str: "text", bool: "true or false", NoneType: "null", Any: "anything"}


_SWEEP = f"""\
# The result of a sweep

`lockstep benchmark scaling` writes `scaling.json`, of version {SCALING_SCHEMA_VERSION} of the description below, beside
the bundles of its jobs.
"""


def page() -> str:
    """Return the page, as Markdown."""
    of_bundle = list(_records(Bundle))
    of_sweep = [record for record in _records(ScalingResult) if record not in of_bundle]
    sections = [_INTRODUCTION, *("\n".join(_section(record)) for record in of_bundle), "\n".join(_scopes())]
    sections += [_SWEEP, *("\n".join(_section(record)) for record in of_sweep)]
    return "\n".join(sections)


def _records(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """Yield a record and those that its fields have, each once, in the order in which they are met."""
    met = [model]
    for record in met:
        yield record
        for field in record.model_fields.values():
            met += [inner for inner in _inner(field.annotation) if inner not in met]


def _inner(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [record for argument in get_args(annotation) for record in _inner(argument)]


def _section(record: type[BaseModel]) -> Iterator[str]:
    yield f"## {record.__name__}"
    yield ""
    yield " ".join((record.__doc__ or "").split())
    yield ""
    yield "| field | type | what it is |"
    yield "| --- | --- | --- |"
    for name, field in record.model_fields.items():
        yield f"| `{name}` | {_kind_of(field)} | {_cell(field.description or '')} |"
    yield ""


def _kind_of(field: FieldInfo) -> str:
    kind = _kind(field.annotation)
    bounds = [bound for each in field.metadata for bound in _bounds(each)]
    return _cell(", ".join((kind, *bounds)))


def _kind(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        bounds = [bound for each in arguments[1].metadata for bound in _bounds(each)]
        return ", ".join((_kind(arguments[0]), *bounds))
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    if origin in (Union, UnionType):
        return " or ".join(_kind(argument) for argument in arguments)
    if origin is tuple and arguments[-1:] == (...,):
        return f"list of {_kind(arguments[0])}"
    if origin is tuple:
        return f"list of ({', '.join(_kind(argument) for argument in arguments)})"
    if origin is dict:
        return f"object: {_kind(arguments[0])} to {_kind(arguments[1])}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"[{annotation.__name__}](#{annotation.__name__.lower()})"
    return _NAMES[annotation]


def _bounds(constraint: Any) -> list[str]:
    words = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    return [f"{text} {getattr(constraint, name)}" for name, text in words.items() if hasattr(constraint, name)]


def _scopes() -> Iterator[str]:
    yield "## Scopes"
    yield ""
    yield "What the values of the scope fields cover; every bundle has this too, as `scope_values`."
    yield ""
    yield "| field | value | what it covers |"
    yield "| --- | --- | --- |"
    for name, values in SCOPE_VALUES.items():
        for value, meaning in values.items():
            yield f"| `{name}` | `{value}` | {_cell(meaning)} |"
    yield ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    sys.stdout.write(page().rstrip("\n") + "\n")
