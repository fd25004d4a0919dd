"""A small algorithm in JAX, one that breaks in several ways, and trainings of it on the devices of this process."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lockstep.core.config import merge
from lockstep.core.interrupts import StopReason
from lockstep.core.types import Array
from lockstep.distributed.jax import axis_index, axis_size, make_mesh, psum
from lockstep.distributed.jax_comm import JaxComm, OwnStore
from lockstep.envs.jax_env import EnvNoise, EnvState, JaxEnv
from lockstep.learn.config import TrainConfig
from lockstep.learn.jax.algorithm import Metrics, TrainState
from lockstep.learn.jax.loop import JaxRunner
from lockstep.recipes.cartpole import cartpole_classic
from tests.unit.jax_env_fixtures import toy_jax_env
from tests.unit.learner_fixtures import Line

NUM_STEPS = 3


class Own(NamedTuple):
    """What a rank of ``Drift`` has of its own."""

    env: EnvState
    keys: Array  # (num_envs,) keys of jax.random
    distance: Array  # (num_envs, 2) float32


class Drift:
    """Moves every point by the same ``speed``, which is drawn towards the mean position of all envs of all ranks."""

    CHECKS: tuple[str, ...] = ("speed", "positions")

    def __init__(self, config: TrainConfig, env: JaxEnv, evaluation_env: JaxEnv | None) -> None:
        self.config, self.env, self.evaluation_env = config, env, evaluation_env

    def setup(self, key: Array, env_ids: Array) -> TrainState:
        replicated = {
            "speed": jax.random.uniform(key, (1,), jnp.float64),
            "memory": {"a/b.c": jnp.zeros((2, 0), jnp.int32), "is_on": jnp.array([True, False])},
            "half": jnp.ones(3, jnp.bfloat16),
            "key": jax.random.fold_in(key, 7),
            "num_steps": jnp.zeros((), jnp.int32),
        }
        keys = jax.vmap(lambda env_id: jax.random.fold_in(key, env_id))(env_ids)
        return TrainState(replicated, Own(self.env.reset(env_ids), keys, jnp.zeros((env_ids.shape[0], 2), jnp.float32)))

    def step(self, state: TrainState) -> tuple[TrainState, Metrics]:
        old, own = state
        noise = self.env.noise(own.env.env_ids, old["num_steps"] + 1, NUM_STEPS)
        action = jnp.broadcast_to(old["speed"], (own.env.env_ids.shape[0], 1))

        def one_step(env: EnvState, noise: EnvNoise) -> tuple[EnvState, tuple[Array, Array]]:
            env, transition = self.env.step(env, action, noise)
            return env, (transition.reward, transition.finished)

        env, (rewards, finished) = jax.lax.scan(one_step, own.env, noise)
        positions, is_real = self.spoil(env.observations["actor"][:, 0], old), env.env_ids >= 0
        total, count, (*terms, length, ended) = psum(
            (jnp.where(is_real, positions, 0.0).sum(), is_real.sum(dtype=jnp.int64), list(finished.sum(0)))
        )
        bad = jnp.stack((~jnp.isfinite(old["speed"][0]), ~jnp.isfinite(jnp.where(is_real, positions, 0.0)).all()))
        is_own = jnp.arange(axis_size()) == axis_index()
        replicated = old | {
            "speed": 0.9 * old["speed"] + 0.1 * total / count,
            "num_steps": old["num_steps"] + NUM_STEPS,
        }
        moved = own.distance + rewards.sum(0)[:, None].astype(jnp.float32)
        metrics = {
            "num_steps": count * NUM_STEPS,
            "mean_return": sum(terms) / ended,
            "mean_episode_length": length / ended,
            "loss/speed": replicated["speed"][0],
            "nonfinite": psum((is_own[:, None] & bad).astype(jnp.int32)) > 0,
        }
        return TrainState(replicated, Own(env, own.keys, moved)), metrics

    def spoil(self, positions: Array, old: dict[str, Array]) -> Array:
        """Return the positions as they are; a test may have other plans."""
        return positions

    def evaluate(self, state: TrainState, env_ids: Array) -> Metrics:
        assert self.evaluation_env is not None
        starts = self.evaluation_env.reset(env_ids).observations["actor"][:, 0]
        is_real = env_ids >= 0
        total, count = psum((jnp.where(is_real, starts, 0.0).sum(), is_real.sum(dtype=jnp.int64)))
        return {"mean_return": total / count + state.replicated["speed"][0], "num_episodes": count}

    def weights(self, replicated: dict[str, Array]) -> Any:
        return {"speed": replicated["speed"], "half": [replicated["half"]]}

    def with_weights(self, replicated: dict[str, Array], weights: Any) -> dict[str, Array]:
        return replicated | {"speed": weights["speed"], "half": weights["half"][0]}


def drift_config(**overrides: Any) -> TrainConfig:
    """Return a config of the toy: 8 envs on all ranks together unless it says else."""
    small = {"ml_framework": "jax", "device": "cpu", "dtype": "float64", "num_envs": 8, "max_iterations": 4}
    groups = {"evaluation": {"interval": 2, "num_episodes": 5}, "agent": {"num_mini_batches": 1}}
    return merge(cartpole_classic(), {**small, **groups, **overrides})


def make_drift(
    num_ranks: int = 1, algorithm: Callable[..., Any] = Drift, spread: float = 0.5, **overrides: Any
) -> JaxRunner:
    """Return a training of the toy on so many devices."""
    config = drift_config(**({"num_envs": 8 // num_ranks} | overrides))
    envs = [
        toy_jax_env(Line(spread), max_episode_steps=7, streams=streams, seed=config.seed)
        for streams in ("train", "evaluation")
    ]
    evaluation_env = envs[1] if config.evaluation.interval else None
    ranks = make_mesh(jax.devices()[:num_ranks])
    return JaxRunner(config, algorithm, envs[0], evaluation_env, ranks, JaxComm(0, 1, num_ranks, OwnStore()))


class Recorder:
    """An observer that keeps everything it is told."""

    def __init__(self, stop_at: int | None = None, folder: Path | None = None) -> None:
        self.recorded: list[dict[str, Any]] = []
        self.saved: dict[int, dict[str, Any]] = {}
        self.failures: dict[int, dict[str, Any]] = {}
        self.stop_at, self.folder = stop_at, folder
        self.save_due = False

    @property
    def stop_requested(self) -> StopReason | None:
        return "preempted" if self.stop_at is not None and len(self.recorded) + 1 >= self.stop_at else None

    def record(self, metrics: dict[str, Any]) -> None:
        self.recorded.append(metrics)

    def save(self, iteration: int, content: dict[str, Any]) -> None:
        self.saved[iteration] = content

    def save_failure(self, iteration: int, content: dict[str, Any]) -> Path | None:
        self.failures[iteration] = content
        return self.folder


def untimed(content: dict[str, Any]) -> dict[str, Any]:
    """Return a checkpoint's content without what depends on the clock or on how the envs are shared out."""
    return {name: value for name, value in content.items() if name not in ("wall_s", "config")}


def array_differences(one: Any, other: Any, name: str = "") -> list[str]:
    """Return the names of all entries of two nests of dicts and numpy arrays that are not equal bit for bit."""
    if isinstance(one, dict) and isinstance(other, dict):
        if one.keys() != other.keys():
            return [f"{name}: {one.keys() ^ other.keys()}"]
        return [found for key in one for found in array_differences(one[key], other[key], f"{name}.{key}")]
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        same = one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
        return [] if same else [name]
    return [] if one == other else [name]
