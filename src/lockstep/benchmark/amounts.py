"""Figures for people: three digits that count and a unit, in steps of a thousand (bytes: of 1024)."""

import math
from typing import NamedTuple

from lockstep.benchmark.schema import Spread

NOTHING = "–"
"""What stands where nothing was measured."""


class Scale(NamedTuple):
    """A unit and what one of it is in the basic one."""

    unit: str
    size: float


_SECONDS = (Scale("s", 1.0), Scale("ms", 1e-3), Scale("µs", 1e-6))
_BYTES = (Scale("TiB", 2.0**40), Scale("GiB", 2.0**30), Scale("MiB", 2.0**20), Scale("KiB", 2.0**10), Scale("B", 1.0))
_COUNTS = (Scale("T", 1e12), Scale("G", 1e9), Scale("M", 1e6), Scale("k", 1e3), Scale("", 1.0))


def seconds(value: float | None) -> str:
    """Return a wall time: ``12.3 ms``, ``4.56 s``."""
    return _scaled(value, seconds_scale(value or 0.0))


def seconds_scale(largest: float) -> Scale:
    """Return the unit in which seconds up to ``largest`` read well."""
    return _scale(largest, _SECONDS)


def num_bytes(value: float | None) -> str:
    """Return an amount of memory: ``1.50 GiB``."""
    return _scaled(value, bytes_scale(value or 0.0))


def bytes_scale(largest: float) -> Scale:
    """Return the unit in which bytes up to ``largest`` read well."""
    return _scale(largest, _BYTES)


def quantity(value: float | None, unit: str = "") -> str:
    """Return how many, as ``1.23 M env steps``."""
    if value is None:
        return NOTHING
    scale = _scale(abs(value), _COUNTS)
    return " ".join(part for part in (digits(value / scale.size), scale.unit, unit) if part)


def rate(value: float | None) -> str:
    """Return a throughput: ``1.23 M env steps/s``."""
    return quantity(value, "env steps/s")


def share(value: float | None) -> str:
    """Return a part of a whole: ``12.3 %``."""
    return NOTHING if value is None else f"{round(value * 100, 1) + 0.0:.1f} %"


def percent(value: float | None) -> str:
    """Return what is in percent already: ``150 %``."""
    return NOTHING if value is None else f"{digits(value)} %"


def count(value: int | None) -> str:
    """Return a whole number in full: ``1,234,567``."""
    return NOTHING if value is None else f"{value:,}"


def plural(value: int, one: str, many: str | None = None) -> str:
    """Return ``1 rank`` or ``2 ranks``."""
    return f"{value:,} {one if value == 1 else many or one + 's'}"


def duration(value: float | None) -> str:
    """Return a long wall time: ``1 d 02:03:04``, ``2:03:04`` or, below a minute, ``4.56 s``."""
    if value is None:
        return NOTHING
    if value < 60:
        return seconds(value)
    minutes, second = divmod(round(value), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return (
        f"{f'{days} d ' if days else ''}{hour:02}:{minute:02}:{second:02} h" if hours else f"{minute}:{second:02} min"
    )


def per_rank(shares: int | tuple[int, ...], at_most: int = 8) -> str:
    """Return ``256`` or, where ranks differ, ``256, 128``; of many ranks the least and the most."""
    if isinstance(shares, int):
        return f"{shares:,}"
    if len(shares) <= at_most:
        return ", ".join(f"{each:,}" for each in shares)
    return f"{min(shares):,} to {max(shares):,}"


def digits(value: float) -> str:
    """Return a number with three digits that count, and no exponent where it can be helped."""
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if size >= 1e6 or 0 < size < 1e-3:
        return f"{value:.2e}"
    if size >= 99.95 or size == 0:
        return f"{value:.0f}"
    if size < 0.0995:
        return f"{value:.2g}"
    return f"{value:.{2 if size < 9.995 else 1}f}"


def within(spread: Spread, scale: Scale) -> str:
    """Return the middle eighty percent of a spread: ``1.23 to 4.56 ms``."""
    return f"{digits(spread.p10 / scale.size)} to {digits(spread.p90 / scale.size)} {scale.unit}".rstrip()


def rates_within(spread: Spread) -> str:
    """Return the middle eighty percent of rates."""
    return within(spread, rate_scale(spread.p90))


def rate_scale(largest: float) -> Scale:
    """Return the unit in which throughputs up to ``largest`` read well."""
    scale = _scale(largest, _COUNTS)
    return Scale(f"{scale.unit} env steps/s".strip(), scale.size)


def _scale(largest: float, scales: tuple[Scale, ...]) -> Scale:
    # 999.6 would be written as 1000 of the smaller unit.
    return next((each for each in scales if largest >= 0.9995 * each.size), scales[-1] if largest else scales[0])


def _scaled(value: float | None, scale: Scale) -> str:
    return NOTHING if value is None else f"{digits(value / scale.size)} {scale.unit}"
