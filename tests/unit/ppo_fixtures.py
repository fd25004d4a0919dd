"""What the tests of PPO train with."""

from typing import Any

import pytest

from lockstep.learn.config import TrainConfig
from tests.unit.learner_fixtures import small_config

KINDS = [
    pytest.param(kind, recurrent, id=f"{kind}-{recurrent}")
    for kind in ("continuous", "discrete")
    for recurrent in ("none", "gru", "lstm")
]


def config_of(kind: str = "continuous", recurrent: str = "none", **agent: Any) -> TrainConfig:
    """Short episodes, so that terminations, truncations and resets all come up; double precision."""
    return small_config(
        dtype="float64",
        env={"action_kind": kind, "max_episode_steps": 9},
        agent={"recurrent": recurrent, **agent},
    )
