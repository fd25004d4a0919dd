"""The actor of Stable-Baselines3, as it is evaluated, played and exported (stable-baselines3 2.9)."""

from collections.abc import Mapping
from typing import Any

import torch
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.vec_env import VecNormalize
from torch import nn

from lockstep.core.errors import UsageError
from lockstep.core.types import ActionSpace, Observations
from lockstep.learn.torch.guest import PolicyParts


class ClippedNormalizer(nn.Module):
    """What ``VecNormalize`` does to observations, in torch; the identity until it is given the moments of one."""

    mean: torch.Tensor
    scale: torch.Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("scale", torch.ones(size))
        self.limit = torch.inf

    def take_up(self, vec_normalize: VecNormalize) -> None:
        """Go by the moments that ``vec_normalize`` has now."""
        moments: Any = vec_normalize.obs_rms
        self.mean.copy_(torch.from_numpy(moments.mean))
        self.scale.copy_(torch.from_numpy((moments.var + vec_normalize.epsilon) ** -0.5))
        self.limit = float(vec_normalize.clip_obs)

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        """Return ``samples (..., size)`` normalised."""
        return ((samples - self.mean) * self.scale).clamp(-self.limit, self.limit)


class Sb3Policy(nn.Module):
    """Decides as the library's ``predict(deterministic=True)`` does, but leaves clipping to the task.

    Args:
        policy: of the library; the model's own, or a copy of it.
        num_observations: of the group ``actor``.
        space: of the actions.
    """

    def __init__(self, policy: Any, num_observations: int, space: ActionSpace) -> None:
        super().__init__()
        self.policy = policy
        self.normalizer = ClippedNormalizer(num_observations).to(next(policy.parameters()).device)
        self.num_observations: Mapping[str, int] = {"actor": num_observations}
        self.action_space = space

    def initial_memory(self, num_envs: int) -> torch.Tensor:
        """Return an empty memory."""
        return self.normalizer.mean.new_zeros((0, num_envs, 0))

    @torch.no_grad()
    def most_likely(self, observations: Observations, memory: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return actions and the memory for raw observations."""
        inputs = self.normalizer(observations["actor"])
        if isinstance(self.policy, ActorCriticPolicy):
            actions: torch.Tensor = self.policy.get_distribution(inputs).mode()
            return actions, memory
        return self.policy._predict(inputs, deterministic=True) * self.action_space.limit, memory

    def parts(self) -> PolicyParts:
        """Return what it is made of.

        Raises:
            UsageError: its networks are others than the library's plain ones, or its actions are scaled.
        """
        policy = self.policy
        if getattr(policy, "use_sde", False):
            raise UsageError(
                "a policy of Stable-Baselines3 with library.use_sde can't be exported; train one without it"
            )
        if isinstance(policy, ActorCriticPolicy):
            layers = nn.Sequential(*policy.mlp_extractor.policy_net, policy.action_net)
            continuous = self.action_space.kind == "continuous"
            return PolicyParts(self.normalizer, None, layers, "mean" if continuous else "choice")
        if self.action_space.limit != 1.0:
            raise UsageError(f"actions that are scaled by {self.action_space.limit:g} after a tanh can't be exported")
        actor = policy.actor
        if hasattr(actor, "log_std"):
            layers = nn.Sequential(*actor.latent_pi, _beside(actor.mu, actor.log_std))
        else:
            *hidden, last, _ = actor.mu  # the tanh
            layers = nn.Sequential(*hidden, _beside(last, last))
        return PolicyParts(self.normalizer, None, layers, "squashed")


def _beside(mean: nn.Linear, other: nn.Linear) -> nn.Linear:
    """Return a layer that gives what two give, one after the other; of a squashed head only the first half counts."""
    both = nn.Linear(mean.in_features, 2 * mean.out_features)
    with torch.no_grad():
        both.weight.copy_(torch.cat((mean.weight, other.weight)))
        both.bias.copy_(torch.cat((mean.bias, other.bias)))
    return both
