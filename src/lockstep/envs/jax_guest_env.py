"""A batch of envs of a library of JAX: their own functions, with our resets, time limits and random streams."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp

from lockstep.core.errors import UsageError, in_one_line
from lockstep.core.rng import Stream
from lockstep.core.types import Array, Observations, Physics, State, StepInfo
from lockstep.envs.config import JaxGuestConfig
from lockstep.envs.jax_env import EnvNoise, EnvState, JaxEnv, Transition, count, rows_where, varying_like
from lockstep.envs.jax_guest import JaxGuestTask
from lockstep.sim.sealed import SealedProgram

_KEY_WORDS = 2
_RESETS_AT_ONCE = 16  # a sixteenth of the envs, and again until all that have ended are done


class _Stepped(NamedTuple):
    """What the sealed step of a batch gives; floats are float32."""

    physics: Physics  # of the new episode where one ended, as are the observations
    observations: Observations
    final_observations: Observations  # of the step itself
    terms: jax.Array  # (num_envs, num_terms)
    terminated: jax.Array  # (num_envs,) bool
    truncated: jax.Array  # (num_envs,) bool
    diverged: jax.Array  # (num_envs,) bool: something was not finite


class JaxGuestEnv(JaxEnv):
    """Envs of a library, as ``JaxEnv`` has our own: the same states, transitions and randomness.

    ``EnvState.physics`` holds the arrays of the library's own state by name, each ``(num_envs, ...)`` in the library's
    dtypes, so a checkpoint has all of an env; ``EnvState.state`` is empty. Whatever ends an episode, the next one
    begins in the same step, with the library's own reset and a key of the env's own. An env that gives an observation
    or a reward that is not finite counts as diverged: it ends, without a reward, and its final observations are those
    from before the step. A metric that is not finite counts as 0.

    Args:
        task: the env.
        config: time limit and the like.
        seed: the run's seed; streams are keyed by it, ``streams`` and the global env id.
        dtype: of all floats handed out but the sums; the env itself computes in float32.
        streams: prefix of the streams' purposes; an evaluation has its own.
    """

    def __init__(
        self, task: JaxGuestTask, config: JaxGuestConfig, *, seed: int, dtype: Any, streams: str = "train"
    ) -> None:
        limited = config.model_copy(update={"max_episode_steps": task.max_episode_steps})
        super().__init__(task, LibraryPhysics(), limited, seed=seed, dtype=dtype, streams=streams)
        self._guest = task.guest
        self._names: tuple[str, ...] = ()  # of the leaves of the library's state, known once a reset was traced
        self._structure: Any = None  # that they make
        self._start_batch, self._step_batch = SealedProgram(self._start), SealedProgram(self._advance_batch)

    def noise(self, env_ids: jax.Array, first_step: int | jax.Array, num_steps: int) -> EnvNoise:
        """Return keys for the library's functions of ``num_steps`` steps, ``(num_steps, num_envs, 2)`` uint32 each."""
        counters = self._step_stream.counters(first_step, num_steps)

        def keys(stream: Stream) -> jax.Array:
            bits = jnp.moveaxis(stream.bits(counters, env_ids, _KEY_WORDS), 0, -1)
            return jax.lax.bitcast_convert_type(bits, jnp.uint32)

        return EnvNoise(reset=keys(self._reset_stream), step=keys(self._step_stream))

    def reset(self, env_ids: jax.Array) -> EnvState:
        """Return every env at the start of its first episode; see ``JaxEnv.reset``."""
        self._require_double()
        num_envs = env_ids.shape[0]
        noise = jax.tree.map(lambda table: table[0], self.noise(env_ids, 0, 1))
        physics, observations = self._start_batch(noise.reset)
        nothing = jnp.zeros((num_envs, 0), dtype=self.dtype)
        num_terms = len(self.task.reward_terms) + len(self.task.metric_terms)
        episode_length = self._initial_episode_lengths(env_ids)
        state = EnvState(
            env_ids=env_ids,
            physics=physics,
            state=State(nothing, nothing, nothing, nothing, {}),
            observations=self._in_own_dtype(observations),
            episode_length=episode_length,
            is_whole=episode_length == 0,
            running=jnp.zeros((num_envs, num_terms + 1), dtype=jnp.float64),
        )
        return varying_like(env_ids, state)

    def step(self, state: EnvState, action: jax.Array, noise: EnvNoise) -> tuple[EnvState, Transition]:
        """Apply one action per env; see ``JaxEnv.step``."""
        self._check_action(action, state.env_ids.shape[0])
        episode_length = state.episode_length + 1
        action = action.astype(jnp.float32 if self.task.action_space.kind == "continuous" else jnp.int32)
        is_last = episode_length >= self.config.max_episode_steps
        stepped: _Stepped = varying_like(
            state.env_ids, self._step_batch(state.physics, action, noise.step, noise.reset, is_last)
        )
        terms = stepped.terms.astype(self.dtype)
        done = stepped.terminated | stepped.truncated
        running, finished = count(state, terms, done)
        final = rows_where(stepped.diverged, state.observations, self._in_own_dtype(stepped.final_observations))
        new_state = EnvState(
            env_ids=state.env_ids,
            physics=stepped.physics,
            state=state.state,
            observations=self._in_own_dtype(stepped.observations),
            episode_length=jnp.where(done, 0, episode_length),
            is_whole=state.is_whole | done,
            running=running,
        )
        return new_state, Transition(
            observations=new_state.observations,
            reward=terms[:, 0],
            terms=terms,
            terminated=stepped.terminated,
            truncated=stepped.truncated,
            final_observations=final,
            finished=finished,
            num_diverged=jnp.sum(stepped.diverged & (state.env_ids >= 0), dtype=jnp.int32),
        )

    def _in_own_dtype(self, observations: Observations) -> Observations:
        return {name: rows.astype(self.dtype) for name, rows in observations.items()}

    # --- what is traced in the library's precision -----------------------------------------------------------------

    def _start(self, keys: jax.Array) -> tuple[Physics, Observations]:
        """Return envs at the start of an episode, for keys ``(num_envs, 2)``."""
        with _library_in_words():
            tree, observations = jax.vmap(self._guest.reset)(keys)
        named, self._structure = _named(tree)
        self._names = tuple(named)
        return named, observations

    def _advance_batch(
        self, physics: Physics, action: jax.Array, step_keys: jax.Array, reset_keys: jax.Array, is_last: jax.Array
    ) -> _Stepped:
        """Step the envs, and begin new episodes where they ended; ``is_last (num_envs,)`` has reached the limit."""
        if self._structure is None:  # a checkpoint's envs, which were never reset here
            jax.eval_shape(self._start, reset_keys)
        tree = jax.tree.unflatten(self._structure, [physics[name] for name in self._names])
        with _library_in_words():
            found = jax.vmap(self._guest.step)(step_keys, tree, action)
            after = _like(physics, found.state, self._structure)
        metrics = [found.metrics[name] for name in self.task.metric_terms]
        # Or no mean over episodes would ever be a number again.
        terms = jnp.stack([found.reward, *(jnp.where(jnp.isfinite(rows), rows, 0) for rows in metrics)], axis=1)
        diverged = ~jnp.stack(
            [jnp.isfinite(rows).all(1) for rows in (found.reward[:, None], *found.observations.values())]
        ).all(0)
        terminated = found.terminated | diverged
        truncated = (is_last | found.truncated) & ~terminated
        physics, observations = self._restart((after, found.observations), terminated | truncated, reset_keys)
        terms = jnp.where(diverged[:, None], 0, terms)
        return _Stepped(physics, observations, found.observations, terms, terminated, truncated, diverged)

    def _restart(
        self, envs: tuple[Physics, Observations], done: jax.Array, keys: jax.Array
    ) -> tuple[Physics, Observations]:
        """Put the envs of ``done (num_envs,)`` at the start of an episode.

        Few episodes end in one step, and a reset may cost as much as a step, so only some are computed at a time.
        """
        num_envs = done.shape[0]
        size = -(-num_envs // _RESETS_AT_ONCE)

        def some(before: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
            is_left, envs = before
            rows = jnp.nonzero(is_left, size=size, fill_value=num_envs)[0]
            fresh = self._start(keys.at[rows].get(mode="clip"))
            put = jax.tree.map(lambda old, new: old.at[rows].set(new.astype(old.dtype), mode="drop"), envs, fresh)
            return is_left.at[rows].set(False, mode="drop"), put

        restarted: tuple[Physics, Observations] = jax.lax.while_loop(lambda left: left[0].any(), some, (done, envs))[1]
        return restarted


class LibraryPhysics:
    """Stands where the engine of our own envs is: a library steps its physics itself."""

    num_positions = num_velocities = num_controls = num_sensordata = 0

    @property
    def warning_counts(self) -> Mapping[str, int]:
        """Nothing: libraries of JAX give no warnings."""
        return {}

    def start(self, env_ids: Array) -> Physics:
        """Raise NotImplementedError, as do ``step`` and ``reset``."""
        _refuse()

    def step(self, physics: Physics, ctrl: Array, push: Array | None = None) -> tuple[Physics, StepInfo]:
        """See ``start``."""
        _refuse()

    def reset(self, physics: Physics, mask: Array, qpos: Array, qvel: Array) -> tuple[Physics, Array]:
        """See ``start``."""
        _refuse()

    def log_to(self, path: Path) -> None:
        """There is nothing that would speak."""

    def close(self) -> None:
        """Nothing to release."""


def _refuse() -> NoReturn:
    raise NotImplementedError("the env's own library steps its physics")


@contextmanager
def _library_in_words() -> Iterator[None]:
    """Say in one line what a library's own code comes to grief over, such as a newer JAX than it knows."""
    try:
        yield
    except Exception as error:
        raise UsageError(
            f"the env's own code fails with the JAX that is here: {in_one_line(error)}; use another env or version"
        ) from error


def _named(tree: Any) -> tuple[dict[str, Any], Any]:
    """Return the leaves of a library's state by name, and its structure."""
    paths, structure = jax.tree_util.tree_flatten_with_path(tree)
    named = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in paths}
    if len(named) != len(paths):
        raise ValueError("two entries of an env's state have the same name")
    return named, structure


def _like(physics: Physics, tree: Any, structure: Any) -> Physics:
    """Return the leaves of a state after a step by name, in the dtypes they had before.

    Raises:
        ValueError: the step gives another structure, shape or kind of number than the reset, which no loop can hold.
    """
    named, found = _named(tree)
    if found != structure:
        raise ValueError(f"the env's step gives a state of another structure than its reset: {found}, not {structure}")
    for name, leaf in named.items():
        old, new = physics[name], jnp.asarray(leaf)
        if new.shape != old.shape or jnp.promote_types(old.dtype, new.dtype) != old.dtype:
            raise ValueError(
                f"the env's step gives {name} as {new.dtype}{list(new.shape[1:])}, and its reset as "
                f"{old.dtype}{list(old.shape[1:])}"
            )
    return {name: jnp.asarray(leaf, physics[name].dtype) for name, leaf in named.items()}
