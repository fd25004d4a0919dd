"""Envs that Gymnasium makes, stepped together: one after the other, or each in a process of its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode

from lockstep.adapters.gymnasium.specs import encoder, facts_of, make_for, make_one
from lockstep.envs.config import GymnasiumConfig
from lockstep.envs.guest_actions import decoder
from lockstep.envs.guest_env import GuestBatch, GuestEnv, GuestStep, NoEnvs
from lockstep.envs.guest_task import GuestTask


def make_env(
    env_id: str,
    task: GuestTask,
    config: GymnasiumConfig,
    *,
    num_envs: int,
    first_env_id: int,
    seed: int,
    streams: str,
    device: torch.device,
    dtype: torch.dtype,
    num_threads: int,
) -> GuestEnv:
    """Return this process's envs; see ``session/make_env.py``. Threads are not used."""
    kind = GymnasiumProcesses if config.vectorization == "async" else GymnasiumEnvs
    batch: GuestBatch = NoEnvs(task.num_observations["actor"])
    if num_envs:
        batch = kind(env_id, config, num_envs)
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
    )


class GymnasiumEnvs:
    """Envs in this process, one after the other.

    Args:
        env_id: which.
        config: time limit and keyword arguments.
        num_envs: how many, one at least.
    """

    def __init__(self, env_id: str, config: GymnasiumConfig, num_envs: int) -> None:
        facts = facts_of(env_id, config.kwargs)
        self._encode, self._decode = encoder(facts.observation_space), decoder(facts.action_space)
        self._envs = [make_one(env_id, config.max_episode_steps, config.kwargs) for _ in range(num_envs)]

    @property
    def warning_counts(self) -> Mapping[str, int]:
        """Nothing: envs tell of warnings in ways of their own."""
        return {}

    def log_to(self, path: Path) -> None:
        """Append MuJoCo's warnings to a file from now on, if it steps the envs; this holds for the whole process."""
        if "mujoco" in sys.modules:
            from lockstep.sim.models import log_mujoco_to

            log_mujoco_to(path)

    def start(self, seeds: np.ndarray) -> np.ndarray:
        """Reset every env with its seed."""
        return self.restart(np.arange(len(self._envs)), seeds)

    def restart(self, rows: np.ndarray, seeds: np.ndarray) -> np.ndarray:
        """Reset the envs of ``rows`` with their seeds."""
        pairs = zip(rows.tolist(), seeds.tolist(), strict=True)
        return np.stack([self._encode(self._envs[row].reset(seed=seed)[0]) for row, seed in pairs])

    def step(self, actions: np.ndarray) -> GuestStep:
        """Step every env."""
        pairs = zip(self._envs, self._decode(actions), strict=True)
        observations, rewards, terminated, truncated, _ = zip(*(env.step(action) for env, action in pairs), strict=True)
        return GuestStep(
            np.stack([self._encode(observation) for observation in observations]),
            np.array(rewards, dtype=np.float64),
            np.array(terminated, dtype=bool),
            np.array(truncated, dtype=bool),
        )

    def close(self) -> None:
        """Close every env."""
        for env in self._envs:
            env.close()


class GymnasiumProcesses:
    """Envs in processes of their own, by Gymnasium's ``AsyncVectorEnv``, which starts no episode by itself here.

    Args:
        env_id: which.
        config: time limit and keyword arguments.
        num_envs: how many, one at least.
    """

    def __init__(self, env_id: str, config: GymnasiumConfig, num_envs: int) -> None:
        self._decode = decoder(facts_of(env_id, config.kwargs).action_space)
        self._num_envs = num_envs
        make = partial(make_for, os.getpid(), env_id, config.max_episode_steps, config.kwargs)
        # A fork of this process would take over the locks of torch's threads, held or not.
        self._envs: Any = AsyncVectorEnv([make] * num_envs, context="forkserver", autoreset_mode=AutoresetMode.DISABLED)

    @property
    def warning_counts(self) -> Mapping[str, int]:
        """Nothing: what happens in the processes stays there."""
        return {}

    def log_to(self, path: Path) -> None:
        """Write nothing: what happens in the processes stays there."""

    def start(self, seeds: np.ndarray) -> np.ndarray:
        """Reset every env with its seed."""
        return np.asarray(self._envs.reset(seed=seeds.tolist())[0])

    def restart(self, rows: np.ndarray, seeds: np.ndarray) -> np.ndarray:
        """Reset the envs of ``rows`` with their seeds."""
        mask = np.zeros(self._num_envs, dtype=bool)
        mask[rows] = True
        of_all: list[int | None] = [None] * self._num_envs
        for row, seed in zip(rows.tolist(), seeds.tolist(), strict=True):
            of_all[row] = seed
        observations = np.asarray(self._envs.reset(seed=of_all, options={"reset_mask": mask})[0])
        return np.take(observations, rows, axis=0)

    def step(self, actions: np.ndarray) -> GuestStep:
        """Step every env, all at once."""
        observations, *others, _ = self._envs.step(self._decode(actions))
        return GuestStep(np.asarray(observations), *others)

    def close(self) -> None:
        """End the processes."""
        self._envs.close()
