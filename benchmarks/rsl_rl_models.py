"""RSL-RL's perceptron with the last layer that lockstep's begins with."""

from typing import Any

from rsl_rl.models import MLPModel
from torch import nn


class StartsAsLockstep(MLPModel):
    """Its last layer is orthogonal, of gain 0.01 for an actor and 1 for a critic, with biases 0."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        last = self.mlp[-1]
        nn.init.orthogonal_(last.weight, 1.0 if self.distribution is None else 0.01)
        nn.init.zeros_(last.bias)
