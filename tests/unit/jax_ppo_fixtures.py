"""PPO in JAX on the devices of this process, as the tests train with it: the algorithm and its envs, no harness."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lockstep.core.types import PureEngine, Task
from lockstep.distributed.jax import REPLICATED, SHARDED, make_mesh
from lockstep.envs.config import EnvConfig
from lockstep.envs.jax_env import JaxEnv
from lockstep.learn.config import TrainConfig
from lockstep.learn.jax.algorithm import TrainState
from lockstep.learn.jax.ppo import Ppo, PpoState, Weights
from lockstep.recipes.catalog import make_task
from lockstep.sim import jax_host, mujoco_c
from lockstep.sim.analytic import PureAnalyticEngine


def jax_env(config: TrainConfig, streams: str = "train", task: Any = None, **env: Any) -> JaxEnv:
    """Return envs of the config's task, or of a toy with equations of motion of its own."""
    dtype = jnp.float64 if config.dtype == "float64" else jnp.float32
    env_config = config.env.model_copy(update=env)
    if streams != "train":
        env_config = env_config.model_copy(update={"randomize_initial_episode_length": False})
    task = make_task(config.model_copy(update={"env": env_config})) if task is None else task
    return JaxEnv(
        task, _engine(task, env_config, config.seed, dtype), env_config, seed=config.seed, dtype=dtype, streams=streams
    )


def _engine(task: Task, config: EnvConfig, seed: int, dtype: Any) -> PureEngine:
    if task.model_path is None:
        return PureAnalyticEngine(task, config.decimation, dtype)  # type: ignore[arg-type]
    return jax_host.make_pure_engine(
        task, decimation=config.decimation, num_threads=1, seed=seed, dtype=dtype, host_engine=mujoco_c.make_engine
    )


def padded_ids(shares: tuple[int, ...]) -> np.ndarray:
    """Return the global ids of all ranks' envs, each rank's filled up with -1 to as many as the largest has."""
    ids = np.full((len(shares), max(shares)), -1, np.int32)
    for rank, share in enumerate(shares):
        ids[rank, :share] = sum(shares[:rank]) + np.arange(share)
    return ids.reshape(-1)


class PpoOnRanks:
    """A training on as many devices as there are shares; ``state`` is global arrays.

    Args:
        config: of the run.
        shares: envs of each rank; None for all of the config's on one.
        env: of the training; None for the config's.
        algorithm: a class; a test's own may be broken on purpose.
        is_set_up: False for one that is only to be traced; it has no state.
    """

    def __init__(
        self,
        config: TrainConfig,
        shares: tuple[int, ...] | None = None,
        env: JaxEnv | None = None,
        algorithm: Callable[..., Ppo] = Ppo,
        is_set_up: bool = True,
    ) -> None:
        self._seed = config.seed
        self.shares = shares or config.envs_by_rank(1)
        self.ranks = make_mesh(jax.devices()[: len(self.shares)])
        self.algorithm = algorithm(config, env or jax_env(config), jax_env(config, "evaluation"))
        state = TrainState(REPLICATED, SHARDED)
        self._setup = self.ranks.compile(self.algorithm.setup, (REPLICATED, SHARDED), state)
        self._step = self.ranks.compile(self.algorithm.step, (state,), (state, REPLICATED))
        self._evaluate = self.ranks.compile(self.algorithm.evaluate, (state, SHARDED), REPLICATED)
        self.state: TrainState
        if is_set_up:
            self.restart()

    def restart(self) -> None:
        """Begin anew."""
        self.state = self._setup(jax.random.key(self._seed), self._ids())

    def lowered_step(self) -> jax.stages.Lowered:
        """Return an iteration as the compiler gets it."""
        state = jax.eval_shape(self._setup, jax.random.key(self._seed), self._ids())
        lowered: jax.stages.Lowered = self._step.lower(state)  # type: ignore[attr-defined]
        return lowered

    def _ids(self) -> jax.Array:
        ids: jax.Array = self.ranks.shard(padded_ids(self.shares))
        return ids

    @property
    def replicated(self) -> PpoState:
        replicated: PpoState = self.state.replicated
        return replicated

    def load(self, weights: Weights) -> None:
        """Take over weights, as ``--checkpoint`` does."""
        replicated = self.algorithm.with_weights(self.replicated, self.ranks.replicate(weights))
        self.state = self.state._replace(replicated=replicated)

    def iterate(self) -> dict[str, Any]:
        """Run an iteration; return its metrics in numpy."""
        self.state, metrics = self._step(self.state)
        return {name: np.asarray(value)[()] for name, value in metrics.items()}

    def evaluate(self, num_episodes: int) -> dict[str, float]:
        """Run episodes, shared out to the ranks as evenly as that goes."""
        num_ranks = len(self.shares)
        shares = tuple(num_episodes // num_ranks + (rank < num_episodes % num_ranks) for rank in range(num_ranks))
        metrics = self._evaluate(self.state, self.ranks.shard(padded_ids(shares)))
        return {name: float(value) for name, value in metrics.items()}


def difference(one: Any, other: Any) -> float:
    """Return the largest difference between two nests of arrays."""
    one_leaves, other_leaves = jax.tree.leaves(one), jax.tree.leaves(other)
    assert len(one_leaves) == len(other_leaves)
    return max(
        float(np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)).max(initial=0))
        for a, b in zip(one_leaves, other_leaves, strict=True)
    )
