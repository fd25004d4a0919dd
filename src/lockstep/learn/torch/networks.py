"""The policy: actor and critic, each a normaliser, an optional memory and a multilayer perceptron."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from lockstep.core.types import ActionSpace, Observations
from lockstep.learn.config import PpoConfig
from lockstep.learn.torch.distributions import Categorical, Distribution, Gaussian
from lockstep.learn.torch.normalizer import Identity, Normalizer
from lockstep.learn.torch.perceptron import Perceptron


class Memory(nn.Module):
    """A GRU or LSTM layer that forgets where an episode ends.

    Its state is one tensor ``(num_parts, num_envs, size)``: the hidden state, and the cell state of an LSTM.
    """

    def __init__(self, kind: str, num_inputs: int, size: int) -> None:
        super().__init__()
        self.layer: nn.GRU | nn.LSTM = (nn.GRU if kind == "gru" else nn.LSTM)(num_inputs, size)
        self.num_parts = 1 if kind == "gru" else 2
        self.size = size

    def initial_state(self, num_envs: int, like: torch.Tensor) -> torch.Tensor:
        """Return the state in which every episode starts."""
        return like.new_zeros((self.num_parts, num_envs, self.size))

    def step(self, inputs: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return outputs ``(num_envs, size)`` and the new state for ``inputs (num_envs, num_inputs)``."""
        parts = tuple(state.split(1)) if self.num_parts == 2 else state
        with _precision_of(self.layer, inputs):
            outputs, parts = self.layer(inputs.unsqueeze(0), parts)
        return outputs.squeeze(0), torch.cat(parts) if self.num_parts == 2 else parts

    def sequence(
        self, inputs: torch.Tensor, state: torch.Tensor, done: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run over ``inputs (num_steps, num_envs, num_inputs)``; ``done (num_steps, num_envs)`` clears the state after.

        Returns:
            outputs ``(num_steps, num_envs, size)`` and the states after each step, before any clearing,
            ``(num_steps, num_parts, num_envs, size)``.
        """
        outputs, states = [], []
        keep = (~done).to(inputs.dtype).unsqueeze(-1)
        for step_inputs, step_keep in zip(inputs, keep, strict=True):
            output, after = self.step(step_inputs, state)
            outputs.append(output)
            states.append(after)
            state = after * step_keep
        return torch.stack(outputs), torch.stack(states)


def _precision_of(layer: nn.Module, inputs: torch.Tensor) -> AbstractContextManager[Any]:
    """Return the context in which a memory computes: that which is there, or autocast off where it can't go.

    oneDNN has an LSTM in bfloat16 for CPUs with AVX-512 alone, and torch asks it for one on others all the same.
    """
    asks_onednn = isinstance(layer, nn.LSTM) and inputs.device.type == "cpu" and torch.is_autocast_enabled("cpu")
    if asks_onednn and "AVX512" not in torch.backends.cpu.get_cpu_capability():
        return torch.autocast("cpu", enabled=False)
    return nullcontext()


class Backbone(nn.Module):
    """Memory (if the config asks for one) and multilayer perceptron."""

    def __init__(self, config: PpoConfig, num_inputs: int, hidden_dims: tuple[int, ...], num_outputs: int) -> None:
        super().__init__()
        self.memory: Memory | None = None
        if config.recurrent != "none":
            self.memory = Memory(config.recurrent, num_inputs, config.recurrent_hidden_dim)
            num_inputs = config.recurrent_hidden_dim
        self.perceptron = Perceptron((num_inputs, *hidden_dims, num_outputs), config.activation)

    def initial_state(self, num_envs: int, like: torch.Tensor) -> torch.Tensor:
        """Return the memory's first state; without a memory an empty tensor of zero parts."""
        if self.memory is None:
            return like.new_zeros((0, num_envs, 0))
        return self.memory.initial_state(num_envs, like)

    def step(self, inputs: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return outputs ``(num_envs, num_outputs)`` and the new state."""
        if self.memory is not None:
            inputs, state = self.memory.step(inputs, state)
        return self.perceptron.infer(inputs), state

    def sequence(self, inputs: torch.Tensor, state: torch.Tensor, done: torch.Tensor) -> torch.Tensor:
        """Return outputs ``(..., num_outputs)``; with a memory ``inputs`` must be ``(num_steps, num_envs, size)``."""
        if self.memory is not None:
            inputs, _ = self.memory.sequence(inputs, state, done)
        return cast(torch.Tensor, self.perceptron(inputs))


class PolicyState(NamedTuple):
    """The memories of actor and critic, each ``(num_parts, num_envs, size)``; zero parts without a memory."""

    actor: torch.Tensor
    critic: torch.Tensor


class ActorCritic(nn.Module):
    """Actor and critic over separate observation groups.

    Args:
        config: widths, activation, memory, normalisation.
        num_observations: sizes of the groups ``actor`` and ``critic``.
        action_space: a Gaussian policy for continuous actions, a categorical one for discrete ones.
    """

    def __init__(self, config: PpoConfig, num_observations: dict[str, int], action_space: ActionSpace) -> None:
        super().__init__()
        num_actor, num_critic = num_observations["actor"], num_observations["critic"]
        self.num_observations, self.action_space = dict(num_observations), action_space
        self.actor_normalizer = Normalizer(num_actor) if config.normalize_observations else Identity()
        self.critic_normalizer = Normalizer(num_critic) if config.normalize_observations else Identity()
        self.actor = Backbone(config, num_actor, config.actor_hidden_dims, action_space.size)
        self.critic = Backbone(config, num_critic, config.critic_hidden_dims, 1)
        self.log_std: nn.Parameter | None = None
        if action_space.kind == "continuous":
            self.log_std = nn.Parameter(torch.full((action_space.size,), config.init_std).log())
        # A small last layer: the first actions are centred, the first values near zero.
        for backbone, gain in ((self.actor, 0.01), (self.critic, 1.0)):
            last = cast(nn.Linear, backbone.perceptron[-1])
            nn.init.orthogonal_(last.weight, gain)
            nn.init.zeros_(last.bias)

    @property
    def recurrent(self) -> bool:
        """Whether the policy has a memory."""
        return self.actor.memory is not None

    def cast_parameters_(self, dtype: torch.dtype) -> None:
        """Give all parameters a dtype; the normalisers stay in float64 (``Module.to`` would cast them too)."""
        for parameter in self.parameters():
            parameter.data = parameter.data.to(dtype)

    @property
    def dtype(self) -> torch.dtype:
        """Of all parameters."""
        return next(self.parameters()).dtype

    def initial_state(self, num_envs: int) -> PolicyState:
        """Return the state in which every episode starts."""
        like = next(self.parameters())
        return PolicyState(self.actor.initial_state(num_envs, like), self.critic.initial_state(num_envs, like))

    def distribution(self, outputs: torch.Tensor) -> Distribution:
        """Return the action distribution that the actor's outputs ``(..., size)`` describe."""
        outputs = outputs.to(self.dtype)  # autocast hands out bfloat16; probabilities stay precise
        return Gaussian(outputs, self.log_std) if self.log_std is not None else Categorical(outputs)

    def unpack(self, packed: torch.Tensor) -> Distribution:
        """Return the distribution that was stored as ``packed``."""
        return Gaussian.unpack(packed) if self.log_std is not None else Categorical.unpack(packed)

    def act(self, observations: Observations, state: torch.Tensor) -> tuple[Distribution, torch.Tensor]:
        """Return the action distribution and the actor's new state for raw observations."""
        outputs, state = self.actor.step(self.actor_normalizer(observations["actor"]), state)
        return self.distribution(outputs), state

    def initial_memory(self, num_envs: int) -> torch.Tensor:
        """Return the actor's memory at the start of episodes."""
        return self.initial_state(num_envs).actor

    def most_likely(self, observations: Observations, memory: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the most likely actions for raw observations, and the actor's new memory."""
        distribution, memory = self.act(observations, memory)
        return distribution.mode(), memory

    def evaluate(
        self, actor_inputs: torch.Tensor, critic_inputs: torch.Tensor, state: PolicyState, done: torch.Tensor
    ) -> tuple[Distribution, torch.Tensor]:
        """Return action distributions and values ``(...)`` for normalised observations.

        Leading axes are free, but ``(num_steps, num_envs)`` with a memory, which starts at ``state`` and forgets after
        ``done``.
        """
        distribution = self.distribution(self.actor.sequence(actor_inputs, state.actor, done))
        values = self.critic.sequence(critic_inputs, state.critic, done).squeeze(-1)
        return distribution, values.to(self.dtype)
