"""From a matplotlib figure to SVG inside an HTML page: text stays text, colours follow the page, nothing is loaded."""

import io
import re
import warnings
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH_INCHES = 4.2
"""About as wide as a phone's screen at matplotlib's 72 points to the inch, so that text there has its own size."""

_SERIES = tuple(f"series-{number}" for number in range(1, 9))
_ROLES = ("ink", "muted", "line", "card", "compute", "contention", "straggler", "communication", *_SERIES)
# matplotlib wants colours. Each of these stands for a CSS variable until the drawing is made; nobody sees them.
_STAND_INS = {role: f"#fe01{number:02x}" for number, role in enumerate(_ROLES, 1)}
_VARIABLES = {color: f"var(--{role})" for role, color in _STAND_INS.items()}

_COLOR = re.compile(r"#[0-9a-f]{6}\b")
_FONT = re.compile(r"font: (?:[a-z0-9]+ )*?([\d.]+px) [^;]*")
_FAMILY = re.compile(r"font-family: [^;]*;?\s*")
_REFERENCE = re.compile(r"url\(#([^)]+)\)")
_DROPPED = ("metadata", "style", "title")


def color(role: str) -> str:
    """Return what to give matplotlib for a colour of the page, as ``ink`` or ``series-1``."""
    return _STAND_INS[role]


def series(number: int) -> str:
    """Return the role of the colour of the ``number``-th line of a chart, from 0 on."""
    return _SERIES[number % len(_SERIES)]


@contextmanager
def drawing() -> Iterator[None]:
    """A context in which figures are made and inlined: the user's own settings of matplotlib have no say."""
    import matplotlib

    muted, line = color("muted"), color("line")
    style: dict[str, Any] = {
        "svg.fonttype": "none",
        "svg.hashsalt": "lockstep",
        "text.usetex": False,
        "text.parse_math": False,  # a name is no mathematics
        "font.size": 10.5,
        "text.color": color("ink"),
        "axes.labelcolor": muted,
        "axes.edgecolor": line,
        "axes.facecolor": "none",
        "axes.linewidth": 1,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.spines.left": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.unicode_minus": True,
        "grid.color": line,
        "grid.linewidth": 0.7,
        "xtick.color": line,
        "ytick.color": line,
        "xtick.labelcolor": muted,
        "ytick.labelcolor": muted,
        "xtick.major.size": 0,
        "ytick.major.size": 0,
        "lines.linewidth": 1.8,
        "lines.solid_capstyle": "round",
        "patch.linewidth": 0,
        "figure.facecolor": "none",
    }
    with warnings.catch_warnings(), matplotlib.rc_context():
        warnings.simplefilter("ignore")  # glyphs that a font lacks, layouts that are tight
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(style)  # type: ignore[arg-type]  # its names are listed one by one there
        yield


def inline(figure: "Figure", label: str, prefix: str, stretch: bool = False) -> Markup:
    """Return a figure as an ``<svg>`` element, whose size follows the page's.

    Args:
        figure: drawn within ``drawing``, in the colours of ``color``.
        label: what it shows, for those who can't see it.
        prefix: of ids, distinct among the figures of a page.
        stretch: its height is the page's to choose, whatever the width.
    """
    file = io.StringIO()
    figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    root = ElementTree.fromstring(file.getvalue())
    _drop(root)
    referenced = set(_references(root))
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        attributes = {name.rpartition("}")[2]: value for name, value in element.attrib.items()}
        element.attrib.clear()
        for name, value in attributes.items():
            if name != "id":
                element.set(name, _themed(_prefixed(name, value, prefix)))
            elif value in referenced:
                element.set("id", f"{prefix}-{value}")
    for name in ("width", "height", "version"):
        root.attrib.pop(name, None)
    if stretch:
        root.set("preserveAspectRatio", "none")
    root.set("role", "img")
    root.set("aria-label", _printable(label))
    return Markup(ElementTree.tostring(root, encoding="unicode"))  # every text in it is escaped


def _drop(element: ElementTree.Element) -> None:
    for child in list(element):
        if child.tag.rpartition("}")[2] in _DROPPED:
            element.remove(child)
        else:
            _drop(child)
    element.tail = None
    if element.text is not None and not element.text.strip():
        element.text = None


def _references(root: ElementTree.Element) -> Iterator[str]:
    for element in root.iter():
        for name, value in element.attrib.items():
            if name.endswith("href"):
                yield value.removeprefix("#")
            yield from _REFERENCE.findall(value)


def _prefixed(name: str, value: str, prefix: str) -> str:
    if name == "href":
        return f"#{prefix}-{value.removeprefix('#')}"
    return _REFERENCE.sub(lambda match: f"url(#{prefix}-{match[1]})", value)


def _themed(value: str) -> str:
    """Return an attribute with the page's own colours and font."""
    value = _FAMILY.sub("", _FONT.sub(r"font-size: \1", value))  # matplotlib's versions differ in how they say it
    return _COLOR.sub(lambda match: _VARIABLES.get(match[0], match[0]), value)


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else " " for letter in text)
