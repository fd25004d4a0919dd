"""Envs that look different on each rank, in tests of what the ranks have in common all the same."""

from typing import Any

import torch

from lockstep.core.types import Observations


class ShiftedEnvs:
    """The envs of a rank, whose every observation is shifted; and all that was seen in them."""

    def __init__(self, env: Any, shift: float) -> None:
        self._env, self._shift = env, shift
        self.seen: list[Observations] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    @property
    def observations(self) -> Observations:
        return self._shifted(self._env.observations)

    def step(self, action: torch.Tensor) -> Any:
        self.seen.append(self.observations)
        transition = self._env.step(action)
        return transition._replace(
            observations=self._shifted(transition.observations),
            final_observations=self._shifted(transition.final_observations),
        )

    def _shifted(self, observations: Observations) -> Observations:
        """Return the groups shifted; what was one tensor for both is one again, since learners may go by that."""
        made: dict[int, torch.Tensor] = {id(tensor): tensor + self._shift for tensor in observations.values()}
        return {name: made[id(tensor)] for name, tensor in observations.items()}
