"""Envs that Gymnasium makes, stepped together: one after the other, or each in a process of its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from multiprocessing import connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode

from lockstep.adapters.gymnasium.checked import make_checked, make_for, name_of
from lockstep.adapters.gymnasium.specs import facts_of
from lockstep.core.errors import RunError
from lockstep.envs.config import GymnasiumConfig
from lockstep.envs.guest_actions import decoder
from lockstep.envs.guest_env import GuestBatch, GuestEnv, GuestStep, NoEnvs
from lockstep.envs.guest_task import GuestTask

_PATIENCE_S = 5.0
"""For the end of a process that has gone silent, or that was told to end."""


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
        batch = kind(env_id, config, num_envs, first_env_id)
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
        name=name_of(env_id),
    )


class GymnasiumEnvs:
    """Envs in this process, one after the other.

    Args:
        env_id: which.
        config: time limit and keyword arguments.
        num_envs: how many, one at least.
        first_env_id: global id of the first of them, for messages.
    """

    def __init__(self, env_id: str, config: GymnasiumConfig, num_envs: int, first_env_id: int = 0) -> None:
        facts = facts_of(env_id, config.kwargs)
        self._decode = decoder(facts.action_space)
        numbers = range(first_env_id, first_env_id + num_envs)
        self._envs = [make_checked(env_id, config, facts.observation_space, number) for number in numbers]

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
        return np.stack([self._envs[row].reset(seed=seed)[0] for row, seed in pairs])

    def step(self, actions: np.ndarray) -> GuestStep:
        """Step every env."""
        pairs = zip(self._envs, self._decode(actions), strict=True)
        observations, rewards, terminated, truncated, _ = zip(*(env.step(action) for env, action in pairs), strict=True)
        return GuestStep(
            np.stack(observations),
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
        first_env_id: global id of the first of them, for messages.

    Raises:
        RunError: a process has died, now or in any later call.
    """

    def __init__(self, env_id: str, config: GymnasiumConfig, num_envs: int, first_env_id: int = 0) -> None:
        facts = facts_of(env_id, config.kwargs)
        self._decode = decoder(facts.action_space)
        self._num_envs, self._first_env_id, self._name = num_envs, first_env_id, name_of(env_id)
        make = partial(make_for, os.getpid(), env_id, config, facts.observation_space)
        makers = [partial(make, first_env_id + row) for row in range(num_envs)]
        self._envs: Any = None
        with self._deaths_in_words():
            # A fork of this process would take over the locks of torch's threads, held or not.
            self._envs = AsyncVectorEnv(makers, context="forkserver", autoreset_mode=AutoresetMode.DISABLED)

    @property
    def warning_counts(self) -> Mapping[str, int]:
        """Nothing: what happens in the processes stays there."""
        return {}

    def log_to(self, path: Path) -> None:
        """Write nothing: what happens in the processes stays there."""

    def start(self, seeds: np.ndarray) -> np.ndarray:
        """Reset every env with its seed."""
        with self._deaths_in_words():
            return np.asarray(self._envs.reset(seed=seeds.tolist())[0])

    def restart(self, rows: np.ndarray, seeds: np.ndarray) -> np.ndarray:
        """Reset the envs of ``rows`` with their seeds."""
        mask = np.zeros(self._num_envs, dtype=bool)
        mask[rows] = True
        of_all: list[int | None] = [None] * self._num_envs
        for row, seed in zip(rows.tolist(), seeds.tolist(), strict=True):
            of_all[row] = seed
        with self._deaths_in_words():
            observations = np.asarray(self._envs.reset(seed=of_all, options={"reset_mask": mask})[0])
        return np.take(observations, rows, axis=0)

    def step(self, actions: np.ndarray) -> GuestStep:
        """Step every env, all at once."""
        with self._deaths_in_words():
            observations, *others, _ = self._envs.step(self._decode(actions))
        return GuestStep(np.asarray(observations), *others)

    def close(self) -> None:
        """End the processes."""
        self._envs.close()

    @contextmanager
    def _deaths_in_words(self) -> Iterator[None]:
        """Say whose process has died where a pipe to one breaks off, and end the others, which nobody can use."""
        try:
            yield
        except (EOFError, ConnectionError) as error:
            if self._envs is None:
                raise RunError(
                    f"the process of an env of {self._name} died while it made the env; see its own words, or try "
                    "--env.vectorization sync"
                ) from error
            if None in self._envs.parent_pipes:  # no death, but an exception of an env that Gymnasium hands on
                raise
            raise RunError(self._obituary()) from error

    def _obituary(self) -> str:
        """Return who has died and how, once all are gone."""
        processes = self._envs.processes
        connection.wait([process.sentinel for process in processes], _PATIENCE_S)
        ends = {self._first_env_id + row: process.exitcode for row, process in enumerate(processes)}
        dead = {number: code for number, code in ends.items() if code is not None}
        for process in processes:
            process.terminate()
        for process in processes:
            process.join(_PATIENCE_S)
            process.kill()
        self._envs.closed = True  # or its end would ask the dead to close
        if not dead:
            return f"a process of {self._name} answers no more; try --env.vectorization sync to see why"
        number, code = next(iter(dead.items()))
        others = f", and {len(dead) - 1} more with it" if len(dead) > 1 else ""
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return (
            f"the process of env {number} of {self._name} {how}{others}; "
            "--env.vectorization sync steps the envs where errors can be seen"
        )
