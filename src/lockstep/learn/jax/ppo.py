"""Proximal policy optimisation (Schulman et al. 2017, arXiv:1707.06347) as one function of a state.

The same update as ``learn/torch/ppo.py``, and on several ranks that of one rank with all their envs.
"""

import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree

from lockstep.core.types import Array, Observations
from lockstep.envs.jax_env import EnvState, JaxEnv
from lockstep.learn.config import PpoConfig, TrainConfig
from lockstep.learn.jax import diagnosis, evaluation
from lockstep.learn.jax.algorithm import NONFINITE, Metrics, TrainState
from lockstep.learn.jax.gae import generalised_advantages
from lockstep.learn.jax.gradients import MeanGradients, clip_scale, mean_gradients
from lockstep.learn.jax.losses import adapted_learning_rate, surrogate_loss, value_loss
from lockstep.learn.jax.minibatches import Batch, Dealer, PackedBatch, in_chunks, samples_per_pass
from lockstep.learn.jax.networks import ActorCritic, Parameters, PolicyState
from lockstep.learn.jax.normalizer import new_normalizer, normalise
from lockstep.learn.jax.rollout import ActionNoise, Collected, collect
from lockstep.learn.jax.statistics import (
    Moments,
    axis_index,
    axis_size,
    local_parameters,
    merge_over_ranks,
    psum,
    standardise,
)
from lockstep.learn.jax.values import CriticInputs, rollout_values

RIDERS = ("kl", "surrogate", "value", "entropy")


class Weights(NamedTuple):
    """What makes a policy: all that ``--checkpoint`` takes over."""

    parameters: Parameters
    actor_normalizer: Moments
    critic_normalizer: Moments


class PpoState(NamedTuple):
    """What is the same on every rank."""

    weights: Weights
    optimizer: optax.ScaleByAdamState
    learning_rate: jax.Array  # () float32, steered by the schedule
    iteration: jax.Array  # () int64
    num_steps: jax.Array  # () int64 env steps that each env has made: where its random streams go on
    env_steps: jax.Array  # () int64 env steps of all envs of all ranks


class PpoEnvs(NamedTuple):
    """What is a rank's own: every array leads with its envs."""

    env: EnvState
    memory: PolicyState  # (num_envs, num_parts, size) each


class Samples(NamedTuple):
    """A rollout made ready for the update."""

    batch: Batch  # leading axes (num_steps, num_envs)
    actor_moments: Moments  # of the raw observations, over all ranks
    critic_moments: Moments
    critic_state: jax.Array  # (num_parts, num_envs, size) the critic's memory after the rollout
    nonfinite: jax.Array  # (len(diagnosis.CHECKS),) bool, of this rank


class _Learner(NamedTuple):
    """What changes from one minibatch to the next; parameters lie one after the other, so that few loops see to all."""

    parameters: jax.Array  # (num_parameters,)
    optimizer: optax.ScaleByAdamState  # of that vector
    learning_rate: jax.Array
    nonfinite: jax.Array  # (num_ranks,) bool: the ranks that had bad sums; nothing was changed from then on


class UpdateResult(NamedTuple):
    """What an update gave, and means over all its minibatches."""

    parameters: Parameters
    optimizer: optax.ScaleByAdamState
    learning_rate: jax.Array
    nonfinite: jax.Array  # (num_ranks,) bool, as in _Learner
    riders: jax.Array  # (num_riders,) in the order of RIDERS
    gradient_norm: jax.Array  # () before clipping


