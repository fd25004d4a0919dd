"""Soft actor-critic (Haarnoja et al. 2018, arXiv:1812.05905), written once for any number of devices."""

from math import inf
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax

from lockstep.core.errors import UsageError
from lockstep.core.rng import Stream
from lockstep.core.types import Observations
from lockstep.envs.jax_env import EnvNoise, EnvState, JaxEnv
from lockstep.learn.config import SacConfig, TrainConfig
from lockstep.learn.jax import evaluation
from lockstep.learn.jax.algorithm import NONFINITE, Metrics, TrainState
from lockstep.learn.jax.networks import Parameters
from lockstep.learn.jax.normalizer import new_normalizer, normalise
from lockstep.learn.jax.replay import Experience, Layout, SampleNoise, Sampler, empty_memory, remember
from lockstep.learn.jax.rollout import ActionNoise
from lockstep.learn.jax.sac_networks import SacNetworks, SacParameters
from lockstep.learn.jax.sac_update import RIDERS, Batch, Learner, Progress, SacUpdate
from lockstep.learn.jax.statistics import (
    Moments,
    after,
    axis_index,
    axis_size,
    local_parameters,
    merge_over_ranks,
    psum,
)


class Counters(NamedTuple):
    """How far the training is."""

    iteration: jax.Array  # () int64
    env_steps: jax.Array  # () int64 env steps of all envs of all ranks
    num_steps: jax.Array  # () int64 env steps that each env has made: where its random streams go on
    num_updates: jax.Array  # () int64 gradient steps: where those of batches go on


class SacState(NamedTuple):
    """What is the same on every rank."""

    learner: Learner
    normalizers: dict[str, Moments]  # of each group of observations; frozen during an iteration
    counters: Counters


class SacEnvs(NamedTuple):
    """What is a rank's own: every array leads with its envs."""

    env: EnvState
    replay: jax.Array  # (num_envs, capacity, width)


class Weights(NamedTuple):
    """What makes a policy, and the critics that go with it: all that ``--checkpoint`` takes over."""

    parameters: SacParameters
    target_critics: Parameters
    normalizers: dict[str, Moments]


class Collected(NamedTuple):
    """What the envs gave in one iteration."""

    env: EnvState
    steps: Experience  # (num_steps, num_envs) raw
    finished: jax.Array  # (num_terms + 2,) float64 sums over this rank's episodes that ended, as in Transition
    num_diverged: jax.Array  # () int32


class _Chance(NamedTuple):
    """What is random in a rollout, for each step."""

    env: EnvNoise
    normal: jax.Array  # (num_steps, num_envs, size) for the policy
    random_action: jax.Array  # (num_steps, num_envs, size) instead of the policy's
    is_random: jax.Array  # (num_steps,) bool


