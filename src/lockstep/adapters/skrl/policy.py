"""The actor of skrl's agents as it is evaluated, played and exported: the networks alone, without the library."""

from collections.abc import Mapping
from typing import Literal, cast

import torch
from torch import nn

from lockstep.core.errors import UsageError
from lockstep.core.types import ActionSpace, Observations
from lockstep.learn.torch.guest import PolicyParts
from lockstep.learn.torch.normalizer import Identity
from lockstep.learn.torch.perceptron import Perceptron

Head = Literal["mean", "tanh", "squashed", "choice"]
"""What makes an action of the last layer: nothing, tanh, tanh of the first half, or the largest entry's index."""


class Scaling(nn.Module):
    """Shifts, scales and clips observations, as skrl's ``RunningStandardScaler`` does when it does not learn.

    Args:
        size: of the observations.
        epsilon: added to the standard deviation.
        clip_threshold: what is beyond it is clipped, on either side.
    """

    running_mean: torch.Tensor
    running_variance: torch.Tensor

    def __init__(self, size: int, epsilon: float = 1e-8, clip_threshold: float = 5.0) -> None:
        super().__init__()
        self.epsilon, self.clip_threshold = epsilon, clip_threshold
        self.register_buffer("running_mean", torch.zeros(size, dtype=torch.float64))
        self.register_buffer("running_variance", torch.ones(size, dtype=torch.float64))

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        """Return ``samples (num_envs, size)`` scaled, in float32."""
        std = self.running_variance.float().sqrt() + self.epsilon
        return ((samples - self.running_mean.float()) / std).clamp(-self.clip_threshold, self.clip_threshold)


class SkrlPolicy(nn.Module):
    """Normaliser, layers, and what makes an action of the last one. It may share its modules with an agent.

    Args:
        normalizer: of raw observations.
        layers: of the actor, or of the Q-network.
        head: what makes an action.
        space: of the actions; ``tanh`` and ``squashed`` reach as far as its limit.
    """

    def __init__(self, normalizer: nn.Module, layers: Perceptron, head: Head, space: ActionSpace) -> None:
        super().__init__()
        self.normalizer, self.layers = normalizer, layers
        self.head, self.limit = head, space.limit
        self.num_observations: Mapping[str, int] = {"actor": layers.linear_layers[0].in_features}

    def initial_memory(self, num_envs: int) -> torch.Tensor:
        """Return the memory of a policy that has none, ``(0, num_envs, 0)``."""
        return torch.zeros((0, num_envs, 0))

    @torch.no_grad()
    def most_likely(self, observations: Observations, memory: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return actions ``(num_envs, size)``, discrete ``(num_envs,)``, for raw observations."""
        outputs = self.layers.infer(self.normalizer(observations["actor"]))
        if self.head == "choice":
            return outputs.argmax(-1), memory
        return actions_of(outputs, self.head, self.limit), memory

    def parts(self) -> PolicyParts:
        """Return what it is made of.

        Raises:
            UsageError: actions are scaled by a limit, which an exported policy has no place for.
        """
        if self.head in ("tanh", "squashed") and self.limit != 1.0:
            raise UsageError(
                f"this policy's actions reach up to {self.limit:g}, and a policy can be exported whose actions reach "
                "up to 1; train with an algorithm that does not bound them, such as ppo"
            )
        if self.head == "tanh":
            return PolicyParts(self.normalizer, None, _with_second_half(self.layers), "squashed")
        return PolicyParts(self.normalizer, None, self.layers, self.head)


def head_of(algorithm: str, space: ActionSpace) -> Head:
    """Return what makes an action in the policy of an algorithm."""
    if space.kind == "discrete":
        return "choice"
    heads: dict[str, Head] = {"sac": "squashed", "td3": "tanh", "ddpg": "tanh"}
    return heads.get(algorithm, "mean")


def actions_of(outputs: torch.Tensor, head: Head, limit: float) -> torch.Tensor:
    """Return the most likely actions ``(num_envs, size)`` that continuous heads make of the last layer's outputs."""
    if head == "squashed":
        outputs = outputs.chunk(2, dim=-1)[0]
    return outputs if head == "mean" else limit * outputs.tanh()


def _with_second_half(layers: Perceptron) -> nn.Sequential:
    """Return layers whose last has as many outputs more, which nobody looks at."""
    *hidden, last = layers
    linear = cast(nn.Linear, last)
    wider = nn.Linear(linear.in_features, 2 * linear.out_features)
    with torch.no_grad():
        wider.weight.copy_(torch.cat((linear.weight, torch.zeros_like(linear.weight))))
        wider.bias.copy_(torch.cat((linear.bias, torch.zeros_like(linear.bias))))
    return nn.Sequential(*hidden, wider)


def scaling_of(state: Mapping[str, torch.Tensor] | None, size: int, kwargs: Mapping[str, float]) -> nn.Module:
    """Return the normaliser of a saved ``RunningStandardScaler``; of None one that does nothing."""
    if state is None:
        return Identity()
    scaling = Scaling(size, **kwargs)
    scaling.load_state_dict({name: state[name] for name in ("running_mean", "running_variance")})
    return scaling
