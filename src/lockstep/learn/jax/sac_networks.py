"""The networks of soft actor-critic, a squashed Gaussian actor and two critics, as pure functions of parameters."""

import math
from collections.abc import Mapping
from typing import Any, TypedDict, cast

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from lockstep.learn.config import SacConfig
from lockstep.learn.jax.distributions import Gaussian
from lockstep.learn.jax.networks import Mlp, Parameters

# Of the normal distribution before tanh: narrower is a choice without noise, wider is an action at either bound.
MIN_LOG_STD, MAX_LOG_STD = -10.0, 2.0
NUM_CRITICS = 2


class SacParameters(TypedDict):
    """All that learns by gradients."""

    actor: Parameters
    critics: Parameters  # every array leads with NUM_CRITICS
    log_temperature: jax.Array  # ()


class SacNetworks:
    """The modules of actor and critics, and the functions of their parameters.

    Args:
        config: widths, activation, first temperature.
        num_observations: sizes of the groups ``actor`` and ``critic``.
        action_size: entries of an action.
        dtype: of parameters and results.
        network_dtype: that the networks compute in; None: as ``dtype``.
    """

    def __init__(
        self,
        config: SacConfig,
        num_observations: Mapping[str, int],
        action_size: int,
        dtype: DTypeLike,
        network_dtype: DTypeLike | None = None,
    ) -> None:
        self.dtype = dtype
        self._num_actor_inputs = num_observations["actor"]
        self._num_critic_inputs = num_observations["critic"] + action_size
        self._init_temperature = config.init_temperature
        # A small last layer: the first actions are spread over all their range, the same in every state.
        self._actor = Mlp(config.actor_hidden_dims, 2 * action_size, config.activation, 0.01, network_dtype)
        self._critic = Mlp(config.critic_hidden_dims, 1, config.activation, None, network_dtype)

    def initialise(self, key: jax.Array) -> SacParameters:
        """Return new parameters, drawn in float32: the same numbers whatever the dtype."""
        actor_key, *critic_keys = jax.random.split(key, 1 + NUM_CRITICS)
        critic_inputs = jnp.zeros((1, self._num_critic_inputs), jnp.float32)
        critics = [self._critic.init(critic_key, critic_inputs)["params"] for critic_key in critic_keys]
        parameters = SacParameters(
            actor=self._actor.init(actor_key, jnp.zeros((1, self._num_actor_inputs), jnp.float32))["params"],
            critics=jax.tree.map(lambda *arrays: jnp.stack(arrays), *critics),
            log_temperature=jnp.full((), math.log(self._init_temperature), jnp.float32),
        )
        return cast(SacParameters, jax.tree.map(lambda array: array.astype(self.dtype), parameters))

    def policy(self, actor: Parameters, inputs: jax.Array) -> Gaussian:
        """Return the distribution ``(..., size)`` whose samples, squashed by tanh, are actions.

        Args:
            actor: parameters.
            inputs: ``(..., num_observations["actor"])`` normalised.
        """
        outputs = self._apply(self._actor, actor, inputs)
        mean, log_std = jnp.split(outputs, 2, axis=-1)
        return Gaussian(mean, jnp.clip(log_std, MIN_LOG_STD, MAX_LOG_STD))

    def values(self, critics: Parameters, inputs: jax.Array, actions: jax.Array) -> jax.Array:
        """Return ``(NUM_CRITICS, ...)``: what each critic says of actions.

        Args:
            critics: parameters.
            inputs: ``(..., num_observations["critic"])`` normalised.
            actions: ``(..., size)`` in [-1, 1].
        """
        both = jnp.concatenate((inputs, actions), axis=-1)
        return jax.vmap(lambda critic: self._apply(self._critic, critic, both)[..., 0])(critics)

    def _apply(self, module: Mlp, parameters: Any, inputs: jax.Array) -> jax.Array:
        outputs = module.apply({"params": parameters}, inputs)
        return cast(jax.Array, outputs).astype(self.dtype)  # losses stay precise whatever the networks compute in
