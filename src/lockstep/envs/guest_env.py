"""A batch of other people's envs in torch: time limit, new episodes, statistics; what steps them is handed in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import array_api_compat.numpy as xp
import numpy as np
import torch

from lockstep.core.errors import RunError
from lockstep.core.rng import Stream
from lockstep.core.types import Observations
from lockstep.envs.config import EnvConfig
from lockstep.envs.episodes import EpisodeStatistics, summarise
from lockstep.envs.guest_task import GuestTask
from lockstep.envs.torch_env import Transition


class GuestStep(NamedTuple):
    """What a library gave for one step of all envs; observations are those before any new episode."""

    observations: np.ndarray  # (num_envs, num_observations)
    reward: np.ndarray  # (num_envs,)
    terminated: np.ndarray  # (num_envs,) bool
    truncated: np.ndarray  # (num_envs,) bool: a time limit of the library's own


class GuestBatch(Protocol):
    """Envs of a library. Nothing starts by itself: an episode that has ended is not stepped again before ``restart``.

    Arrays that it returns may be buffers of its own, good until the next call. It has at least one env.
    """

    def start(self, seeds: np.ndarray) -> np.ndarray:
        """Begin everywhere, as if no env had been stepped before.

        Args:
            seeds: ``(num_envs,)`` int64 in [0, 2**31), one for each env.

        Returns:
            ``(num_envs, num_observations)``.
        """

    def restart(self, rows: np.ndarray, seeds: np.ndarray) -> np.ndarray:
        """Begin a new episode in the envs ``rows (n,)``; return their observations ``(n, num_observations)``.

        ``seeds (n,)`` are of these episodes. A library whose envs are seeded once and for all may leave them.
        """

    def step(self, actions: np.ndarray) -> GuestStep:
        """Apply an action to every env: ``(num_envs, size)`` floats, or ``(num_envs,)`` integers from 0 on."""

    @property
    def warning_counts(self) -> Mapping[str, int]:
        """How often the library gave which warning."""

    def log_to(self, path: Path) -> None:
        """Append what the library has to say to a file from now on."""

    def close(self) -> None:
        """Release processes, threads and memory."""


class NoEnvs:
    """The envs of a rank that has none.

    Args:
        num_observations: of an env that it would have.
    """

    def __init__(self, num_observations: int) -> None:
        self._none = np.zeros((0, num_observations))

    def start(self, seeds: np.ndarray) -> np.ndarray:
        """Return the observations of no env."""
        return self._none

    def restart(self, rows: np.ndarray, seeds: np.ndarray) -> np.ndarray:
        """Return the observations of no env."""
        return self._none

    def step(self, actions: np.ndarray) -> GuestStep:
        """Return what no env gave."""
        return GuestStep(self._none, np.zeros(0), np.zeros(0, dtype=bool), np.zeros(0, dtype=bool))

    @property
    def warning_counts(self) -> Mapping[str, int]:
        """Nothing."""
        return {}

    def log_to(self, path: Path) -> None:
        """Write nothing."""

    def close(self) -> None:
        """There is nothing to release."""


class GuestEnv:
    """``num_envs`` envs of a library, a ``BatchEnv`` whose steps mean what those of ``TorchEnv`` do.

    An env that ends an episode begins the next one in the same step: ``Transition.final_observations`` are those that
    the step led to, ``observations`` those of the new episode, and no step is wasted. Each episode of each env has a
    seed of its own, a hash of the run's seed, ``streams``, the env's global id and how many episodes it has had.

    An observation or reward that is not finite, or would not be in ``dtype``, ends the episode as physics do that
    diverge: the step counts for nothing, ``num_diverged`` counts it, and the last observations that were finite stand
    for it. Nothing can stand for those that an episode begins with.

    Args:
        task: sizes and names.
        batch: steps the envs.
        config: the time limit, which holds besides any of the library's own.
        num_envs: how many there are.
        seed: the run's seed.
        device, dtype: of all tensors handed out; float32 or float64.
        first_env_id: global id of this process's first env.
        streams: prefix of the streams' purposes; an evaluation has its own.
        name: of the task, for messages.

    Raises:
        RunError: now or in any later call, an episode begins with observations that are not finite, or the library
            gives arrays of other shapes than ``GuestStep`` says.
    """

    def __init__(
        self,
        task: GuestTask,
        batch: GuestBatch,
        config: EnvConfig,
        *,
        num_envs: int,
        seed: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        first_env_id: int = 0,
        streams: str = "train",
        name: str = "the task",
    ) -> None:
        self.task, self.engine, self.config = task, batch, config
        self._name = name
        self.num_envs = num_envs
        self.device, self.dtype = device, dtype
        self._host_dtype = np.float64 if dtype == torch.float64 else np.float32
        space = task.action_space
        self._action_shape = (num_envs, space.size) if space.kind == "continuous" else (num_envs,)
        self._host_ids = first_env_id + np.arange(num_envs, dtype=np.int32)
        self.env_ids = torch.from_numpy(self._host_ids).to(device, copy=True)
        self._seed_stream = Stream(seed, f"{streams}/episode", xp)
        self._length_stream = Stream(seed, f"{streams}/initial_episode_length", xp)
        self.episodes = EpisodeStatistics(len(task.reward_terms) + len(task.metric_terms), num_envs, device)
        self.num_diverged = torch.zeros((), dtype=torch.int64, device=device)
        self.observations: Observations
        self._seen: np.ndarray  # (num_envs, num_observations): what the observations are made of
        self._episode_length: np.ndarray  # (num_envs,) int64
        self._episode_number = np.zeros(num_envs, dtype=np.int32)  # how many episodes each env has begun before
        self.reset()

    @property
    def episode_length(self) -> torch.Tensor:
        """How many steps each episode has taken, ``(num_envs,)`` int32; it may be set."""
        return torch.from_numpy(self._episode_length).to(self.device, torch.int32)

    @episode_length.setter
    def episode_length(self, lengths: torch.Tensor) -> None:
        self._episode_length = lengths.cpu().numpy().astype(np.int64)

    # --- the steps of an episode ---------------------------------------------------------------------------------

    def reset(self) -> Observations:
        """Start every env anew with its first episode; return the observations."""
        self.num_steps = 0
        self._episode_number[:] = 0
        self._episode_length = self._initial_episode_lengths()
        self._begin()
        return self.observations

    def step(self, action: torch.Tensor) -> Transition:
        """Apply one action per env: ``(num_envs, size)`` floats, or ``(num_envs,)`` integers if discrete.

        Raises:
            ValueError: the actions are of another shape.
        """
        if tuple(action.shape) != self._action_shape:
            raise ValueError(f"actions have shape {tuple(action.shape)}, not {self._action_shape}")
        self.num_steps += 1
        step = self._checked(self.engine.step(action.cpu().numpy()))
        whole = np.isfinite(step.reward) & np.isfinite(step.observations).all(axis=1)
        terminated = step.terminated | ~whole
        self._episode_length += 1
        truncated = (step.truncated | (self._episode_length >= self.config.max_episode_steps)) & ~terminated
        done = terminated | truncated
        final = np.where(whole[:, None], step.observations, self._seen)
        rows = done.nonzero()[0]
        now = self._after_restart(rows, final) if rows.size else final
        final_observations = self._groups(final)
        self.observations = self._groups(now) if rows.size else final_observations
        self._seen = now
        reward = self._tensor(np.where(whole, step.reward, 0.0))
        terms = reward.unsqueeze(1)
        ended, cut = (torch.from_numpy(flags).to(self.device) for flags in (terminated, truncated))
        self.episodes.add(terms, ended | cut)
        self.num_diverged += int((~whole).sum())
        return Transition(self.observations, reward, terms, ended, cut, final_observations)

    def summarise(self, sums: Sequence[float]) -> dict[str, float | None]:
        """Turn sums over finished episodes into metrics by name, as ``TorchEnv.summarise`` does."""
        return summarise(sums, self.task.reward_terms, self.task.metric_terms)

    def _after_restart(self, rows: np.ndarray, observations: np.ndarray) -> np.ndarray:
        """Let the envs of ``rows`` begin their next episodes; return the observations of all, a copy."""
        self._episode_number[rows] += 1
        self._episode_length[rows] = 0
        now = observations.copy()
        now[rows] = self._first(rows, self.engine.restart(rows, self._seeds(rows)))
        return now

    def _begin(self) -> None:
        """Let every env begin the episode that its number says."""
        self.episodes.restart(whole=torch.from_numpy(self._episode_length == 0).to(self.device))
        self.num_diverged.zero_()
        rows = np.arange(self.num_envs)
        self._seen = self._first(rows, self.engine.start(self._seeds(rows))).copy()
        self.observations = self._groups(self._seen)

    def _seeds(self, rows: np.ndarray) -> np.ndarray:
        """Return a seed in [0, 2**31) for the episode that each env of ``rows (n,)`` is at."""
        numbers, which = np.unique(self._episode_number[rows], return_inverse=True)
        # A table of every number for every env, of which one entry each is meant: most often there is one number.
        bits = self._seed_stream.bits(numbers, self._host_ids[rows], 1)[0]  # (num_numbers, n)
        seeds: np.ndarray = bits[which, np.arange(rows.size)].astype(np.int64) & (2**31 - 1)
        return seeds

    def _initial_episode_lengths(self) -> np.ndarray:
        if not self.config.randomize_initial_episode_length:
            return np.zeros(self.num_envs, dtype=np.int64)
        counters = self._length_stream.counters(0, 1)
        uniform = self._length_stream.uniform(counters, self._host_ids, 1, np.float64)[0, :, 0]
        lengths: np.ndarray = (uniform * self.config.max_episode_steps).astype(np.int64)
        return lengths

    def _groups(self, observations: np.ndarray) -> Observations:
        tensor = self._tensor(observations)
        return {"actor": tensor, "critic": tensor}

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        """Return a copy on the env's device: the array's memory may be the library's."""
        return torch.from_numpy(array).to(device=self.device, dtype=self.dtype, copy=True)

    # --- what the library gives ----------------------------------------------------------------------------------

    def _checked(self, step: GuestStep) -> GuestStep:
        """Return a step of all envs in the env's dtype."""
        count = (self.num_envs,)
        for name in ("reward", "terminated", "truncated"):
            self._check_shape(name, getattr(step, name), count)
        observations = self._numbers(step.observations, self.num_envs)
        return step._replace(observations=observations, reward=self._cast(step.reward))

    def _first(self, rows: np.ndarray, given: np.ndarray) -> np.ndarray:
        """Return observations that episodes begin with in the envs ``rows (n,)``, in the env's dtype."""
        observations = self._numbers(given, rows.size)
        broken = ~np.isfinite(observations)
        if broken.any():
            place, entry = np.argwhere(broken)[0]
            value = given[place, entry]
            mend = "; use --dtype float64" if np.isfinite(value) and self.dtype != torch.float64 else ""
            raise RunError(
                f"env {self._host_ids[rows[place]]} of {self._name} begins an episode with an observation that is not "
                f"finite in {np.dtype(self._host_dtype).name}: entry {entry} is {value}{mend}"
            )
        return observations

    def _numbers(self, observations: np.ndarray, num_rows: int) -> np.ndarray:
        self._check_shape("observations", observations, (num_rows, self.task.num_observations["actor"]))
        return self._cast(observations)

    def _check_shape(self, what: str, array: np.ndarray, shape: tuple[int, ...]) -> None:
        if array.shape != shape:
            raise RunError(f"{self._name} gives {what} of shape {array.shape}, not {shape}")

    def _cast(self, array: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore"):  # what is too large is not finite, and is dealt with as such
            return array.astype(self._host_dtype, copy=False)

    # --- saving and continuing -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return how many episodes each env has had; what an env is in the middle of, its library does not tell."""
        return {
            "num_steps": self.num_steps,
            "episode_length": self.episode_length,
            "episode_number": torch.from_numpy(self._episode_number).to(self.device, copy=True),
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on after ``state_dict``: every env begins the episode after the one that it was in."""
        self.num_steps = saved["num_steps"]
        self._episode_number = saved["episode_number"].cpu().numpy().astype(np.int32) + 1
        self._episode_length = np.zeros(self.num_envs, dtype=np.int64)
        self._begin()

    def close(self) -> None:
        """Release the envs."""
        self.engine.close()
