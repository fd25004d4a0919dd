"""The policy: actor and critic, each an optional memory and a multilayer perceptron, as pure functions of parameters.

Layers start as torch's do (uniform within 1 / sqrt(number of inputs)), so that both frameworks learn alike.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from lockstep.core.types import ActionSpace
from lockstep.learn.config import PpoConfig
from lockstep.learn.jax.distributions import Categorical, Distribution, Gaussian

Parameters = Mapping[str, Any]
"""Arrays by name, nested as modules are."""


@jax.custom_jvp
def elu(inputs: jax.Array) -> jax.Array:
    """Return the exponential linear unit of every entry (Clevert et al. 2016, arXiv:1511.07289, with alpha 1)."""
    # The inner choice keeps the exponential of large inputs, which nobody asks for, from becoming infinite.
    return jnp.where(inputs > 0, inputs, jnp.expm1(jnp.minimum(inputs, 0)))


@elu.defjvp
def _elu_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    outputs = elu(*primals)
    # From the result: the backward pass needs neither the inputs nor another exponential.
    return outputs, tangents[0] * jnp.minimum(outputs + 1, 1)


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "elu": elu,
    "relu": jax.nn.relu,
    "tanh": jnp.tanh,
    "silu": jax.nn.silu,
}


def uniform_within(bound: float) -> Callable[..., jax.Array]:
    """Return an initialiser that draws uniformly from [-bound, bound)."""

    def draw(key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike = jnp.float32) -> jax.Array:
        return jax.random.uniform(key, shape, dtype, -bound, bound)

    return draw


class Mlp(nn.Module):
    """A multilayer perceptron from ``(..., num_inputs)`` to ``(..., num_outputs)``.

    Attributes:
        hidden_dims: widths of the hidden layers ``layer_0``, ``layer_1``, ...
        num_outputs: width of the layer ``last``, which has no activation.
        activation: one of ACTIVATIONS, after each hidden layer.
        last_gain: the last layer starts orthogonal with this gain and without bias; None: as the others.
        dtype: that layers compute in; None: that of parameters and inputs.
    """

    hidden_dims: tuple[int, ...]
    num_outputs: int
    activation: str = "elu"
    last_gain: float | None = None
    dtype: DTypeLike | None = None

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Return the outputs."""
        for index, width in enumerate(self.hidden_dims):
            inputs = ACTIVATIONS[self.activation](self._linear(f"layer_{index}", width, inputs.shape[-1])(inputs))
        return self._linear("last", self.num_outputs, inputs.shape[-1], self.last_gain)(inputs)

    def _linear(self, name: str, num_outputs: int, num_inputs: int, gain: float | None = None) -> nn.Dense:
        like_torch = uniform_within(1.0 / math.sqrt(num_inputs))
        kernel = like_torch if gain is None else nn.initializers.orthogonal(gain)
        bias = like_torch if gain is None else nn.initializers.zeros
        return nn.Dense(num_outputs, dtype=self.dtype, kernel_init=kernel, bias_init=bias, name=name)