class Ppo:
    """The algorithm ``ppo``; see ``learn/jax/algorithm.py`` for what each method is to the harness.

    Args:
        config: of the run.
        env: makes and steps this rank's envs.
        evaluation_env: those of evaluations; None: there are none.
    """

    CHECKS = (*diagnosis.CHECKS, "gradients")

    def __init__(self, config: TrainConfig, env: JaxEnv, evaluation_env: JaxEnv | None) -> None:
        self.config = config.agent_as(PpoConfig)
        self.env, self.evaluation_env = env, evaluation_env
        network_dtype = jnp.bfloat16 if config.dtype == "bfloat16" else None
        task = env.task
        self.policy = ActorCritic(self.config, task.num_observations, task.action_space, env.dtype, network_dtype)
        self.noise = ActionNoise(task, config.seed, env.dtype)
        self.dealer = Dealer(config.seed, self.config.num_mini_batches)
        self.optimizer = optax.scale_by_adam()
        widest = max((*self.config.actor_hidden_dims, *self.config.critic_hidden_dims), default=1)
        self.chunk_size = samples_per_pass(self.config.chunk_size, widest, env.dtype)

    # --- what the harness calls ----------------------------------------------------------------------------------

    def setup(self, key: Array, env_ids: Array) -> TrainState:
        """Return a new policy, and this rank's envs at their start."""
        parameters = self.policy.initialise(key)
        sizes = self.env.task.num_observations
        counter = jnp.zeros((), jnp.int64)
        replicated = PpoState(
            weights=Weights(parameters, new_normalizer(sizes["actor"]), new_normalizer(sizes["critic"])),
            optimizer=self.optimizer.init(parameters),
            learning_rate=jnp.asarray(self.config.learning_rate, jnp.float32),
            iteration=counter,
            num_steps=counter,
            env_steps=counter,
        )
        memory = _with_envs_first(self.policy.initial_state(env_ids.shape[0]))
        return TrainState(replicated, local_parameters(PpoEnvs(self.env.reset(env_ids), memory)))

    def step(self, state: TrainState) -> tuple[TrainState, Metrics]:
        """Collect a rollout, estimate, update, merge the normalisers."""
        before: PpoState = state.replicated
        memory = _with_envs_first(state.sharded.memory)
        collected = self._collect(before, state.sharded.env, memory.actor)
        samples = self._prepare(before.weights, collected, memory.critic)
        update = self._update(before, samples, memory, collected.env.env_ids)
        after, metrics = self._account(before, collected, samples, update)
        memory = PolicyState(collected.actor_state, samples.critic_state)
        return TrainState(after, PpoEnvs(collected.env, _with_envs_first(memory))), metrics

    def evaluate(self, state: TrainState, env_ids: Array) -> Metrics:
        """Return means over whole episodes with the most likely actions."""
        return evaluation.evaluate(self, state.replicated, env_ids, self.evaluation_env)

    def act(self, replicated: PpoState, observations: Observations, memory: Array) -> tuple[Array, Array]:
        """Return the most likely actions and the next memory for raw observations.

        Actions are ``(num_envs, size)``, or ``(num_envs,)`` int32 if discrete. The memory, ``(num_envs, num_parts,
        size)``, is that of ``initial_memory`` or of the last call; zeros where an episode begins.
        """
        weights = replicated.weights
        inputs = normalise(observations["actor"].astype(self.env.dtype), weights.actor_normalizer)
        distribution, memory = self.policy.act(weights.parameters, inputs, memory.swapaxes(0, 1))
        return distribution.mode(), memory.swapaxes(0, 1)

    def initial_memory(self, num_envs: int) -> Array:
        """Return the actor's memory at the start of an episode, ``(num_envs, num_parts, size)``."""
        return _with_envs_first(self.policy.initial_state(num_envs)).actor

    def weights(self, replicated: PpoState) -> Weights:
        """Return parameters and normalisers."""
        return replicated.weights

    def with_weights(self, replicated: PpoState, weights: Weights) -> PpoState:
        """Return the state with other parameters and normalisers, and all else as it was."""
        return replicated._replace(weights=weights)

    def retuned(self, replicated: PpoState, before: Mapping[str, Any]) -> PpoState:
        """Begin anew with a learning rate that the user has changed; otherwise the schedule goes on."""
        if before["agent"]["learning_rate"] == self.config.learning_rate:
            return replicated
        return replicated._replace(learning_rate=jnp.asarray(self.config.learning_rate, jnp.float32))

    # --- the phases of an iteration ------------------------------------------------------------------------------

    def _collect(self, before: PpoState, env_state: EnvState, actor_state: jax.Array) -> Collected:
        num_steps, weights = self.config.num_steps_per_env, before.weights
        num_steps_before = before.num_steps.astype(jnp.int32)  # which wraps, as the streams' counters do
        return collect(
            self.env,
            lambda observations, memory: self.policy.act(
                weights.parameters, normalise(observations["actor"], weights.actor_normalizer), memory
            ),
            env_state,
            actor_state,
            self.env.noise(env_state.env_ids, num_steps_before + 1, num_steps),
            self.noise.draw(env_state.env_ids, num_steps_before, num_steps),
        )

    def _prepare(self, weights: Weights, collected: Collected, critic_state: jax.Array) -> Samples:
        """Normalise observations, estimate advantages and standardise them over all ranks."""
        config, rollout = self.config, collected.rollout
        is_real = jnp.broadcast_to(collected.env.env_ids >= 0, rollout.rewards.shape)
        critic = CriticInputs(
            observations=normalise(rollout.critic_observations, weights.critic_normalizer),
            final_observations=normalise(rollout.final_critic_observations, weights.critic_normalizer),
            last_observations=normalise(collected.env.observations["critic"], weights.critic_normalizer),
            truncated=rollout.truncated,
            done=rollout.done,
        )
        values, next_values, critic_state = rollout_values(
            self.policy.critic, weights.parameters["critic"], critic, critic_state, self.chunk_size
        )
        advantages = generalised_advantages(
            rollout.rewards, values, next_values, rollout.terminated, rollout.done, config.gamma, config.lam
        )
        raw = (rollout.actor_observations, rollout.critic_observations, advantages[..., None])
        moments = merge_over_ranks([Moments.of(samples, is_real) for samples in raw])
        actor_moments, critic_moments, advantage_moments = moments
        targets = advantages + values
        if config.normalize_advantages:
            advantages = standardise(advantages, advantage_moments)
        batch = Batch(
            actor_observations=normalise(rollout.actor_observations, weights.actor_normalizer),
            critic_observations=critic.observations,
            distributions=rollout.distributions,
            actions=rollout.actions,
            log_probs=rollout.log_probs,
            values=values,
            advantages=advantages,
            targets=targets,
            done=rollout.done,
            weights=is_real.astype(rollout.rewards.dtype),
        )
        nonfinite = diagnosis.find_nonfinite(weights.parameters, rollout, batch)
        return Samples(batch, actor_moments, critic_moments, critic_state, nonfinite)

    def _update(self, before: PpoState, samples: Samples, memory: PolicyState, env_ids: jax.Array) -> UpdateResult:
        """Run all epochs over the samples; ``memory`` is that of the start of the rollout."""
        config, packed = self.config, PackedBatch(samples.batch)
        num_steps, num_envs = samples.batch.advantages.shape
        first_epoch = (before.iteration * config.num_learning_epochs).astype(jnp.int32)
        if self.policy.recurrent:
            indices = self.dealer.sequence_indices(env_ids, first_epoch, config.num_learning_epochs)
            chunk_size, past_the_end = max(1, self.chunk_size // num_steps), num_envs
        else:
            indices = self.dealer.sample_indices(env_ids, first_epoch, config.num_learning_epochs, num_steps)
            chunk_size, past_the_end = self.chunk_size, num_steps * num_envs
        own_bad = samples.nonfinite.any()

        def one_minibatch(learner: _Learner, indices: jax.Array) -> tuple[_Learner, tuple[jax.Array, jax.Array]]:
            chunks = in_chunks(indices, chunk_size, past_the_end)
            mean = self._mean_gradients(nested(learner.parameters), packed, memory, chunks, own_bad)
            return self._take_step(learner, mean), (mean.riders, mean.norm)

        flat, nested = ravel_pytree(before.weights.parameters)
        moments = {name: ravel_pytree(getattr(before.optimizer, name))[0] for name in ("mu", "nu")}
        # False everywhere, and known only once the moments have been exchanged: collectives that do not follow from one
        # another might overtake one another, and XLA on a CPU would take the one for the other.
        nonfinite = jnp.broadcast_to(jnp.isnan(samples.actor_moments.count), axis_size())
        start = _Learner(flat, before.optimizer._replace(**moments), before.learning_rate, nonfinite)
        learner, (riders, norms) = jax.lax.scan(one_minibatch, start, indices)
        return UpdateResult(
            parameters=nested(learner.parameters),
            optimizer=learner.optimizer._replace(mu=nested(learner.optimizer.mu), nu=nested(learner.optimizer.nu)),
            learning_rate=learner.learning_rate,
            nonfinite=learner.nonfinite,
            riders=riders.mean(0),
            gradient_norm=norms.mean(),
        )

    def _mean_gradients(
        self,
        parameters: Parameters,
        packed: PackedBatch,
        memory: PolicyState,
        chunks: jax.Array,
        is_bad: jax.Array,
    ) -> MeanGradients:
        """Add up a minibatch chunk by chunk, ``chunks (num_chunks, size)`` of indices, then over ranks."""
        own = local_parameters(parameters)

        def one_chunk(sums: tuple[Any, ...], indices: jax.Array) -> tuple[tuple[Any, ...], None]:
            if self.policy.recurrent:
                batch = packed.sequences(indices)
                start = PolicyState(*(part.at[:, indices].get(mode="fill", fill_value=0.0) for part in memory))
            else:
                batch, start = packed.samples(indices), memory
            gradients, riders = jax.grad(self._loss, has_aux=True)(own, batch, start)
            new = (gradients, riders, batch.weights.sum())
            return jax.tree.map(jnp.add, sums, new), None

        dtype = self.env.dtype
        nothing = (jax.tree.map(jnp.zeros_like, own), jnp.zeros(len(RIDERS), dtype), jnp.zeros((), dtype))
        (gradients, riders, count), _ = jax.lax.scan(one_chunk, local_parameters(nothing), chunks)
        return mean_gradients(gradients, riders, count, is_bad)

    def _loss(self, parameters: Parameters, batch: Batch, start: PolicyState) -> tuple[jax.Array, jax.Array]:
        """Return the loss and the riders, all summed over the samples of the batch."""
        config = self.config
        distribution, value = self.policy.evaluate(
            parameters, batch.actor_observations, batch.critic_observations, start, batch.done
        )
        log_prob = distribution.log_prob(batch.actions)
        surrogate = surrogate_loss(log_prob, batch.log_probs, batch.advantages, config.clip_param)
        error = value_loss(value, batch.values, batch.targets, config.clip_param, config.use_clipped_value_loss)
        kl = distribution.kl_from(self.policy.unpack(batch.distributions))
        parts = (jax.lax.stop_gradient(kl), surrogate, error, distribution.entropy())
        kl, surrogate, error, entropy = (jnp.where(batch.weights > 0, part, 0.0).sum() for part in parts)
        loss = surrogate + config.value_loss_coef * error - config.entropy_coef * entropy
        return loss, jax.lax.stop_gradient(jnp.stack((kl, surrogate, error, entropy)))

    def _take_step(self, before: _Learner, mean: MeanGradients) -> _Learner:
        """Adapt the learning rate, clip and step; change nothing from the first bad minibatch on."""
        config = self.config
        nonfinite = before.nonfinite | mean.nonfinite
        rate = before.learning_rate
        if config.schedule == "adaptive":
            rate = adapted_learning_rate(
                rate,
                mean.riders[RIDERS.index("kl")],
                config.desired_kl,
                config.min_learning_rate,
                config.max_learning_rate,
            )
        gradients = mean.flat * clip_scale(mean, config.max_grad_norm)
        step, optimizer = self.optimizer.update(gradients, before.optimizer)
        after = _Learner(before.parameters - rate.astype(step.dtype) * step, optimizer, rate, nonfinite)
        chosen: _Learner = optax.tree_utils.tree_where(nonfinite.any(), before._replace(nonfinite=nonfinite), after)
        return chosen

    def _account(
        self, before: PpoState, collected: Collected, samples: Samples, update: UpdateResult
    ) -> tuple[PpoState, Metrics]:
        """Bring the counters up to date and reduce what there is to tell: one exchange."""
        num_ranks = axis_size()
        own_steps = (collected.env.env_ids >= 0).sum(dtype=jnp.float64) * self.config.num_steps_per_env
        is_own = jnp.arange(num_ranks, dtype=jnp.int32) == axis_index()
        # With the flags of the update in it, this exchange follows from those of the update; see there.
        own_checks = jnp.append(samples.nonfinite, (is_own & update.nonfinite).any())
        own_table = is_own[:, None] & own_checks  # (num_ranks, num_checks)
        own = (collected.finished, jnp.stack((collected.num_diverged, own_steps)), own_table.reshape(-1))
        sums = psum(jnp.concatenate([part.astype(jnp.float64) for part in own]))
        episodes, (num_diverged, num_steps), table = jnp.split(sums, _ends(own))
        is_good = ~update.nonfinite.any()
        after = PpoState(
            weights=self._merge_normalizers(before.weights, samples, is_good)._replace(parameters=update.parameters),
            optimizer=update.optimizer,
            learning_rate=update.learning_rate,
            iteration=before.iteration + is_good,
            num_steps=before.num_steps + is_good * self.config.num_steps_per_env,
            env_steps=before.env_steps + (is_good * num_steps).astype(jnp.int64),
        )
        kl, *losses = update.riders
        metrics = {
            "iteration": after.iteration,
            "env_steps": after.env_steps,
            "num_steps": num_steps.astype(jnp.int64),
            **self.env.summarise(episodes),
            "kl": kl,
            **{f"loss/{name}": value for name, value in zip(RIDERS[1:], losses, strict=True)},
            "learning_rate": after.learning_rate,
            "gradient_norm": update.gradient_norm,
            "num_diverged": num_diverged.astype(jnp.int64),
            NONFINITE: table.reshape(num_ranks, -1) > 0,
        }
        return after, metrics

    def _merge_normalizers(self, weights: Weights, samples: Samples, is_good: jax.Array) -> Weights:
        """Let the normalisers take up the rollout's observations, unless something was not finite."""
        if not self.config.normalize_observations:
            return weights
        actor = weights.actor_normalizer.merge(samples.actor_moments)
        critic = weights.critic_normalizer.merge(samples.critic_moments)
        merged = weights._replace(actor_normalizer=actor, critic_normalizer=critic)
        chosen: Weights = optax.tree_utils.tree_where(is_good, merged, weights)
        return chosen


def _ends(parts: tuple[jax.Array, ...]) -> list[int]:
    """Return where each of some vectors ends when they are joined, without the last."""
    return list(itertools.accumulate(part.shape[0] for part in parts[:-1]))


def _with_envs_first(memory: PolicyState) -> PolicyState:
    """Return memories with the axes of parts and envs exchanged, which is its own inverse."""
    return PolicyState(*(part.swapaxes(0, 1) for part in memory))
