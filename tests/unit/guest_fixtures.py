"""Envs of Gymnasium that live only in tests, whose every number can be told in advance."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

INF = np.inf
ID = "LockstepTest-v0"


class Counting(gymnasium.Env[Any, Any]):
    """Counts its steps; an episode is as long as its seed says, and the reward is the count.

    Observations are the count and a number drawn by the seed. ``kind`` is that of the spaces, ``breaks_at`` the step
    whose observation is not finite.
    """

    metadata = {"render_modes": [], "render_fps": 50}  # noqa: RUF012
    actions: ClassVar[list[Any]] = []
    """Given to all of them, in order."""

    def __init__(self, observation: str = "box", action: str = "box", breaks_at: int = 0) -> None:
        self.observation_space = {
            "box": spaces.Box(-np.inf, np.inf, (2,)),
            "nested": spaces.Dict(
                {
                    "where": spaces.Box(-1.0, 1.0, (1, 2)),
                    "which": spaces.Discrete(3, start=1),
                    "on": spaces.MultiBinary(2),
                }
            ),
            "text": spaces.Dict({"words": spaces.Text(5)}),
        }[observation]
        self.action_space = {
            "box": spaces.Box(np.array([-2, 0, -INF, 0], np.float32), np.array([2, 1, INF, INF], np.float32)),
            "discrete": spaces.Discrete(3, start=5),
            "several": spaces.MultiDiscrete([2, 2]),
            "whole": spaces.Box(0, 9, (2,), dtype=np.int64),
        }[action]
        self._observation, self._breaks_at = observation, breaks_at

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.count, self.number = 0, float(self.np_random.random())
        self.length = 2 + int(self.np_random.integers(4))
        return self._seen(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.actions.append(action)
        self.count += 1
        return self._seen(), float(self.count), self.count >= self.length, False, {}

    def _seen(self) -> Any:
        if self._observation == "nested":
            return {"where": np.array([[0.5, self.count]]), "which": 2, "on": np.array([1, 0], dtype=np.int8)}
        broken = self._breaks_at and self.count == self._breaks_at
        return np.array([np.nan if broken else self.count, self.number], dtype=np.float32)


class Sized(gymnasium.Env[Any, Any]):
    """Shows zeros, as many as it is told, and goes on for ever."""

    def __init__(self, size: int, action: str = "box") -> None:
        self.observation_space = spaces.Box(-1.0, 1.0, (size,))
        self.action_space = spaces.Discrete(2) if action == "discrete" else spaces.Box(-1.0, 1.0, (1,))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return np.zeros(self.observation_space.shape or (), dtype=np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self.reset()[0], 1.0, False, False, {}


@contextmanager
def _registered() -> Iterator[None]:
    gymnasium.register(ID, entry_point="tests.unit.guest_fixtures:Counting", max_episode_steps=100)
    try:
        yield
    finally:
        del gymnasium.registry[ID]


@pytest.fixture
def counting() -> Iterator[str]:
    """The name of the task of counting envs."""
    Counting.actions.clear()
    with _registered():
        yield f"gymnasium/{ID}"


def played(seed: int) -> tuple[float, int]:
    """Return what an episode of that seed draws: its number and its length."""
    env = Counting()
    env.reset(seed=seed)
    return env.number, env.length