class Sac:
    """The algorithm ``sac``, for continuous actions; see ``learn/jax/algorithm.py`` for what each method is.

    Args:
        config: of the run.
        env: makes and steps this rank's envs.
        evaluation_env: those of evaluations; None: there are none.

    Raises:
        UsageError: the task has discrete actions.
    """

    CHECKS = (
        "parameters",
        "actor_observations",
        "critic_observations",
        "actions",
        "rewards",
        "next_actor_observations",
        "next_critic_observations",
        "gradients",
    )

    def __init__(self, config: TrainConfig, env: JaxEnv, evaluation_env: JaxEnv | None) -> None:
        space, sizes, dtype = env.task.action_space, env.task.num_observations, env.dtype
        if space.kind != "continuous":
            raise UsageError(
                f"algorithm sac needs continuous actions, and those of task {config.task} are {space.kind} with these "
                "settings; use --algorithm ppo"
            )
        if space.limit == inf:
            raise UsageError(
                f"algorithm sac chooses actions within bounds, and those of task {config.task} have none; use "
                "--algorithm ppo"
            )
        self.run_config, self.config = config, config.agent_as(SacConfig)
        self.env, self.evaluation_env = env, evaluation_env
        target_entropy = self.config.target_entropy
        self.networks = SacNetworks(
            self.config, sizes, space.size, dtype, jnp.bfloat16 if config.dtype == "bfloat16" else None
        )
        self.update = SacUpdate(
            self.config, self.networks, -float(space.size) if target_entropy is None else target_entropy
        )
        self.layout = Layout(sizes, space.size, dtype)
        self.action_noise = ActionNoise(env.task, config.seed, dtype)
        self.sample_noise = SampleNoise(config.seed, 2 * space.size, dtype)
        self._random_actions = Stream(config.seed, "train/random_action", jnp)

    # --- what the harness calls ----------------------------------------------------------------------------------

    def setup(self, key: jax.Array, env_ids: jax.Array) -> TrainState:
        """Return a new learner, and this rank's envs at their start with an empty replay."""
        counter = jnp.zeros((), jnp.int64)
        replicated = SacState(
            learner=self.update.initialise(key),
            normalizers={name: new_normalizer(size) for name, size in self.env.task.num_observations.items()},
            counters=Counters(counter, counter, counter, counter),
        )
        capacity = self.config.capacity_per_env(self._total_envs())
        replay = empty_memory(env_ids.shape[0], capacity, self.layout)
        return TrainState(replicated, local_parameters(SacEnvs(self.env.reset(env_ids), replay)))

    def step(self, state: TrainState) -> tuple[TrainState, Metrics]:
        """Collect ``num_steps_per_env`` steps of every env, then take ``num_updates`` gradient steps."""
        before: SacState = state.replicated
        counters = before.counters
        collected = self._collect(before, state.sharded.env)
        replay = remember(state.sharded.replay, self.layout.pack(collected.steps), counters.num_steps)
        nonfinite = self._find_nonfinite(before.learner.parameters, collected)
        env_steps = counters.env_steps + self.config.num_steps_per_env * self._total_envs()
        num_updates = jnp.where(env_steps >= self.config.learning_starts, self.config.num_updates, 0)
        progress = self._learn(before, replay, collected.env.env_ids, num_updates, nonfinite.any())
        after, metrics = self._account(before, collected, progress, nonfinite, num_updates)
        return TrainState(after, SacEnvs(collected.env, replay)), metrics

    def evaluate(self, state: TrainState, env_ids: jax.Array) -> Metrics:
        """Return means over whole episodes with the most likely actions."""
        return evaluation.evaluate(self, state.replicated, env_ids, self.evaluation_env)

    def act(self, replicated: SacState, observations: Observations, memory: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the actions ``(num_envs, size)`` in the middle of the policy, and the empty memory."""
        inputs = normalise(observations["actor"].astype(self.env.dtype), replicated.normalizers["actor"])
        policy = self.networks.policy(replicated.learner.parameters["actor"], inputs)
        return jnp.tanh(policy.mode()), memory

    def initial_memory(self, num_envs: int) -> jax.Array:
        """Return a memory that holds nothing, ``(num_envs, 0, 0)``."""
        return jnp.zeros((num_envs, 0, 0), self.env.dtype)

    def weights(self, replicated: SacState) -> Weights:
        """Return parameters, target critics and normalisers."""
        learner = replicated.learner
        return Weights(learner.parameters, learner.target_critics, replicated.normalizers)

    def with_weights(self, replicated: SacState, weights: Weights) -> SacState:
        """Return the state with other parameters, target critics and normalisers, and all else as it was."""
        learner = replicated.learner._replace(parameters=weights.parameters, target_critics=weights.target_critics)
        return replicated._replace(learner=learner, normalizers=weights.normalizers)

    # --- the phases of an iteration ------------------------------------------------------------------------------

    def _total_envs(self) -> int:
        """Return the number of real envs of all ranks, known while compiling."""
        return sum(self.run_config.envs_by_rank(axis_size()))

    def _collect(self, before: SacState, env_state: EnvState) -> Collected:
        actor, normalizer = before.learner.parameters["actor"], before.normalizers["actor"]

        def one_step(state: EnvState, chance: _Chance) -> tuple[EnvState, tuple[Experience, jax.Array, jax.Array]]:
            observations = state.observations
            policy = self.networks.policy(actor, normalise(observations["actor"], normalizer))
            own_action = jnp.tanh(policy.sample(chance.normal))
            action = jnp.where(chance.is_random, chance.random_action, own_action)
            state, transition = self.env.step(state, action, chance.env)
            # Nobody asks what comes after an end for good, and a diverged env has nothing sensible there.
            is_over = transition.terminated[:, None]
            final = {name: jnp.where(is_over, 0.0, rows) for name, rows in transition.final_observations.items()}
            steps = Experience(
                actor_observations=observations["actor"],
                critic_observations=observations["critic"],
                actions=action,
                rewards=transition.reward,
                terminated=transition.terminated,
                next_actor_observations=final["actor"],
                next_critic_observations=final["critic"],
            )
            return state, (steps, transition.finished, transition.num_diverged)

        chance = self._chance(before.counters, env_state.env_ids)
        env_state, (steps, finished, num_diverged) = jax.lax.scan(one_step, env_state, chance)
        return Collected(env_state, steps, finished.sum(0), num_diverged.sum(dtype=jnp.int32))

    def _chance(self, counters: Counters, env_ids: jax.Array) -> _Chance:
        """Return what is random in the next rollout; actions are, until all envs together have made enough steps."""
        env, num_steps = self.env, self.config.num_steps_per_env
        first = counters.num_steps.astype(jnp.int32)  # which wraps, as the streams' counters do
        uniform = self._random_actions.uniform(
            self._random_actions.counters(first, num_steps), env_ids, env.task.action_space.size, env.dtype
        )
        env_steps = counters.env_steps + jnp.arange(num_steps, dtype=jnp.int64) * self._total_envs()
        return _Chance(
            env=env.noise(env_ids, first + 1, num_steps),
            normal=self.action_noise.draw(env_ids, first, num_steps),
            random_action=2.0 * uniform - 1.0,
            is_random=env_steps < self.config.learning_starts,
        )

    def _learn(
        self, before: SacState, replay: jax.Array, env_ids: jax.Array, num_updates: jax.Array, is_bad: jax.Array
    ) -> Progress:
        """Take gradient steps on what the replay holds."""
        counters, config = before.counters, self.config
        sampler = Sampler(self.run_config.seed, self._total_envs(), config.batch_size)
        num_remembered = jnp.minimum(counters.num_steps + config.num_steps_per_env, replay.shape[1])

        def one_update(index: jax.Array, progress: Progress) -> Progress:
            update = (counters.num_updates + index).astype(jnp.int32)
            places = sampler.draw(env_ids, update, num_remembered)
            steps = self._normalised(self.layout.unpack(places.of(replay)), before.normalizers)
            noise = self.sample_noise.draw(places, update).reshape(steps.rewards.shape[0], 2, -1)
            return self.update.gradient_step(progress, Batch(steps, noise, places.weights(replay.dtype)), is_bad)

        return cast(Progress, jax.lax.fori_loop(0, num_updates, one_update, self.update.start(before.learner)))

    def _normalised(self, steps: Experience, normalizers: dict[str, Moments]) -> Experience:
        actor, critic = normalizers["actor"], normalizers["critic"]
        return steps._replace(
            actor_observations=normalise(steps.actor_observations, actor),
            critic_observations=normalise(steps.critic_observations, critic),
            next_actor_observations=normalise(steps.next_actor_observations, actor),
            next_critic_observations=normalise(steps.next_critic_observations, critic),
        )

    def _find_nonfinite(self, parameters: SacParameters, collected: Collected) -> jax.Array:
        """Return ``(num_checks - 1,)`` bool: which of this rank's tensors are not finite; padding does not count."""
        is_real = collected.env.env_ids >= 0

        def is_bad(samples: jax.Array) -> jax.Array:
            is_finite = jnp.isfinite(samples).reshape(*samples.shape[:2], -1).all(-1)  # (num_steps, num_envs)
            return (~is_finite & is_real).any()

        bad_parameters = jnp.stack([~jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(parameters)]).any()
        return jnp.stack((bad_parameters, *(is_bad(getattr(collected.steps, name)) for name in self.CHECKS[1:-1])))

    def _account(
        self, before: SacState, collected: Collected, progress: Progress, nonfinite: jax.Array, num_updates: jax.Array
    ) -> tuple[SacState, Metrics]:
        """Bring counters and normalisers up to date and reduce what there is to tell."""
        table = jnp.where(jnp.arange(axis_size(), dtype=jnp.int32)[:, None] == axis_index(), nonfinite, False)
        own = (collected.finished, collected.num_diverged.reshape(1), table.reshape(-1))
        # Nothing of this may be sent while another rank is still in the loop of gradient steps, which sends as well.
        own_sums = after(jnp.concatenate([part.astype(jnp.float64) for part in own]), progress.riders)
        sums = psum(own_sums)
        num_sums = collected.finished.shape[0]
        checks = jnp.concatenate((sums[num_sums + 1 :].reshape(table.shape) > 0, progress.nonfinite[:, None]), axis=1)
        is_good = ~checks.any()
        counters, num_steps = before.counters, self.config.num_steps_per_env
        new_steps = jnp.full((), num_steps * self._total_envs(), jnp.int64)
        reached = Counters(
            iteration=counters.iteration + 1,
            env_steps=counters.env_steps + new_steps,
            num_steps=counters.num_steps + num_steps,
            num_updates=counters.num_updates + num_updates,
        )
        merged = self._merge_normalizers(before.normalizers, collected, progress)
        after_step = SacState(progress.learner, merged, reached)
        chosen: SacState = optax.tree_utils.tree_where(is_good, after_step, before)
        metrics = {
            "iteration": chosen.counters.iteration,
            "env_steps": chosen.counters.env_steps,
            "num_steps": new_steps,
            **self.env.summarise(sums[:num_sums]),
            **_update_metrics(progress, num_updates),
            "learning_rate": jnp.full((), self.config.learning_rate, jnp.float64),
            "num_diverged": sums[num_sums].astype(jnp.int64),
            NONFINITE: checks,
        }
        return chosen, metrics

    def _merge_normalizers(
        self, normalizers: dict[str, Moments], collected: Collected, progress: Progress
    ) -> dict[str, Moments]:
        """Return the normalisers with the observations of all ranks' new steps in them, after the gradient steps."""
        if not self.config.normalize_observations:
            return normalizers
        steps = collected.steps
        is_real = jnp.broadcast_to(collected.env.env_ids >= 0, steps.rewards.shape)
        raw = {"actor": steps.actor_observations, "critic": steps.critic_observations}
        own = [Moments.of(raw[name], is_real) for name in normalizers]
        moments = merge_over_ranks(after(own, progress.riders))
        return {name: normalizers[name].merge(new) for name, new in zip(normalizers, moments, strict=True)}


def _update_metrics(progress: Progress, num_updates: jax.Array) -> dict[str, Any]:
    """Return means over an iteration's gradient steps; NaN without any."""
    count = jnp.where(num_updates > 0, num_updates, jnp.nan).astype(progress.riders.dtype)
    means = dict(zip(RIDERS, progress.riders / count, strict=True))
    actor_norm, critic_norm = progress.gradient_norms / count
    return {
        **{f"loss/{name}": means[name] for name in ("critic", "actor", "temperature")},
        "entropy": means["entropy"],
        "value": means["value"],
        "temperature": jnp.exp(progress.learner.parameters["log_temperature"]),
        "gradient_norm/actor": actor_norm,
        "gradient_norm/critic": critic_norm,
        "num_updates": num_updates,
    }
