"""Actions without a policy: where they lie, and that nobody's depend on who shares a batch or a block."""

from typing import Any

import numpy as np
import pytest

from lockstep.core.types import ActionSpace
from lockstep.session.random_actions import RandomActions

CONTINUOUS, DISCRETE = ActionSpace("continuous", 3), ActionSpace("discrete", 4)
IDS = np.arange(200, dtype=np.int32)


def actions_of(space: ActionSpace, seed: int = 1) -> RandomActions:
    return RandomActions(space, seed, np, np.float32, np.int64)


def test_continuous_actions_fill_the_whole_interval() -> None:
    drawn = actions_of(CONTINUOUS).draw(0, 50, IDS)
    assert drawn.shape == (50, 200, 3)
    assert drawn.dtype == np.float32
    assert -1 <= drawn.min() < -0.99
    assert 0.99 < drawn.max() < 1
    assert abs(drawn.mean()) < 0.02


def test_discrete_actions_are_all_choices_equally_often() -> None:
    drawn = actions_of(DISCRETE).draw(0, 50, IDS)
    assert drawn.shape == (50, 200)
    assert drawn.dtype == np.int64
    choices, counts = np.unique(drawn, return_counts=True)
    assert choices.tolist() == [0, 1, 2, 3]
    assert counts.min() > 2300  # of 2500 on average


@pytest.mark.parametrize("size", [2, 3, 5, 9, 16])
def test_the_largest_uniform_is_still_a_choice(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    actions = actions_of(ActionSpace("discrete", size))
    largest = np.full((1, 1, 1), 1 - 2.0**-24, np.float32)
    monkeypatch.setattr(actions._stream, "uniform", lambda *arguments: largest)
    assert actions.draw(0, 1, IDS[:1]).tolist() == [[size - 1]]


@pytest.mark.parametrize("space", [CONTINUOUS, DISCRETE])
def test_an_action_depends_on_env_and_step_alone(space: ActionSpace) -> None:
    drawn = actions_of(space).draw(0, 6, IDS)
    blocks: list[Any] = [actions_of(space).draw(first, 2, IDS[100:]) for first in (0, 2, 4)]
    assert (np.concatenate(blocks) == drawn[:, 100:]).all()
    assert (drawn[0] != drawn[1]).any()
    assert (drawn != actions_of(space, seed=2).draw(0, 6, IDS)).any()
