"""What the ranks of a pool do in the tests of other people's envs."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from lockstep.core.types import Comm
from lockstep.envs.guest_env import GuestBatch, GuestEnv, GuestStep
from lockstep.envs.torch_env import Transition
from lockstep.learn.torch.evaluation import evaluate, summarise
from lockstep.learn.torch.training import Training
from lockstep.session.make_config import make_config
from lockstep.session.make_env import build_share
from tests.multiproc.jobs_training import Result, result_of

EPISODES = 6


class Watched:
    """Notes what a learner had before it with each action that it gave an env.

    Args:
        env: whose ``step`` is taken over.
    """

    def __init__(self, env: GuestEnv) -> None:
        self._env, self._step = env, env.step
        self.seen: list[torch.Tensor] = []
        env.step = self.step  # type: ignore[method-assign]

    def step(self, action: torch.Tensor) -> Transition:
        self.seen.append(self._env.observations["actor"].clone())
        return self._step(action)


class Shifted:
    """Envs whose observations all lie off by as much."""

    def __init__(self, envs: GuestBatch, shift: float) -> None:
        self._envs, self._shift = envs, shift

    def start(self, seeds: np.ndarray) -> np.ndarray:
        return self._envs.start(seeds) + self._shift

    def restart(self, rows: np.ndarray, seeds: np.ndarray) -> np.ndarray:
        return self._envs.restart(rows, seeds) + self._shift

    def step(self, actions: np.ndarray) -> GuestStep:
        step = self._envs.step(actions)
        return step._replace(observations=step.observations + self._shift)

    @property
    def warning_counts(self) -> Mapping[str, int]:
        return self._envs.warning_counts

    def log_to(self, path: Path) -> None:
        self._envs.log_to(path)

    def close(self) -> None:
        self._envs.close()


def train(comm: Comm, task: str, shares: tuple[int, ...], num_iterations: int, shift: float = 0.0) -> Result:
    """Train for some iterations, then evaluate; each rank's observations are off by ``shift`` times its number.

    The result has under ``seen`` what this rank learned from, ``(num_samples, num_observations)``.
    """
    agent = {"num_mini_batches": 4, "num_steps_per_env": 24}
    config = make_config(task, num_envs=shares, device="cpu", dtype="float64", agent=agent)
    env = build_share(config, config.envs_by_rank(comm.world_size), comm.rank)
    assert isinstance(env, GuestEnv)
    if shift:
        env.engine = Shifted(env.engine, shift * comm.rank)
        env.reset()
    watched = Watched(env)
    training = Training(config, env, comm)
    curve = [training.iterate() for _ in range(num_iterations)]
    num_episodes = [EPISODES // comm.world_size] * comm.world_size
    evaluation_env = build_share(config, num_episodes, comm.rank, "evaluation")
    with torch.inference_mode():
        curve.append({**summarise(evaluate(training.policy, evaluation_env), comm)})
    for each in (env, evaluation_env):
        each.close()
    return result_of(training, curve) | {"seen": torch.cat(watched.seen)}
