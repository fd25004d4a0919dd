"""A batch of envs in JAX: engine and task, auto-reset, time limits, all as pure functions of an explicit state."""

from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from lockstep.core.rng import Stream
from lockstep.core.types import Observations, Physics, PureEngine, State, Task
from lockstep.envs.config import EnvConfig

Tree = TypeVar("Tree")


class EnvState(NamedTuple):
    """All there is to know of a batch of envs; every array leads with ``num_envs``, so it can be split over ranks."""

    env_ids: jax.Array  # (num_envs,) int32 global ids; -1 is padding, which counts nowhere
    physics: Physics  # of the engine
    state: State  # what the task sees
    observations: Observations  # each (num_envs, num_observations)
    episode_length: jax.Array  # (num_envs,) int32 env steps since the episode began
    is_whole: jax.Array  # (num_envs,) bool: the episode began at its beginning
    running: jax.Array  # (num_envs, num_terms + 1) float64 sums of the episode so far: terms, then its length


class EnvNoise(NamedTuple):
    """The randomness of one env step, or of ``num_steps``: uniform in [0, 1)."""

    reset: jax.Array  # ([num_steps,] num_envs, task.num_reset_noise)
    step: jax.Array  # ([num_steps,] num_envs, task.num_step_noise)


class Transition(NamedTuple):
    """What one env step gave."""

    observations: Observations  # each (num_envs, num_observations): of the new episode where one ended
    reward: jax.Array  # (num_envs,)
    terms: jax.Array  # (num_envs, num_terms): reward terms, then metrics, in the order of the task
    terminated: jax.Array  # (num_envs,) bool: ended for good, by the task or because physics diverged
    truncated: jax.Array  # (num_envs,) bool: ended by the time limit alone; its value must be bootstrapped
    final_observations: Observations  # as observations, but of the step itself, before any reset
    finished: jax.Array  # (num_terms + 2,) float64 sums over whole episodes that ended here: terms, length, count
    num_diverged: jax.Array  # () int32 envs whose physics failed; of padding nothing counts, here or in finished

    @property
    def done(self) -> jax.Array:
        """``(num_envs,)`` bool: an episode ended here."""
        return self.terminated | self.truncated


