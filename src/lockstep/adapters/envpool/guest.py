"""Envs of EnvPool, stepped by its threads."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import envpool
import numpy as np
import torch

from lockstep.adapters.envpool.specs import encoder, facts_of
from lockstep.envs.config import ThreadedGuestConfig
from lockstep.envs.guest_actions import decoder
from lockstep.envs.guest_env import GuestBatch, GuestEnv, GuestStep, NoEnvs
from lockstep.envs.guest_task import GuestTask


def make_env(
    env_id: str,
    task: GuestTask,
    config: ThreadedGuestConfig,
    *,
    num_envs: int,
    first_env_id: int,
    seed: int,
    streams: str,
    device: torch.device,
    dtype: torch.dtype,
    num_threads: int,
) -> GuestEnv:
    """Return this process's envs; see ``session/make_env.py``."""
    batch: GuestBatch = NoEnvs(task.num_observations["actor"])
    if num_envs:
        batch = EnvPoolEnvs(env_id, config, num_envs, num_threads)
    return GuestEnv(
        task,
        batch,
        config,
        num_envs=num_envs,
        seed=seed,
        device=device,
        dtype=dtype,
        first_env_id=first_env_id,
        streams=streams,
        name=f"envpool/{env_id}",
    )


class EnvPoolEnvs:
    """Envs of one id in a pool.

    EnvPool begins a new episode in the step after the one that ended the last, whose action it drops. So that there is
    no such step, ``restart`` resets those envs at once. It seeds an env once, when the pool is made; the episodes that
    follow in it draw on from there.

    Args:
        env_id: which.
        config: time limit and keyword arguments.
        num_envs: how many, one at least.
        num_threads: that step them.
    """

    def __init__(self, env_id: str, config: ThreadedGuestConfig, num_envs: int, num_threads: int) -> None:
        facts = facts_of(env_id, config.kwargs)
        self._encode, self._decode = encoder(facts.observation_space), decoder(facts.action_space)
        self._env_id = env_id
        self.num_threads = min(num_threads, num_envs)
        self._settings: dict[str, Any] = {
            **config.kwargs,
            "num_envs": num_envs,
            "num_threads": self.num_threads,
            # Beyond ours: an env that fails in the step at its limit would be called truncated by EnvPool.
            "max_episode_steps": config.max_episode_steps + 1,
        }
        self._pool: Any = None

    @property
    def warning_counts(self) -> Mapping[str, int]:
        """Nothing: EnvPool does not tell."""
        return {}

    def log_to(self, path: Path) -> None:
        """Write nothing: EnvPool says nothing."""

    def start(self, seeds: np.ndarray) -> np.ndarray:
        """Make the pool, anew if there is one: its seeds are for good."""
        self.close()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that float64 bounds are cast to the observations' float32
            self._pool = envpool.make_gymnasium(self._env_id, seed=seeds.tolist(), **self._settings)
            observations, _ = self._pool.reset()
        return self._encode(observations)

    def restart(self, rows: np.ndarray, seeds: np.ndarray) -> np.ndarray:
        """Reset the envs of ``rows``; their seeds are as they were."""
        observations, info = self._pool.reset(rows.astype(np.int32))
        encoded = self._encode(observations)
        # In the order in which they were asked for, whatever the threads have made of it.
        return encoded[np.argsort(info["env_id"])][np.argsort(np.argsort(rows))]

    def step(self, actions: np.ndarray) -> GuestStep:
        """Step every env."""
        observations, rewards, terminated, truncated, _ = self._pool.step(self._decode(actions))
        return GuestStep(self._encode(observations), rewards, terminated, truncated)

    def close(self) -> None:
        """Release the pool and its threads."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None