class Memory(nn.Module):
    """A GRU or LSTM layer that forgets where an episode ends.

    Its state is one array ``(num_parts, num_envs, size)``: the hidden state, and the cell state of an LSTM. As torch's,
    and unlike flax's cells, it has two biases for every gate, both of which learn.

    Attributes:
        kind: Cho et al. 2014 (arXiv:1406.1078) with the reset gate after the product, as cuDNN has it; or Hochreiter
            and Schmidhuber 1997 with forget gates.
        num_inputs: width of the inputs.
        size: width of outputs and states.
        dtype: that products are computed in; None: that of the parameters. States keep theirs.
    """

    kind: Literal["gru", "lstm"]
    num_inputs: int
    size: int
    dtype: DTypeLike | None = None

    @property
    def num_parts(self) -> int:
        """Of the state."""
        return 1 if self.kind == "gru" else 2

    def setup(self) -> None:
        """Declare the parameters: gates side by side, GRU: reset, update, new; LSTM: input, forget, cell, output."""
        width = (3 if self.kind == "gru" else 4) * self.size
        start = uniform_within(1.0 / math.sqrt(self.size))
        self.input_kernel = self.param("input_kernel", start, (self.num_inputs, width))
        self.hidden_kernel = self.param("hidden_kernel", start, (self.size, width))
        self.input_bias = self.param("input_bias", start, (width,))
        self.hidden_bias = self.param("hidden_bias", start, (width,))

    def step(self, inputs: jax.Array, state: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return outputs ``(num_envs, size)`` and the new state for ``inputs (num_envs, num_inputs)``."""
        after = self._advance(self._project(inputs, self.input_kernel, self.input_bias), state)
        return after[0], after

    def sequence(self, inputs: jax.Array, state: jax.Array, done: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Run over ``inputs (num_steps, num_envs, num_inputs)``; ``done (num_steps, num_envs)`` clears the state after.

        Returns:
            outputs ``(num_steps, num_envs, size)`` and the states after each step, before any clearing,
            ``(num_steps, num_parts, num_envs, size)``.
        """
        projected = self._project(inputs, self.input_kernel, self.input_bias)

        def advance(state: jax.Array, step: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            step_inputs, step_done = step
            after = self._advance(step_inputs, state)
            return forget(after, step_done), after

        _, states = jax.lax.scan(advance, state, (projected, done))
        return states[:, 0], states

    def _project(self, inputs: jax.Array, kernel: jax.Array, bias: jax.Array) -> jax.Array:
        inputs, kernel, bias = (array.astype(self.dtype or kernel.dtype) for array in (inputs, kernel, bias))
        return inputs @ kernel + bias

    def _advance(self, projected: jax.Array, state: jax.Array) -> jax.Array:
        hidden = state[0]
        recurrent = self._project(hidden, self.hidden_kernel, self.hidden_bias).astype(state.dtype)
        projected = projected.astype(state.dtype)
        if self.kind == "gru":
            reset, update, new = jnp.split(projected, 3, axis=-1)
            reset_recurrent, update_recurrent, new_recurrent = jnp.split(recurrent, 3, axis=-1)
            reset = jax.nn.sigmoid(reset + reset_recurrent)
            update = jax.nn.sigmoid(update + update_recurrent)
            candidate = jnp.tanh(new + reset * new_recurrent)
            return ((1.0 - update) * candidate + update * hidden)[None]
        into, keep, new, out = jnp.split(projected + recurrent, 4, axis=-1)
        cell = jax.nn.sigmoid(keep) * state[1] + jax.nn.sigmoid(into) * jnp.tanh(new)
        return jnp.stack((jax.nn.sigmoid(out) * jnp.tanh(cell), cell))


def forget(state: jax.Array, done: jax.Array) -> jax.Array:
    """Return a memory's state ``(num_parts, num_envs, size)`` cleared in the envs of ``done (num_envs,)``."""
    # A choice between no entries is a constant to JAX, which a loop would not take for a rank's own.
    return jnp.where(done[:, None], 0.0, state) if state.size else state


class Backbone(nn.Module):
    """Memory (unless its kind is ``none``) and multilayer perceptron.

    Attributes:
        memory_kind, memory_size: of the memory.
        num_inputs: width of the inputs.
        hidden_dims, num_outputs, activation, last_gain, dtype: as in Mlp.
    """

    memory_kind: Literal["none", "gru", "lstm"]
    memory_size: int
    num_inputs: int
    hidden_dims: tuple[int, ...]
    num_outputs: int
    activation: str
    last_gain: float | None
    dtype: DTypeLike | None = None

    def setup(self) -> None:
        """Declare the parts."""
        self.perceptron = Mlp(self.hidden_dims, self.num_outputs, self.activation, self.last_gain, self.dtype)
        if self.memory_kind != "none":
            self.memory = Memory(self.memory_kind, self.num_inputs, self.memory_size, self.dtype)

    def initial_state(self, num_envs: int, dtype: DTypeLike) -> jax.Array:
        """Return the state in which every episode starts; without a memory an empty array of zero parts."""
        if self.memory_kind == "none":
            return jnp.zeros((0, num_envs, 0), dtype)
        return jnp.zeros((1 if self.memory_kind == "gru" else 2, num_envs, self.memory_size), dtype)

    def __call__(self, features: jax.Array) -> jax.Array:
        """Return outputs ``(..., num_outputs)`` for what ``remember`` or ``remember_sequence`` returned."""
        return self.perceptron(features)

    def remember(self, inputs: jax.Array, state: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return features ``(num_envs, width)`` and the new state; without a memory both as they are."""
        return (inputs, state) if self.memory_kind == "none" else self.memory.step(inputs, state)

    def remember_sequence(self, inputs: jax.Array, state: jax.Array, done: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return features and the states after each step of ``inputs (num_steps, num_envs, num_inputs)``.

        As ``Memory.sequence`` does; without a memory leading axes are free and the states are those of zero parts.
        """
        if self.memory_kind == "none":
            return inputs, jnp.broadcast_to(state, (inputs.shape[0], *state.shape))
        return self.memory.sequence(inputs, state, done)

    def step(self, inputs: jax.Array, state: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return outputs ``(num_envs, num_outputs)`` and the new state."""
        features, state = self.remember(inputs, state)
        return self(features), state

    def sequence(self, inputs: jax.Array, state: jax.Array, done: jax.Array) -> jax.Array:
        """Return outputs ``(..., num_outputs)``; with a memory ``inputs`` must be ``(num_steps, num_envs, size)``."""
        features, _ = self.remember_sequence(inputs, state, done)
        return self(features)


def run(module: nn.Module, parameters: Parameters, *inputs: jax.Array, method: str | None = None) -> Any:
    """Return what a module, or one of its methods by name, makes of its inputs with these parameters."""
    return module.apply({"params": parameters}, *inputs, method=method)


class PolicyState(NamedTuple):
    """The memories of actor and critic, each ``(num_parts, num_envs, size)``; zero parts without a memory."""

    actor: jax.Array
    critic: jax.Array


class ActorCritic:
    """Actor and critic over separate observation groups: the modules, and the functions of their parameters.

    Parameters are ``{"actor": ..., "critic": ...}`` and, with continuous actions, ``"log_std" (size,)``.

    Args:
        config: widths, activation, memory.
        num_observations: sizes of the groups ``actor`` and ``critic``.
        action_space: a Gaussian policy for continuous actions, a categorical one for discrete ones.
        dtype: of parameters, states and results.
        network_dtype: that the networks compute in; None: as ``dtype``.
    """

    def __init__(
        self,
        config: PpoConfig,
        num_observations: Mapping[str, int],
        action_space: ActionSpace,
        dtype: DTypeLike,
        network_dtype: DTypeLike | None = None,
    ) -> None:
        self.action_space, self.dtype = action_space, dtype
        self.recurrent = config.recurrent != "none"
        self._init_std = config.init_std
        backbone = partial(
            Backbone,
            memory_kind=config.recurrent,
            memory_size=config.recurrent_hidden_dim,
            activation=config.activation,
            dtype=network_dtype,
        )
        # A small last layer: the first actions are centred, the first values near zero.
        self.actor = backbone(
            num_inputs=num_observations["actor"],
            hidden_dims=config.actor_hidden_dims,
            num_outputs=action_space.size,
            last_gain=0.01,
        )
        self.critic = backbone(
            num_inputs=num_observations["critic"],
            hidden_dims=config.critic_hidden_dims,
            num_outputs=1,
            last_gain=1.0,
        )

    def initialise(self, key: jax.Array) -> Parameters:
        """Return new parameters, drawn in float32: the same numbers whatever the dtype."""
        parameters: dict[str, Any] = {}
        for name, part, part_key in zip(
            ("actor", "critic"), (self.actor, self.critic), jax.random.split(key), strict=True
        ):
            inputs, state = jnp.zeros((1, part.num_inputs), jnp.float32), part.initial_state(1, jnp.float32)
            parameters[name] = part.init(part_key, inputs, state, method="step")["params"]
        if self.action_space.kind == "continuous":
            parameters["log_std"] = jnp.full((self.action_space.size,), math.log(self._init_std), jnp.float32)
        cast: Parameters = jax.tree.map(lambda array: array.astype(self.dtype), parameters)
        return cast

    def initial_state(self, num_envs: int) -> PolicyState:
        """Return the state in which every episode starts."""
        return PolicyState(*(part.initial_state(num_envs, self.dtype) for part in (self.actor, self.critic)))

    def distribution(self, parameters: Parameters, outputs: jax.Array) -> Distribution:
        """Return the action distribution that the actor's outputs ``(..., size)`` describe."""
        outputs = outputs.astype(self.dtype)  # probabilities stay precise whatever the networks compute in
        if self.action_space.kind == "continuous":
            return Gaussian(outputs, parameters["log_std"])
        return Categorical(outputs)

    def unpack(self, packed: jax.Array) -> Distribution:
        """Return the distribution that was stored as ``packed``."""
        return Gaussian.unpack(packed) if self.action_space.kind == "continuous" else Categorical.unpack(packed)

    def act(self, parameters: Parameters, inputs: jax.Array, state: jax.Array) -> tuple[Distribution, jax.Array]:
        """Return the action distribution and the actor's new state for normalised observations."""
        outputs, state = run(self.actor, parameters["actor"], inputs, state, method="step")
        return self.distribution(parameters, outputs), state

    def evaluate(
        self,
        parameters: Parameters,
        actor_inputs: jax.Array,
        critic_inputs: jax.Array,
        state: PolicyState,
        done: jax.Array,
    ) -> tuple[Distribution, jax.Array]:
        """Return action distributions and values ``(...)`` for normalised observations.

        Leading axes are free, but ``(num_steps, num_envs)`` with a memory, which starts at ``state`` and forgets after
        ``done``.
        """
        outputs = run(self.actor, parameters["actor"], actor_inputs, state.actor, done, method="sequence")
        values = run(self.critic, parameters["critic"], critic_inputs, state.critic, done, method="sequence")
        return self.distribution(parameters, outputs), values[..., 0].astype(self.dtype)
