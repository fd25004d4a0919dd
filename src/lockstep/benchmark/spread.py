"""How values are spread, as a bundle says it."""

from collections.abc import Sequence

import numpy as np

from lockstep.benchmark.schema import Spread, Use


def spread_of(values: "Sequence[float] | np.ndarray") -> Spread:
    """Return the spread of at least one value; percentiles are interpolated between neighbours (numpy's default)."""
    array = np.asarray(values, dtype=np.float64)
    p10, median, p90 = np.percentile(array, (10, 50, 90))
    return Spread(
        num=array.size,
        mean=float(array.mean()),
        median=float(median),
        p10=float(p10),
        p90=float(p90),
        least=float(array.min()),
        most=float(array.max()),
        std=float(array.std(ddof=1)) if array.size > 1 else 0.0,
    )


def use_of(values: "Sequence[float] | np.ndarray") -> Use | None:
    """Return mean and peak; None of no value."""
    return Use(mean=float(np.mean(values)), peak=float(np.max(values))) if len(values) else None
