"""Networks in skrl's own classes (JAX): the layers are ours, how actions are drawn and scored is the library's."""

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from gymnasium import Space
from skrl.models.jax import CategoricalMixin, DeterministicMixin, GaussianMixin, Model

from lockstep.core.types import ActionSpace
from lockstep.learn.jax.networks import Mlp

LOG_STD_BOUNDS = (-20.0, 2.0)
_LOG_2 = 0.6931471805599453
Inputs = dict[str, Any]
Outputs = tuple[jax.Array, dict[str, Any]]


class Network(Model):  # type: ignore[misc]
    """A model of skrl made of our layers. Everything that makes it what it is must be a field, for flax copies it.

    Attributes:
        layers: from inputs to outputs.
        space: of the actions.
        sees: the inputs that it is given, side by side.
    """

    layers: Mlp | None = None
    space: ActionSpace | None = None
    sees: tuple[str, ...] = ("observations",)

    def __init__(
        self,
        *,
        layers: Mlp,
        space: ActionSpace,
        sees: tuple[str, ...] = ("observations",),
        observation_space: Space[Any] | None = None,
        state_space: Space[Any] | None = None,
        action_space: Space[Any] | None = None,
        device: jax.Device | None = None,
        **named: Any,
    ) -> None:
        self.layers, self.space, self.sees = layers, space, sees
        Model.__init__(
            self,
            observation_space=observation_space,
            state_space=state_space,
            action_space=action_space,
            device=device,
            **named,
        )
        self.noise_key: Any = None
        self.num_drawn = 0

    def outputs(self, inputs: Inputs) -> jax.Array:
        """Return what the layers make of the inputs."""
        given = [inputs[name] for name in self.sees]
        assert self.layers is not None
        outputs: jax.Array = self.layers(given[0] if len(given) == 1 else jnp.concatenate(given, axis=1))
        return outputs

    def reseed(self, key: jax.Array) -> None:
        """Draw from here on what follows from a key."""
        self.noise_key, self.num_drawn = key, 0

    def random_act(self, inputs: Inputs, *, role: str = "", params: Any = None) -> Outputs:
        """Return actions uniform in the space, from the key: the library's own would draw without a seed."""
        assert self.space is not None
        num_envs, space = inputs["observations"].shape[0], self.space
        self.num_drawn += 1
        key = jax.random.fold_in(self.noise_key, self.num_drawn)
        if space.kind == "discrete":
            return jax.random.randint(key, (num_envs, 1), 0, space.size), {}
        return jax.random.uniform(key, (num_envs, space.size), jnp.float32, -space.limit, space.limit), {}


class GaussianNetwork(GaussianMixin, Network):  # type: ignore[misc]
    """A Gaussian whose standard deviation depends on nothing.

    Attributes:
        init_log_std: logarithm of the standard deviation at the start.
    """

    init_log_std: float = 0.0

    def __init__(self, *, init_log_std: float = 0.0, **named: Any) -> None:
        self.init_log_std = init_log_std
        Network.__init__(self, **named)
        GaussianMixin.__init__(self)

    @nn.compact
    def __call__(self, inputs: Inputs, role: str = "") -> Outputs:
        """Return means ``(num_samples, size)``, and ``log_std`` of the same shape."""
        means = self.outputs(inputs)
        log_std = self.param("log_std", nn.initializers.constant(self.init_log_std), means.shape[-1:], jnp.float32)
        return means, {"log_std": jnp.broadcast_to(log_std, means.shape)}

    def reseed(self, key: jax.Array) -> None:
        """Draw from here on what follows from a key."""
        Network.reseed(self, key)
        self._g_key, self._g_i = key, 0


class CategoricalNetwork(CategoricalMixin, Network):  # type: ignore[misc]
    """A choice by logits."""

    def __init__(self, **named: Any) -> None:
        Network.__init__(self, **named)
        CategoricalMixin.__init__(self)

    @nn.compact
    def __call__(self, inputs: Inputs, role: str = "") -> Outputs:
        """Return logits ``(num_samples, size)``."""
        return self.outputs(inputs), {}

    def act(self, inputs: Inputs, *, role: str = "", params: Any = None) -> Outputs:
        """Return sampled choices, with logits where the library looks for what it computes the entropy from."""
        actions, outputs = CategoricalMixin.act(self, inputs, role=role, params=params)
        # The library has NaN there, and asks ``get_entropy`` for the entropy of that.
        outputs["stddev"] = outputs["net_output"]
        return actions, outputs

    def reseed(self, key: jax.Array) -> None:
        """Draw from here on what follows from a key."""
        Network.reseed(self, key)
        self._c_key, self._c_i = key, 0


