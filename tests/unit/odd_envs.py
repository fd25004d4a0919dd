"""Envs of Gymnasium with a fault each, for tests; a module of its own, since processes of envs import it."""

import os
import sys
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

Step = tuple[Any, Any, Any, Any, dict[str, Any]]


class Sound(gymnasium.Env[Any, Any]):
    """Shows three zeros and goes on for ever; what differs is in ``gives`` of the classes that follow."""

    observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float64)
    action_space = spaces.Box(-1.0, 1.0, (1,))
    at_reset: Any = np.zeros(3)
    gives: Step = (np.zeros(3), 1.0, False, False, {})

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        return self.at_reset, {}

    def step(self, action: Any) -> Step:
        return self.gives


class Arrays(Sound):
    gives = (np.zeros(3), np.array([2.0]), np.array([False]), np.bool_(False), {})


class NoReward(Sound):
    gives = (np.zeros(3), None, False, False, {})


class WordAsReward(Sound):
    gives = (np.zeros(3), "1.0", False, False, {})


class TwoRewards(Sound):
    gives = (np.zeros(3), np.array([1.0, 2.0]), False, False, {})


class Grows(Sound):
    gives = (np.zeros(4), 1.0, False, False, {})


class NoObservation(Sound):
    gives = (None, 1.0, False, False, {})


class TwoEnds(Sound):
    gives = (np.zeros(3), 1.0, [True, False], False, {})


class Wider(Sound):
    at_reset = np.zeros(5)


class BareReset(Sound):
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return np.zeros(3)


class HugeReward(Sound):
    gives = (np.zeros(3), 1e300, False, False, {})


class HugeObservation(Sound):
    gives = (np.full(3, 1e300), 1.0, False, False, {})


class NanAtReset(Sound):
    at_reset = np.array([0.0, np.nan, 0.0])


class HugeAtReset(Sound):
    at_reset = np.array([0.0, 0.0, 1e300])


class NanAtSecondReset(Sound):
    gives = (np.zeros(3), 1.0, True, False, {})

    def step(self, action: Any) -> Step:
        self.at_reset = np.full(3, np.nan)
        return self.gives


class NoSpaces(gymnasium.Env[Any, Any]):
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return 0, {}


class ExitsWhenMade(Sound):
    def __init__(self) -> None:
        sys.exit(0)


class Exits(Sound):
    def step(self, action: Any) -> Step:
        sys.exit(0)


class Dies(Sound):
    def step(self, action: Any) -> Step:
        os._exit(3)


class CloseFails(Sound):
    def close(self) -> None:
        raise RuntimeError("stuck")
