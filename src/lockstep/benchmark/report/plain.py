"""Values of unknown kind, as run.json may hold them, in words."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from lockstep.benchmark.amounts import NOTHING
from lockstep.benchmark.report.content import Cell, Column, Fact, Row, Table

_MAX_TEXT = 2000


def as_text(value: Any) -> str:
    """Return any value of JSON in a line of at most 2000 characters."""
    text = "".join(_pieces(value, depth=0))
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}…"


def _pieces(value: Any, depth: int) -> Iterator[str]:
    if value is None or value in ("", [], {}):
        yield NOTHING
    elif isinstance(value, bool):
        yield "yes" if value else "no"
    elif depth > 8:
        yield "…"
    elif isinstance(value, Mapping):
        for number, (name, inner) in enumerate(value.items()):
            yield f"{', ' if number else ''}{name}: "
            yield from _pieces(inner, depth + 1)
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield ", " if number else ""
            yield from _pieces(inner, depth + 1)
    else:
        yield _simple(value)


def _simple(value: Any) -> str:
    try:
        return str(value)
    except ValueError:  # an int of thousands of digits
        return "a very large number"


def number_in(values: Mapping[str, Any], name: str) -> float | None:
    """Return a number that a mapping may hold; None if it holds none, or one that is not finite."""
    value = values.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def records_in(values: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """Return the mappings in a list that a mapping may hold."""
    found = values.get(name)
    return [each for each in found if isinstance(each, Mapping)] if isinstance(found, list) else []


def core_list(cores: Any) -> str:
    """Return numbers of cores with neighbours drawn together: ``0-3, 8``."""
    if not isinstance(cores, list | tuple) or not cores or not all(type(core) is int for core in cores):
        return as_text(cores)
    runs: list[list[int]] = []
    for core in sorted(set(cores)):
        if runs and core == runs[-1][1] + 1:
            runs[-1][1] = core
        else:
            runs.append([core, core])
    return ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)


def version_facts(versions: Any) -> tuple[Fact, ...]:
    """Return a fact for each package that is there."""
    if not isinstance(versions, Mapping):
        return ()
    return tuple(Fact(str(name), Cell(as_text(version))) for name, version in versions.items() if version is not None)


def as_sentence(words: str) -> str:
    """Return words with a capital letter before and a full stop behind."""
    return f"{words[:1].upper()}{words[1:]}{'' if words.endswith(('.', '!', '?')) else '.'}"


def git_words(git: Any) -> str:
    """Return the commit, and whether the checkout was changed since, of each of lockstep and the working folder."""
    if isinstance(git, Mapping) and isinstance(git.get("commit"), str):
        return f"{git['commit'][:12]}{', with changes' if git.get('dirty') else ''}"
    if isinstance(git, Mapping):
        return "; ".join(f"{as_text(name)} {git_words(inner)}" for name, inner in git.items() if inner) or NOTHING
    return as_text(git)


def time_words(time: Any) -> str:
    """Return an ISO time to the second."""
    try:
        return datetime.fromisoformat(time).strftime("%Y-%m-%d %H:%M:%S %z").strip()
    except (TypeError, ValueError):
        return as_text(time)


def table_of(title: str, names: Sequence[str], rows: Sequence[Row], explanation: str = "") -> Table:
    """Return a table of words; columns of which no row has anything are left out."""
    return without_empty(Table(title, tuple(Column(name, is_number=False) for name in names), tuple(rows), explanation))


def without_empty(table: Table) -> Table:
    """Return a table without the columns of which no row has anything; the first, which names the rows, stays."""
    kept = [k for k in range(len(table.columns)) if k == 0 or any(row.cells[k].text != NOTHING for row in table.rows)]
    columns = tuple(table.columns[k] for k in kept)
    return replace(
        table, columns=columns, rows=tuple(Row(tuple(row.cells[k] for k in kept), row.mark) for row in table.rows)
    )
