"""What is exported of a policy: a torch module from raw observations to the most likely action, normaliser included.

A policy that was trained with JAX gets one too: the networks of both frameworks compute the same, so its parameters
are taken over into torch's.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import nn

from lockstep.core.errors import UsageError
from lockstep.core.types import ActionSpace
from lockstep.learn.config import PpoConfig, SacConfig
from lockstep.learn.torch.networks import Backbone, Memory
from lockstep.learn.torch.normalizer import Identity, Normalizer
from lockstep.learn.torch.perceptron import Perceptron
from lockstep.recipes.libraries import OWN
from lockstep.session.torch_policy import TorchPolicy

if TYPE_CHECKING:
    from lockstep.learn.torch.guest import PolicyParts
    from lockstep.session.policy import Policy

Head = Literal["mean", "choice", "squashed"]
"""What makes an action of the last layer: nothing, the largest entry's index, or tanh of the first half."""

# Of the module names of flax, and of the parameter names of torch's layers.
_MEMORY_NAMES = {
    "weight_ih_l0": "input_kernel",
    "weight_hh_l0": "hidden_kernel",
    "bias_ih_l0": "input_bias",
    "bias_hh_l0": "hidden_bias",
}


class DeployedPolicy(nn.Module):
    """A policy in float32, as a function of nothing but its arguments.

    A NaN among the observations of an env, or in its state, makes NaN of its actions and its state, whatever the
    runtime's recurrent layers make of it; with discrete actions the choice is then 0, as the policy itself has it.
    """

    def __init__(self, normalizer: nn.Module, memory: Memory | None, layers: nn.Sequential, head: Head) -> None:
        super().__init__()
        *hidden, last = layers
        assert isinstance(last, nn.Linear)
        self.normalizer, self.memory = normalizer, memory
        self.hidden, self.last = nn.Sequential(*hidden), last
        self.head = head
        first = next(layer for layer in layers if isinstance(layer, nn.Linear))
        self.num_observations = first.in_features if memory is None else memory.layer.input_size
        for parameter in self.parameters():
            parameter.data = parameter.data.detach().to("cpu", torch.float32, copy=True)
            parameter.requires_grad_(False)
        self.eval()

    def initial_state(self, num_envs: int) -> torch.Tensor:
        """Return the state in which episodes start, ``(num_parts, num_envs, size)``; empty without a memory."""
        like = torch.zeros(())
        return like.new_zeros((0, num_envs, 0)) if self.memory is None else self.memory.initial_state(num_envs, like)

    def features(self, observations: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what the last layer is given, ``(num_envs, width)``, and the new state."""
        inputs = self.normalizer(observations)
        if self.memory is not None:
            inputs, state = self.memory.step(inputs, state)
        return self.hidden(inputs), state

    def decide(self, outputs: torch.Tensor, is_bad: torch.Tensor) -> torch.Tensor:
        """Return actions ``(num_envs, size)``, discrete ``(num_envs,)``; ``is_bad (num_envs,)`` says where NaN was."""
        if self.head == "choice":
            return torch.where(is_bad, 0, outputs.argmax(-1))
        actions = outputs.chunk(2, dim=-1)[0].tanh() if self.head == "squashed" else outputs
        return torch.where(is_bad.unsqueeze(-1), torch.nan, actions)


class Reactive(DeployedPolicy):
    """One without a memory."""

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        """Return actions for raw observations ``(num_envs, num_observations)``."""
        features, _ = self.features(observations, self.initial_state(1))
        return self.decide(self.last(features), observations.isnan().any(-1))


class Recurrent(DeployedPolicy):
    """One with a memory, which the caller keeps."""

    def forward(self, observations: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return actions and the next state for raw observations and the state ``(num_parts, num_envs, size)``."""
        features, after = self.features(observations, state)
        is_bad = observations.isnan().any(-1) | state.isnan().any(-1).any(0)
        return self.decide(self.last(features), is_bad), torch.where(is_bad.unsqueeze(-1), torch.nan, after)


def to_compare_with(policy: Policy) -> Policy:
    """Return the policy as it computes in full precision; one that was trained in bfloat16 is exported in float32."""
    if isinstance(policy, TorchPolicy):
        return policy  # whose networks compute in bfloat16 while they are trained alone
    from lockstep.session.jax_policy import JaxPolicy, in_float32

    assert isinstance(policy, JaxPolicy)
    return in_float32(policy)


def deploy(policy: Policy) -> Reactive | Recurrent:
    """Return what is exported of a policy, in float32, on the CPU.

    Raises:
        UsageError: its networks are not lockstep's own.
    """
    if policy.config.runner:
        raise UsageError(
            f"this policy is of runner {policy.config.runner}, whose networks lockstep does not know; export it with "
            "its own code"
        )
    if isinstance(policy, TorchPolicy):
        network = copy.deepcopy(policy.network)
        if policy.config.rl_library != OWN:
            parts: PolicyParts = network.parts()
            return _put_together(*parts)
        head: Head = "mean" if network.action_space.kind == "continuous" else "choice"
        return _assemble(network.actor_normalizer, network.actor, head)
    return _from_jax(policy)


def _assemble(normalizer: Normalizer | Identity, backbone: Backbone, head: Head) -> Reactive | Recurrent:
    return _put_together(normalizer, backbone.memory, backbone.perceptron, head)


def _put_together(
    normalizer: nn.Module, memory: Memory | None, layers: nn.Sequential, head: Head
) -> Reactive | Recurrent:
    kind = Reactive if memory is None else Recurrent
    return kind(normalizer.cpu(), memory, layers, head)


def _from_jax(policy: Any) -> Reactive | Recurrent:
    """Return a policy of JAX in torch's layers."""
    if policy.config.rl_library != OWN:
        return _put_together(*policy.algorithm.parts(policy.replicated))
    space: ActionSpace = policy.algorithm.env.task.action_space
    agent, weights = policy.config.agent, policy.algorithm.weights(policy.replicated)
    if isinstance(agent, SacConfig):
        perceptron = Perceptron((policy.num_observations, *agent.actor_hidden_dims, 2 * space.size), agent.activation)
        _load_perceptron(perceptron, weights.parameters["actor"])
        return Reactive(_normalizer(weights.normalizers["actor"]), None, perceptron, "squashed")
    assert isinstance(agent, PpoConfig)
    backbone = Backbone(agent, policy.num_observations, agent.actor_hidden_dims, space.size)
    parameters = weights.parameters["actor"]
    _load_perceptron(backbone.perceptron, parameters["perceptron"])
    if backbone.memory is not None:
        names = _MEMORY_NAMES.items()
        saved = {torch_name: _transposed(parameters["memory"][name]) for torch_name, name in names}
        backbone.memory.layer.load_state_dict(saved)
    head: Head = "mean" if space.kind == "continuous" else "choice"
    return _assemble(_normalizer(weights.actor_normalizer), backbone, head)


def _load_perceptron(perceptron: Perceptron, parameters: Mapping[str, Any]) -> None:
    *hidden, last = perceptron.linear_layers
    named = {f"layer_{index}": layer for index, layer in enumerate(hidden)} | {"last": last}
    for name, layer in named.items():
        kernel, bias = _transposed(parameters[name]["kernel"]), _transposed(parameters[name]["bias"])
        layer.load_state_dict({"weight": kernel, "bias": bias})


def _normalizer(moments: Any) -> Normalizer:
    """Return torch's normaliser with the moments of JAX's; one that was turned off has merged nothing."""
    normalizer = Normalizer(len(moments.mean))
    normalizer.load_state_dict({name: _transposed(getattr(moments, name)) for name in ("count", "mean", "m2")})
    return normalizer


def _transposed(array: Any) -> torch.Tensor:
    """Return an array of JAX as a tensor; a matrix is turned round, since torch writes its outputs first."""
    return torch.from_numpy(np.array(array).T.copy())