class ValueNetwork(DeterministicMixin, Network):  # type: ignore[misc]
    """Values of states, or of states and actions."""

    def __init__(self, **named: Any) -> None:
        Network.__init__(self, **named)
        DeterministicMixin.__init__(self)

    @nn.compact
    def __call__(self, inputs: Inputs, role: str = "") -> Outputs:
        """Return ``(num_samples, 1)``."""
        return self.outputs(inputs), {}


class SquashedNetwork(Network):
    """The policy of soft actor-critic (Haarnoja et al. 2018, arXiv:1812.05905): tanh of a Gaussian, times the limit.

    The layers give its mean, then the logarithm of its standard deviation.

    Attributes:
        compiled_key: what programs draw from that are compiled once. The library's own policies would draw the same
            numbers at every gradient step there: what these draw depends on the batch besides.
    """

    compiled_key: Any = None

    def __init__(self, *, compiled_key: Any = None, **named: Any) -> None:
        self.compiled_key = compiled_key
        Network.__init__(self, **named)
        nn.Module.__post_init__(self)

    @nn.compact
    def __call__(self, inputs: Inputs, role: str = "") -> Outputs:
        """Return ``(num_samples, 2 * size)``."""
        return self.outputs(inputs), {}

    def act(self, inputs: Inputs, *, role: str = "", params: Any = None) -> Outputs:
        """Return sampled actions, and their ``log_prob (num_samples, 1)`` and ``mean_actions``."""
        assert self.space is not None
        outputs, _ = self.apply(self.state_dict.params if params is None else params, inputs, role)
        actions, log_prob, means = _squashed(outputs, self._key_for(inputs["observations"]), self.space.limit)
        return actions, {"log_prob": log_prob, "mean_actions": means}

    def _key_for(self, observations: jax.Array) -> jax.Array:
        if isinstance(observations, jax.core.Tracer):
            bits = jax.lax.bitcast_convert_type(observations.sum(dtype=jnp.float32), jnp.uint32)
            key: jax.Array = jax.random.fold_in(self.compiled_key, bits)
            return key
        self.num_drawn += 1
        return jax.random.fold_in(self.noise_key, self.num_drawn)


@jax.jit
def _squashed(outputs: jax.Array, key: jax.Array, limit: float) -> tuple[jax.Array, jax.Array, jax.Array]:
    means, log_std = jnp.split(outputs, 2, axis=-1)
    log_std = jnp.clip(log_std, *LOG_STD_BOUNDS)
    noise = jax.random.normal(key, means.shape, means.dtype)
    inner = means + jnp.exp(log_std) * noise
    log_density = -0.5 * (noise**2 + jnp.log(2 * jnp.pi)) - log_std
    # log(1 - tanh(x)^2), without the difference that rounds to zero for large x. Of actions on the scale of [-1, 1], so
    # that the entropy to aim at does not depend on the limit.
    log_slope = 2 * (_LOG_2 - inner - jax.nn.softplus(-2 * inner))
    log_prob = (log_density - log_slope).sum(-1, keepdims=True)
    return limit * jnp.tanh(inner), log_prob, limit * jnp.tanh(means)


def start(network: Network, key: jax.Array, sizes: Mapping[str, int], role: str) -> None:
    """Give a network its first parameters.

    Args:
        network: whose ``state_dict`` they become.
        key: they follow from it.
        sizes: of its inputs, by the library's names.
        role: that it has for the library.
    """
    inputs = {name: jnp.zeros((1, size), jnp.float32) for name, size in sizes.items()}
    # In one program, as the library does with ``apply``; else every draw would be compiled by itself.
    network.init = jax.jit(network.init, static_argnums=2)
    network.init_state_dict(inputs, role=role, key=key)