class JaxEnv:
    """Simulated worlds of one task, whose state is an argument and a result of every method.

    The same actions lead to the same observations, rewards and ends as in ``TorchEnv``, from the same random bits. The
    methods may be traced, by ``jax.jit``, ``jax.lax.scan`` and ``jax.shard_map``; they need no collective, and what an
    env goes through depends on its global id alone, not on who shares its batch. Whoever steps counts the steps: the
    noise of step k = 1, 2, ... is that of counter k, ``reset`` uses counter 0.

    Args:
        task: the pure functions of the task.
        engine: steps the physics.
        config: time limit and the like.
        seed: the run's seed; streams are keyed by it, ``streams`` and the global env id.
        dtype: of all floats handed out but the sums: float32 or float64.
        streams: prefix of the streams' purposes; an evaluation has its own.
    """

    def __init__(
        self, task: Task, engine: PureEngine, config: EnvConfig, *, seed: int, dtype: Any, streams: str = "train"
    ) -> None:
        self.task, self.engine, self.config, self.seed = task, engine, config, seed
        self.dtype = jnp.dtype(dtype)
        self._reset_stream = Stream(seed, f"{streams}/reset", jnp)
        self._step_stream = Stream(seed, f"{streams}/step", jnp)
        self._length_stream = Stream(seed, f"{streams}/initial_episode_length", jnp)

    # --- the steps of an episode ---------------------------------------------------------------------------------

    def noise(self, env_ids: jax.Array, first_step: int | jax.Array, num_steps: int) -> EnvNoise:
        """Return the noise of ``num_steps`` steps, each array ``(num_steps, num_envs, columns)``.

        Args:
            env_ids: ``(num_envs,)`` int32 global ids.
            first_step: counter of the first of the steps; an int32 may be traced.
            num_steps: how many.
        """
        counters = self._step_stream.counters(first_step, num_steps)
        return EnvNoise(
            reset=self._reset_stream.uniform(counters, env_ids, self.task.num_reset_noise, self.dtype),
            step=self._step_stream.uniform(counters, env_ids, self.task.num_step_noise, self.dtype),
        )

    def reset(self, env_ids: jax.Array) -> EnvState:
        """Return every env at the start of its first episode, counter 0 of its streams.

        Args:
            env_ids: ``(num_envs,)`` int32 global ids, -1 for padding.

        Raises:
            ValueError: JAX has no float64 here, or the task's observations have another shape than it says.
        """
        self._require_double()
        num_envs = env_ids.shape[0]
        noise = jax.tree.map(lambda table: table[0], self.noise(env_ids, 0, 1))
        everywhere = varying_like(env_ids, jnp.ones(num_envs, dtype=bool))
        physics = varying_like(env_ids, self.engine.start(env_ids))
        physics, state = self._initial_state(physics, everywhere, noise.reset)
        observations = self._observations(state, noise.step)
        self._check_observations(observations, num_envs)
        num_terms = len(self.task.reward_terms) + len(self.task.metric_terms)
        episode_length = self._initial_episode_lengths(env_ids)
        return EnvState(
            env_ids=env_ids,
            physics=physics,
            state=state,
            observations=varying_like(env_ids, observations),
            episode_length=varying_like(env_ids, episode_length),
            is_whole=varying_like(env_ids, episode_length == 0),
            running=varying_like(env_ids, jnp.zeros((num_envs, num_terms + 1), dtype=jnp.float64)),
        )

    def step(self, state: EnvState, action: jax.Array, noise: EnvNoise) -> tuple[EnvState, Transition]:
        """Apply one action per env: ``(num_envs, size)`` floats, or ``(num_envs,)`` integers if discrete.

        Args:
            state: of the envs.
            action: as the policy gave it.
            noise: of this step, each array ``(num_envs, columns)``.

        Raises:
            ValueError: the actions have another shape.
        """
        self._check_action(action, state.env_ids.shape[0])
        physics, after, diverged = self._advance(state, action, noise.step)
        terms = self._terms(after, action)
        # A diverged env has no meaningful reward; it must not reach the sums either.
        terms = jnp.where(diverged[:, None], 0, terms)
        terminated = self.task.terminations(jnp, after) | diverged
        episode_length = state.episode_length + 1
        truncated = (episode_length >= self.config.max_episode_steps) & ~terminated
        done = terminated | truncated
        final_observations = self._observations(after, noise.step)
        running, finished = count(state, terms, done)
        physics, initial = self._initial_state(physics, done, noise.reset)
        after = rows_where(done, initial, after)
        observations = rows_where(done, self._observations(after, noise.step), final_observations)
        new_state = EnvState(
            env_ids=state.env_ids,
            physics=physics,
            state=after,
            observations=observations,
            episode_length=jnp.where(done, 0, episode_length),
            is_whole=state.is_whole | done,
            running=running,
        )
        num_diverged = jnp.sum(diverged & (state.env_ids >= 0), dtype=jnp.int32)
        reward = terms[:, : len(self.task.reward_terms)].sum(1)
        return new_state, Transition(
            observations, reward, terms, terminated, truncated, final_observations, finished, num_diverged
        )

    def summarise(self, sums: jax.Array) -> dict[str, jax.Array]:
        """Turn sums over finished episodes into metrics by name, as a log line has them.

        Args:
            sums: ``(num_terms + 2,)`` float64 as ``Transition.finished`` has them, of all steps and ranks added up.

        Returns:
            Scalars: ``mean_return``, ``mean_episode_length`` in env steps, ``num_episodes`` (int64); ``reward/<term>``,
            the mean over episodes of the term's sum; ``metric/<name>``, the mean over env steps. Without an episode
            means are NaN.
        """
        reward_terms, metric_terms = self.task.reward_terms, self.task.metric_terms
        count = sums[-1]
        means = sums[:-1] / jnp.where(count > 0, count, jnp.nan)
        rewards, metrics, length = means[: len(reward_terms)], means[len(reward_terms) : -1], means[-1]
        return {
            "mean_return": rewards.sum(),
            "mean_episode_length": length,
            "num_episodes": count.astype(jnp.int64),
            **{f"reward/{name}": mean for name, mean in zip(reward_terms, rewards, strict=True)},
            **{f"metric/{name}": mean / length for name, mean in zip(metric_terms, metrics, strict=True)},
        }

    def close(self) -> None:
        """Release the engine."""
        self.engine.close()

    def _advance(self, before: EnvState, action: jax.Array, step_noise: jax.Array) -> tuple[Physics, State, jax.Array]:
        ctrl = self.task.control(jnp, before.state, action).astype(self.dtype)
        push = self.task.push(jnp, before.state, step_noise)
        push = None if push is None else push.astype(self.dtype)
        physics, info = varying_like(before.env_ids, self.engine.step(before.physics, ctrl, push))
        state = State(
            qpos=info.qpos.astype(self.dtype),
            qvel=info.qvel.astype(self.dtype),
            ctrl=ctrl,
            sensordata=info.sensordata.astype(self.dtype),
            variables=before.state.variables,
        )
        after = self.task.advance(jnp, state, action, step_noise)
        # A task's constant in double precision must not make all that follows so.
        after = jax.tree.map(lambda new, old: new.astype(old.dtype), after, before.state)
        return physics, after, info.diverged

    def _terms(self, state: State, action: jax.Array) -> jax.Array:
        rewards, metrics = self.task.rewards(jnp, state, action), self.task.metrics(jnp, state, action)
        columns = [rewards[name] for name in self.task.reward_terms] + [
            metrics[name] for name in self.task.metric_terms
        ]
        return jnp.stack([column.astype(self.dtype) for column in columns], axis=1)

    def _initial_state(self, physics: Physics, mask: jax.Array, reset_noise: jax.Array) -> tuple[Physics, State]:
        """Put the envs of ``mask`` at a new start; return their physics and a state that is meant for those alone."""
        qpos, qvel, variables = self.task.reset(jnp, reset_noise)
        qpos, qvel = qpos.astype(self.dtype), qvel.astype(self.dtype)
        physics, sensordata = self.engine.reset(physics, mask, qpos, qvel)
        ctrl = jnp.zeros((mask.shape[0], self.engine.num_controls), dtype=self.dtype)
        state = State(qpos, qvel, ctrl, sensordata.astype(self.dtype), variables)
        return varying_like(mask, (physics, state))

    def _observations(self, state: State, step_noise: jax.Array) -> Observations:
        observations = self.task.observations(jnp, state, step_noise)
        return {name: array.astype(self.dtype) for name, array in observations.items()}

    def _initial_episode_lengths(self, env_ids: jax.Array) -> jax.Array:
        if not self.config.randomize_initial_episode_length:
            return jnp.zeros(env_ids.shape[0], dtype=jnp.int32)
        uniform = self._length_stream.uniform(self._length_stream.counters(0, 1), env_ids, 1, self.dtype)[0, :, 0]
        lengths: jax.Array = (uniform * self.config.max_episode_steps).astype(jnp.int32)
        return lengths

    # --- what the caller and the task have promised --------------------------------------------------------------

    def _require_double(self) -> None:
        if jax.dtypes.canonicalize_dtype(jnp.float64) != jnp.float64:
            raise ValueError("episodes are summed in float64, which JAX has switched off; enter jax.enable_x64(True)")

    def _check_action(self, action: jax.Array, num_envs: int) -> None:
        space = self.task.action_space
        shape = (num_envs, space.size) if space.kind == "continuous" else (num_envs,)
        if tuple(action.shape) != shape:
            raise ValueError(f"actions have shape {tuple(action.shape)}, not {shape}")

    def _check_observations(self, observations: Observations, num_envs: int) -> None:
        for name, size in self.task.num_observations.items():
            shape = tuple(observations[name].shape)
            if shape != (num_envs, size):
                raise ValueError(f"task gives observations '{name}' of shape {shape}, not ({num_envs}, {size})")


