"""An env of somebody else's, as a task: sizes and names, and none of the functions, which its library has."""

import json
from collections.abc import Mapping
from math import inf
from pathlib import Path
from typing import Any, NoReturn

from lockstep.core.errors import UsageError
from lockstep.core.types import ActionSpace, Array, InitialState, Namespace, Observations, State, Task


class GuestTask(Task):
    """What learners and reports ask of a task.

    Args:
        action_space: of the policy. Continuous actions reach the env as its adapter says.
        num_observations: by group; ``{"actor": n, "critic": n}``.
        metric_terms: what the env tells besides the reward, which is one term here, ``reward``.
        reward_terms: what the reward is the sum of, where the env tells.
        step_duration_s: simulated seconds per env step; 0 where the env does not tell.
        max_step_reward: infinity where nobody knows.
    """

    num_reset_noise = 0
    num_step_noise = 0
    model_path: Path | None = None

    def __init__(
        self,
        action_space: ActionSpace,
        num_observations: Mapping[str, int],
        *,
        metric_terms: tuple[str, ...] = (),
        reward_terms: tuple[str, ...] = ("reward",),
        step_duration_s: float = 0.0,
        max_step_reward: float = inf,
    ) -> None:
        self.action_space = action_space
        self.num_observations = num_observations
        self.reward_terms, self.metric_terms = reward_terms, metric_terms
        self.step_duration_s, self.max_step_reward = step_duration_s, max_step_reward

    def reset(self, xp: Namespace, noise: Array) -> InitialState:
        """Raise NotImplementedError, as do all functions of the physics: the env's own library has them."""
        _refuse()

    def control(self, xp: Namespace, state: State, action: Array) -> Array:
        """See ``reset``."""
        _refuse()

    def advance(self, xp: Namespace, state: State, action: Array, noise: Array) -> State:
        """See ``reset``."""
        _refuse()

    def observations(self, xp: Namespace, state: State, noise: Array) -> Observations:
        """See ``reset``."""
        _refuse()

    def rewards(self, xp: Namespace, state: State, action: Array) -> dict[str, Any]:
        """See ``reset``."""
        _refuse()

    def terminations(self, xp: Namespace, state: State) -> Array:
        """See ``reset``."""
        _refuse()


def as_json(kwargs: Mapping[str, Any]) -> str:
    """Return keyword arguments of an env as text, the same for the same ones.

    Raises:
        UsageError: they have what no config file could.
    """
    try:
        return json.dumps(kwargs)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"env.kwargs are numbers, words, lists and mappings of these, as a run's config has them: {error}"
        ) from error


def _refuse() -> NoReturn:
    raise NotImplementedError("the env's own library has the physics of this task")
