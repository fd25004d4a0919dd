"""A policy that was trained with JAX."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from lockstep.core.config import merge
from lockstep.core.errors import UsageError
from lockstep.distributed import jax_programs
from lockstep.distributed.jax_devices import choose_devices, choose_platform
from lockstep.distributed.jax_mesh import REPLICATED, SHARDED, RankMesh, make_mesh
from lockstep.envs.jax_env import EnvNoise, EnvState, JaxEnv
from lockstep.learn.jax import checkpoint
from lockstep.learn.jax.algorithm import TrainState
from lockstep.learn.jax.evaluation import run_episodes
from lockstep.learn.jax.guest import load_actor
from lockstep.learn.jax.nests import flatten, from_nest, plain_shapes, to_nest, with_keys
from lockstep.learn.jax.statistics import local_parameters
from lockstep.learn.resuming import incomplete_in_words, require_like
from lockstep.recipes.libraries import OWN, library_of
from lockstep.session.framework import Episodes, Frame
from lockstep.session.jax_envs import build_env, platform_of
from lockstep.session.make_config import make_config

if TYPE_CHECKING:
    from lockstep.core.types import Array, Observations
    from lockstep.learn.config import TrainConfig
    from lockstep.learn.jax.algorithm import Algorithm


class JaxPolicy:
    """A ``Policy`` of arrays: numpy in, numpy out; JAX's in, JAX's out.

    Attributes:
        config: of the run that trained it.
        iteration: iterations it was trained for.
        num_observations: of the group ``actor``.
        algorithm: whose ``act`` it calls.
        replicated: the algorithm's state that ``act`` needs, on the device.
    """

    def __init__(
        self, config: TrainConfig, iteration: int, algorithm: Any, replicated: Any, env: JaxEnv, ranks: RankMesh
    ) -> None:
        self.config, self.iteration = config, iteration
        self.algorithm, self.replicated = algorithm, replicated
        self.num_observations = int(env.task.num_observations["actor"])
        self._dtype, self.ranks = env.dtype, ranks
        self._memory: Any = None
        self._act = ranks.compile(algorithm.act, (REPLICATED, SHARDED, SHARDED), SHARDED)

    def reset(self, done: Array | None = None) -> None:
        """Forget everything, or only in the envs of ``done (num_envs,)``; call it when episodes end.

        Raises:
            ValueError: it has last acted in another number of envs.
        """
        if done is None or self._memory is None:
            self._memory = None
            return
        mask = np.asarray(done)
        num_envs = _num_envs_of(self._memory, mask.size)
        if mask.shape != (num_envs,):
            raise ValueError(f"done has shape {mask.shape}, not ({num_envs},): the policy has acted in {num_envs} envs")
        with jax.enable_x64(True):
            start = self._initial_memory(mask.shape[0])
            keep = partial(_where, jnp.asarray(mask))
            self._memory = jax.tree.map(keep, start, self._memory)

    def __call__(self, observations: Observations | Array) -> Array:
        """Return actions ``(num_envs, size)`` (discrete: ``(num_envs,)``) for raw observations.

        Args:
            observations: the env's groups, or those of the group ``actor`` alone, ``(num_envs, num_observations)``.
        """
        given = observations["actor"] if isinstance(observations, dict) else observations
        if np.ndim(given) != 2 or np.shape(given)[1] != self.num_observations:
            raise ValueError(f"observations have shape {np.shape(given)}, not (num_envs, {self.num_observations})")
        num_envs = np.shape(given)[0]
        with jax.enable_x64(True):
            if self._memory is None or _num_envs_of(self._memory, num_envs) != num_envs:
                self._memory = self._initial_memory(num_envs)
            groups = {"actor": self.ranks.shard(jnp.asarray(given, self._dtype))}
            actions, self._memory = self._act(self.replicated, groups, self._memory)
        return actions if isinstance(given, jax.Array) else np.asarray(actions)

    def _initial_memory(self, num_envs: int) -> Any:
        return self.ranks.shard(self.algorithm.initial_memory(num_envs))


def load_policy(path: Path, device: str, algorithm_of: Callable[[TrainConfig], type[Algorithm]]) -> JaxPolicy:
    """Load the policy of a checkpoint folder, onto one device.

    Args:
        path: of the checkpoint.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:<index>``.
        algorithm_of: returns the class that a config trains with.

    Raises:
        UsageError: no such checkpoint, damaged, of an algorithm that has no ``act``, or of a task that this
            installation doesn't have.
    """
    content = checkpoint.load(path)
    config = make_config(**content["config"])
    if config.rl_library == OWN:
        _require_actor(algorithm_of(config), path)
    choose_platform(device, 0)
    jax_programs.keep()
    ranks = make_mesh(choose_devices(device, 1)[:1])
    with jax.enable_x64(True), ExitStack() as resources:
        # A policy needs sizes and dtype of it: whichever engine starts without compiling will do, the run's or not.
        env = build_env(merge(config, {"engine": "auto"}), "cpu", resources)
        with incomplete_in_words(path):
            if config.rl_library == OWN:
                algorithm, shapes = _own_algorithm(algorithm_of(config), config, content, env, ranks)
            else:
                algorithm = load_actor(library_of(config).learners["jax"], config, env.task)
                shapes = algorithm.shapes()
            require_like(content["replicated"], to_nest(plain_shapes(shapes)), path, "replicated")
            tree = from_nest(content["replicated"], shapes)
        replicated = with_keys(ranks.replicate(tree), shapes)
    return JaxPolicy(config, content["iteration"], algorithm, replicated, env, ranks)


def _require_actor(kind: type[Algorithm], path: Path) -> None:
    missing = [name for name in ("act", "initial_memory") if not callable(getattr(kind, name, None))]
    if missing:
        raise UsageError(
            f"checkpoint {path} is of {kind.__name__}, which has no {missing[0]}(); give it one to play it"
        )


def _own_algorithm(
    kind: Any, config: TrainConfig, content: Mapping[str, Any], env: JaxEnv, ranks: RankMesh
) -> tuple[Any, Any]:
    """Return the algorithm of a checkpoint, and the shapes of its replicated state."""
    # As one rank with all envs, however many it was that trained; nobody can tell how many without a row each.
    rows = [array.shape[0] for array in flatten(content["sharded"]).values()]
    num_envs = int(rows[0]) if rows else int(np.sum(config.num_envs))
    algorithm: Any = kind(merge(config, {"num_envs": num_envs}), env, None)
    return algorithm, _replicated_shapes(algorithm, num_envs, ranks)


def in_float32(policy: JaxPolicy) -> JaxPolicy:
    """Return a policy whose networks compute in the precision of their parameters, not in bfloat16."""
    if policy.config.dtype != "bfloat16":
        return policy
    config, env = merge(policy.config, {"dtype": "float32"}), policy.algorithm.env
    algorithm = type(policy.algorithm)(config, env, None)
    return JaxPolicy(config, policy.iteration, algorithm, policy.replicated, env, policy.ranks)


def evaluate(policy: JaxPolicy, config: TrainConfig, num_episodes: int) -> Episodes:
    """Run whole episodes with a policy, on its device.

    Args:
        policy: that acts.
        config: with the seed and the env's settings.
        num_episodes: how many, one per env.
    """
    with jax.enable_x64(True), ExitStack() as resources:
        env = build_env(config, platform_of(policy.ranks), resources, "evaluation")

        def run(replicated: Any, env_ids: jax.Array) -> Any:
            memory = policy.algorithm.initial_memory(num_episodes)
            return run_episodes(env, partial(policy.algorithm.act, replicated), memory, env_ids)

        env_ids = policy.ranks.shard(np.arange(num_episodes, dtype=np.int32))
        found = policy.ranks.compile(run, (REPLICATED, SHARDED), SHARDED)(policy.replicated, env_ids)
        sums, lengths = np.asarray(found.term_sums), np.asarray(found.lengths)
    rewards, metrics = np.split(sums, [len(env.task.reward_terms)], axis=1)
    terms = dict(zip(env.task.reward_terms, rewards.T, strict=True))
    return Episodes(rewards.sum(1), lengths, terms, dict(zip(env.task.metric_terms, metrics.T, strict=True)))


def frames(policy: JaxPolicy, config: TrainConfig) -> Generator[Frame]:
    """Yield every state of the first env of an evaluation, with the most likely actions, without end.

    Args:
        policy: that acts.
        config: with the seed and the env's settings.
    """
    with ExitStack() as resources:
        # Between two states the caller's own code runs, so the types of 64 bits are on only where they are needed.
        with jax.enable_x64(True):
            env = build_env(config, platform_of(policy.ranks), resources, "evaluation")
            start, advance = _steps_of(policy, env)
            state, memory = start(policy.ranks.shard(np.zeros(1, np.int32)))
        starts_episode, counter = True, 0
        while True:
            yield Frame(_first(state.state.qpos), _first(state.state.qvel), starts_episode)
            counter += 1
            with jax.enable_x64(True):
                at = policy.ranks.shard(np.full(1, counter, np.int32))
                state, memory, done = advance(policy.replicated, state, memory, at)
            starts_episode = bool(np.asarray(done)[0])


def _steps_of(policy: JaxPolicy, env: JaxEnv) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return compiled functions: one that starts envs, and one that goes a step with the policy in each of them."""
    algorithm = policy.algorithm

    def start(env_ids: jax.Array) -> Any:
        return env.reset(env_ids), local_parameters(algorithm.initial_memory(env_ids.shape[0]))

    def advance(replicated: Any, state: EnvState, memory: Any, counter: jax.Array) -> Any:
        noise = env.noise(state.env_ids, counter[0], 1)
        actions, after = algorithm.act(replicated, state.observations, memory)
        new, transition = env.step(state, actions, EnvNoise(*(rows[0] for rows in noise)))
        fresh = algorithm.initial_memory(state.env_ids.shape[0])
        return new, jax.tree.map(partial(_where, transition.done), fresh, after), transition.done

    ranks = policy.ranks
    return ranks.compile(start, (SHARDED,), SHARDED), ranks.compile(advance, (REPLICATED, *[SHARDED] * 3), SHARDED)


def _first(array: jax.Array) -> np.ndarray:
    return np.asarray(array[0], dtype=np.float64)


def _replicated_shapes(algorithm: Any, num_envs: int, ranks: RankMesh) -> Any:
    """Return shapes and dtypes of an algorithm's replicated state, without computing any of it."""

    def setup(env_ids: jax.Array) -> TrainState:
        state: TrainState = algorithm.setup(jax.random.key(0, impl="threefry2x32"), env_ids)
        return state

    compiled = ranks.compile(setup, (SHARDED,), TrainState(REPLICATED, SHARDED))
    return jax.eval_shape(compiled, jax.ShapeDtypeStruct((num_envs,), jnp.int32)).replicated


def _where(mask: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    """Return rows of ``new`` where the mask is set; what does not lead with envs is nothing that could be forgotten."""
    if new.shape[:1] != mask.shape:
        return new
    return jnp.where(mask.reshape(-1, *[1] * (new.ndim - 1)), new, old)


def _num_envs_of(memory: Any, default: int) -> int:
    """Return for how many envs a memory is."""
    sizes = [leaf.shape[0] for leaf in jax.tree.leaves(memory)]
    return int(next(iter(sizes), default))
