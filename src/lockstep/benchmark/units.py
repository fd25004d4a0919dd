"""Quantities in words: three digits and a unit that people read at a glance."""

_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
_MULTIPLES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_ROUNDED_UP = 0.9995  # of a unit: three digits of it are 1.00 of the unit


def duration(seconds: float) -> str:
    """Return seconds as ``1.25 s``, ``340 ms`` or ``12 us``."""
    if seconds == 0:
        return "0 s"
    size, unit = next(((size, unit) for size, unit in _TIMES if abs(seconds) >= _ROUNDED_UP * size), _TIMES[-1])
    return f"{seconds / size:.3g} {unit}"


def quantity(number: float, unit: str) -> str:
    """Return a number of something as ``12.3 kB`` or ``840 steps/s``, in powers of 1000."""
    for size, prefix in _MULTIPLES:
        if abs(number) >= _ROUNDED_UP * size:
            return f"{number / size:.3g} {prefix}{unit}"
    return f"{number:.3g} {unit}"


def percent(share: float) -> str:
    """Return a share as ``34 %``, with a decimal below 10 %."""
    return f"{100 * share:.0f} %" if abs(share) >= 0.0995 or share == 0 else f"{100 * share:.1f} %"