def count(state: EnvState, terms: jax.Array, done: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the running sums ``(num_envs, num_terms + 1)`` after a step, and those of the episodes it ended."""
    ones = jnp.ones_like(done, dtype=jnp.float64)[:, None]
    running = state.running + jnp.concatenate((terms.astype(jnp.float64), ones), axis=1)
    counted = (done & state.is_whole & (state.env_ids >= 0))[:, None]
    # Columns: the sum of each reward term, then the length, then 1 (so that adding columns counts episodes).
    columns = jnp.concatenate((running, ones), axis=1)
    finished = jnp.where(counted, columns, 0.0).sum(0)
    return jnp.where(done[:, None], 0.0, running), finished


def rows_where(mask: jax.Array, new: Tree, old: Tree) -> Tree:
    """Return ``new`` for the envs of ``mask`` and ``old`` for the others, in the dtypes of ``old``."""

    def choose(new_leaf: jax.Array, old_leaf: jax.Array) -> jax.Array:
        broadcast = mask.reshape(-1, *(1,) * (old_leaf.ndim - 1))
        return jnp.where(broadcast, new_leaf.astype(old_leaf.dtype), old_leaf)

    chosen: Tree = jax.tree.map(choose, new, old)
    return chosen


def varying_like(per_env: jax.Array, tree: Tree) -> Tree:
    """Return arrays ``(num_envs, ...)`` as they are, to ``jax.shard_map`` as different on every rank as ``per_env``.

    What a callback or a constant gives is the same everywhere as far as JAX knows, and a loop would refuse to have it
    replaced by what differs. The choice between equals carries the type; the compiler drops it.
    """
    mask = per_env == per_env

    def mark(leaf: jax.Array) -> jax.Array:
        return jax.lax.select(jnp.broadcast_to(mask.reshape(-1, *(1,) * (leaf.ndim - 1)), leaf.shape), leaf, leaf)

    marked: Tree = jax.tree.map(mark, tree)
    return marked
