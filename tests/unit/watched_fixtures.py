"""Tasks that have metrics beside their rewards, for tests of what becomes of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from lockstep.core.types import Array, Namespace, State


@contextmanager
def watched(*tasks: type) -> Iterator[None]:
    """Let tasks have two metrics meanwhile: ``distance`` of the first position from 0, and ``is_step``, always 1.

    A mean of the latter over env steps is 1, however long episodes are and however many end.
    """
    with pytest.MonkeyPatch.context() as patch:
        for task in tasks:
            patch.setattr(task, "metric_terms", ("distance", "is_step"))
            patch.setattr(task, "metrics", _metrics)
        yield


def _metrics(self: Any, xp: Namespace, state: State, action: Array) -> dict[str, Array]:
    distance = xp.abs(state.qpos[:, 0])
    return {"is_step": xp.ones_like(distance), "distance": distance}
