"""The actor of RSL-RL, or its student, as it is evaluated, played and exported."""

import copy
from collections.abc import Mapping
from typing import Any, Literal, cast

import torch
from rsl_rl.models import MLPModel, RNNModel
from rsl_rl.modules import EmpiricalNormalization
from rsl_rl.modules.distribution import BetaDistribution, GaussianDistribution, HeteroscedasticGaussianDistribution
from torch import nn

from lockstep.core.errors import UsageError
from lockstep.core.types import Observations
from lockstep.learn.torch.guest import PolicyParts
from lockstep.learn.torch.networks import Memory

_GAUSSIANS = (type(None), GaussianDistribution, HeteroscedasticGaussianDistribution)


class RslRlPolicy(nn.Module):
    """What ``OnPolicyRunner.get_inference_policy`` gives, with a memory that the caller keeps.

    Args:
        model: RSL-RL's; it is not copied, and what it remembers of a rollout is left alone.
        num_observations: sizes of all groups that there are.
    """

    def __init__(self, model: MLPModel, num_observations: Mapping[str, int]) -> None:
        super().__init__()
        self.model = model
        self.num_observations = {name: num_observations[name] for name in {"actor": None} | dict.fromkeys(self.groups)}

    @property
    def groups(self) -> list[str]:
        """The observation groups that it looks at, in the order of its inputs."""
        groups: list[str] = self.model.obs_groups
        return groups

    @property
    def _layer(self) -> nn.GRU | nn.LSTM | None:
        return cast(nn.GRU | nn.LSTM, self.model.rnn.rnn) if self.model.is_recurrent else None

    def initial_memory(self, num_envs: int) -> torch.Tensor:
        """Return zeros ``(num_parts, num_envs, size)``: per layer the hidden state, then so the cell states."""
        like, layer = next(self.parameters()), self._layer
        if layer is None:
            return like.new_zeros((0, num_envs, 0))
        num_parts = layer.num_layers * (2 if isinstance(layer, nn.LSTM) else 1)
        return like.new_zeros((num_parts, num_envs, layer.hidden_size))

    def most_likely(self, observations: Observations, memory: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the means of the actions ``(num_envs, size)``, and the new memory."""
        if missing := [name for name in self.groups if name not in observations]:
            raise ValueError(f"the policy looks at the observation groups {self.groups}, and {missing} are not given")
        layer = self._layer
        if layer is None:
            return self.model(observations), memory
        latent = MLPModel.get_latent(self.model, observations).unsqueeze(0)
        if isinstance(layer, nn.LSTM):
            hidden, cell = memory.split(layer.num_layers)
            latent, parts = layer(latent, (hidden.contiguous(), cell.contiguous()))
            memory = torch.cat(parts)
        else:
            latent, memory = layer(latent, memory)
        outputs = self.model.mlp(latent.squeeze(0))
        distribution = self.model.distribution
        return (outputs if distribution is None else distribution.deterministic_output(outputs)), memory

    def parts(self) -> PolicyParts:
        """Return its normaliser, memory and layers.

        Raises:
            UsageError: it looks at other groups than ``actor``, or is of another kind than perceptron with or without
                one recurrent layer, or its actions are no output of its last layer.
        """
        model, layer = self.model, self._layer
        if self.groups != ["actor"]:
            raise UsageError(
                f"a policy of the observation groups {', '.join(self.groups)} can't be exported, for a robot has the "
                "group actor alone; distil it first (--algorithm distillation --agent.teacher RUN)"
            )
        if type(model) not in (MLPModel, RNNModel) or type(model.distribution) not in _GAUSSIANS:
            other = BetaDistribution if type(model.distribution) is BetaDistribution else type(model)
            raise UsageError(
                f"a policy with {other.__name__} can't be exported; use MLPModel or RNNModel, and a Gaussian"
            )
        if layer is not None and layer.num_layers > 1:
            raise UsageError(f"a policy with {layer.num_layers} recurrent layers can't be exported; train one with 1")
        layers = [*copy.deepcopy(model.mlp)]
        if isinstance(model.distribution, HeteroscedasticGaussianDistribution):
            layers = [*layers[:-2], _first_half(layers[-2])]  # the last unflattens means and standard deviations
        return PolicyParts(Standardization(model.obs_normalizer), _memory_of(layer), nn.Sequential(*layers), "mean")


class Standardization(nn.Module):
    """A normaliser of RSL-RL as it is now, which nothing changes any more; the identity for another module."""

    mean: torch.Tensor
    divisor: torch.Tensor

    def __init__(self, normalizer: nn.Module) -> None:
        super().__init__()
        mean, divisor = torch.zeros(1, 1), torch.ones(1, 1)
        if isinstance(normalizer, EmpiricalNormalization):
            mean, divisor = normalizer._mean.detach().clone(), normalizer._std.detach() + normalizer.eps
        self.register_buffer("mean", mean)
        self.register_buffer("divisor", divisor)

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        """Return ``samples (num_samples, size)`` shifted and scaled."""
        return (samples - self.mean) / self.divisor


def _first_half(layer: Any) -> nn.Linear:
    half = nn.Linear(layer.in_features, layer.out_features // 2)
    state = {name: tensor[: half.out_features] for name, tensor in layer.state_dict().items()}
    half.load_state_dict(state)
    return half


def _memory_of(layer: nn.GRU | nn.LSTM | None) -> Memory | None:
    if layer is None:
        return None
    kind: Literal["gru", "lstm"] = "lstm" if isinstance(layer, nn.LSTM) else "gru"
    memory = Memory(kind, layer.input_size, layer.hidden_size)
    memory.layer.load_state_dict(layer.state_dict())
    return memory
