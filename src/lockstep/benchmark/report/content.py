"""What a page consists of, before it is HTML: sections of facts, tables, charts and words.

Every text here is as somebody wrote it; the template escapes it. The one exception is a chart's SVG, which
``svg.inline`` has made.
"""

from dataclasses import dataclass, field
from typing import Literal

from markupsafe import Markup


@dataclass(frozen=True)
class Cell:
    """A figure as people read it, and exactly; ``unit`` and ``beside`` (a second one: a peak) are in small print."""

    text: str
    exact: float | int | None = None
    beside: str = ""
    beside_exact: float | int | None = None
    unit: str = ""


@dataclass(frozen=True)
class Fact:
    """A named figure or word; ``explanation`` says in a line what it is."""

    name: str
    cell: Cell
    explanation: str = ""


@dataclass(frozen=True)
class Facts:
    """Facts below one another, or (``large``) beside one another, for the few that matter most."""

    facts: tuple[Fact, ...]
    title: str = ""
    large: bool = False
    kind: Literal["facts"] = "facts"


@dataclass(frozen=True)
class Column:
    """The head of a column; ``explanation`` goes below the table."""

    name: str
    unit: str = ""
    explanation: str = ""
    is_number: bool = True


@dataclass(frozen=True)
class Row:
    """A row; ``mark`` is a word that sets it apart from the others."""

    cells: tuple[Cell, ...]
    mark: str = ""


@dataclass(frozen=True)
class Table:
    """A table, the first column of which names the row; long and wide ones scroll in a box of their own."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    explanation: str = ""
    wide: bool = True
    kind: Literal["table"] = "table"


@dataclass(frozen=True)
class Key:
    """What a colour of a chart stands for: ``color`` is the name of a CSS variable without dashes."""

    color: str
    name: str
    cells: tuple[Cell, ...] = ()
    explanation: str = ""


@dataclass(frozen=True)
class Chart:
    """A drawing with a title, a line of explanation, a legend, and the same in figures."""

    title: str
    svg: Markup
    explanation: str = ""
    keys: tuple[Key, ...] = ()
    wide: bool = False
    table: Table | None = None
    kind: Literal["chart"] = "chart"


@dataclass(frozen=True)
class Words:
    """Sentences: findings (each with a figure before it), or notes on what is missing or doubtful."""

    texts: tuple[tuple[str, str], ...]
    title: str = ""
    tone: Literal["finding", "note", "plain"] = "plain"
    explanation: str = ""
    kind: Literal["words"] = "words"


@dataclass(frozen=True)
class Text:
    """A file's or command's text, folded away until somebody wants it."""

    title: str
    text: str
    kind: Literal["text"] = "text"


Block = Facts | Table | Chart | Words | Text


@dataclass(frozen=True)
class Section:
    """One input of the report, or a comparison of several."""

    identifier: str
    title: str
    subtitle: str
    badge: str = ""
    headline: str = ""
    blocks: tuple[Block, ...] = field(default=())
    tone: Literal["good", "bad", "neutral"] = "neutral"
