"""The gradient steps of soft actor-critic (Haarnoja et al. 2018, arXiv:1812.05905).

Actor, critics and temperature take a step at the same time, all from the parameters before it (as in the authors' own
program), so that the gradients of all three travel together: one collective per gradient step.
"""

from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax

from lockstep.learn.config import SacConfig
from lockstep.learn.jax.gradients import mean_gradients
from lockstep.learn.jax.networks import Parameters
from lockstep.learn.jax.replay import Experience
from lockstep.learn.jax.sac_losses import actor_loss, critic_loss, critic_target, squashed_log_prob, temperature_loss
from lockstep.learn.jax.sac_networks import SacNetworks, SacParameters
from lockstep.learn.jax.statistics import axis_size, local_parameters

RIDERS = ("critic", "actor", "temperature", "entropy", "value")


class Learner(NamedTuple):
    """What gradient steps change; the same on every rank."""

    parameters: SacParameters
    target_critics: Parameters
    optimizer: SacParameters  # its state for each group of parameters


class Batch(NamedTuple):
    """This rank's samples of one gradient step."""

    steps: Experience  # (num_samples,) normalised
    noise: jax.Array  # (num_samples, 2, size) normals for the action in each step's observation and in the next one
    weights: jax.Array  # (num_samples,) 0 for padding, else 1


class Progress(NamedTuple):
    """How far the gradient steps of an iteration are; the same on every rank."""

    learner: Learner
    riders: jax.Array  # (num_riders,) means over samples, summed over the steps, in the order of RIDERS
    gradient_norms: jax.Array  # (2,) of actor and critics before clipping, summed over the steps
    nonfinite: jax.Array  # (num_ranks,) bool: the ranks that had bad sums; nothing was changed from then on


class SacUpdate:
    """Losses and optimizers.

    Args:
        config: the learner's settings.
        networks: the modules.
        target_entropy: in nats.
    """

    def __init__(self, config: SacConfig, networks: SacNetworks, target_entropy: float) -> None:
        self.config, self.networks, self.target_entropy = config, networks, target_entropy
        of_networks = optax.adam(config.learning_rate)
        of_temperature = optax.adam(config.temperature_learning_rate)
        self._optimizers = {"actor": of_networks, "critics": of_networks, "log_temperature": of_temperature}

    def initialise(self, key: jax.Array) -> Learner:
        """Return a new learner."""
        parameters = self.networks.initialise(key)
        groups = cast(dict[str, Any], parameters)
        optimizer = {name: each.init(groups[name]) for name, each in self._optimizers.items()}
        return Learner(parameters, parameters["critics"], cast(SacParameters, optimizer))

    def start(self, learner: Learner) -> Progress:
        """Return the progress before the first gradient step of an iteration."""
        dtype = self.networks.dtype
        return Progress(learner, jnp.zeros(len(RIDERS), dtype), jnp.zeros(2, dtype), jnp.zeros(axis_size(), jnp.bool_))

    def gradient_step(self, before: Progress, batch: Batch, is_bad: jax.Array) -> Progress:
        """Take one gradient step on the samples of all ranks; change nothing from the first bad one on.

        Args:
            before: what came before it in this iteration.
            batch: this rank's part.
            is_bad: () bool, this rank has met something that is not finite before.
        """
        learner, config = before.learner, self.config
        # Of this rank's own samples: the gradients of replicated parameters would come summed over ranks already.
        own = local_parameters(learner.parameters)
        gradients, riders = jax.grad(self.loss, has_aux=True)(own, learner.target_critics, batch)
        mean = mean_gradients(gradients, riders, batch.weights.sum(), is_bad)
        nonfinite = before.nonfinite | mean.nonfinite
        actor, actor_norm = _clipped(mean.gradients["actor"], config.max_grad_norm)
        critics, critics_norm = _clipped(mean.gradients["critics"], config.max_grad_norm)
        after = self._applied(learner, {**mean.gradients, "actor": actor, "critics": critics})
        is_over = nonfinite.any()
        return Progress(
            learner=jax.tree.map(lambda old, new: jnp.where(is_over, old, new), learner, after),
            riders=before.riders + mean.riders,
            gradient_norms=before.gradient_norms + jnp.stack((actor_norm, critics_norm)),
            nonfinite=nonfinite,
        )

    def _applied(self, learner: Learner, gradients: dict[str, Any]) -> Learner:
        """Return the learner after a step of each optimizer, its target critics nearer to the critics."""
        old, state = cast(dict[str, Any], learner.parameters), cast(dict[str, Any], learner.optimizer)
        new, new_state = dict(old), dict(state)
        for name, optimizer in self._optimizers.items():
            if name == "log_temperature" and not self.config.tune_temperature:
                continue
            change, new_state[name] = optimizer.update(gradients[name], state[name])
            new[name] = optax.apply_updates(old[name], change)
        share = self.config.polyak
        target_critics = jax.tree.map(
            lambda target, critic: target + share * (critic - target), learner.target_critics, new["critics"]
        )
        return Learner(cast(SacParameters, new), target_critics, cast(SacParameters, new_state))

    def loss(self, parameters: SacParameters, target_critics: Parameters, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """Return the sum of all losses over the samples of the batch, and the riders.

        Each loss has a gradient for its own group of parameters alone: what it takes from the others is held fixed.
        """
        networks, steps = self.networks, batch.steps
        fixed = jax.lax.stop_gradient(parameters)
        temperature = jnp.exp(fixed["log_temperature"])

        next_policy = networks.policy(fixed["actor"], steps.next_actor_observations)
        next_unsquashed = next_policy.sample(batch.noise[:, 1])
        target = critic_target(
            reward=steps.rewards,
            terminated=steps.terminated,
            next_values=networks.values(target_critics, steps.next_critic_observations, jnp.tanh(next_unsquashed)),
            next_log_prob=squashed_log_prob(next_policy, next_unsquashed),
            temperature=temperature,
            gamma=self.config.gamma,
        )
        values = networks.values(parameters["critics"], steps.critic_observations, steps.actions)
        of_critics = critic_loss(values, jax.lax.stop_gradient(target))

        policy = networks.policy(parameters["actor"], steps.actor_observations)
        unsquashed = policy.sample(batch.noise[:, 0])
        log_prob = squashed_log_prob(policy, unsquashed)
        new_values = networks.values(fixed["critics"], steps.critic_observations, jnp.tanh(unsquashed))
        of_actor = actor_loss(new_values, log_prob, temperature)
        of_temperature = temperature_loss(
            parameters["log_temperature"], jax.lax.stop_gradient(log_prob), self.target_entropy
        )

        per_sample = jnp.stack((of_critics, of_actor, of_temperature, -log_prob, values.mean(0)))
        riders = jnp.where(batch.weights > 0, per_sample, 0.0).sum(1)
        return riders[:3].sum(), jax.lax.stop_gradient(riders)


def _clipped(gradients: Any, max_norm: float) -> tuple[Any, jax.Array]:
    """Return gradients scaled down to ``max_norm`` if their norm is larger, and the norm they had."""
    norm = jnp.sqrt(sum(jnp.square(leaf).sum() for leaf in jax.tree.leaves(gradients)))
    scale = jnp.minimum(max_norm / (norm + 1e-6), 1.0)
    return jax.tree.map(lambda gradient: gradient * scale, gradients), norm
