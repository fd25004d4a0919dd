"""The config of a process that trains alone: its ranks' part of the work of all, no more and no less."""

from types import SimpleNamespace
from typing import Any

import pytest

import lockstep
from lockstep.learn.config import PpoConfig, SacConfig
from lockstep.session import jax_apart


def config_with(**settings: Any) -> Any:
    return lockstep.make_config("cartpole_classic", **({"ml_framework": "jax", "device": "cpu"} | settings))


def share_of(config: Any, num_ranks: int, *local_ranks: int) -> Any:
    ranks: Any = SimpleNamespace(num_ranks=num_ranks, local_ranks=local_ranks)
    return jax_apart.share_of(config, ranks)


def test_each_rank_keeps_its_envs_and_its_minibatches() -> None:
    config = config_with(num_envs=(16, 8, 12, 4))
    first, second = share_of(config, 4, 0, 1), share_of(config, 4, 2, 3)
    assert first.envs_by_rank(2) == (16, 8)
    assert second.envs_by_rank(2) == (12, 4)
    assert first.agent_as(PpoConfig) == config.agent
    assert config.evaluation.interval > 0
    assert first.evaluation.interval == 0


def test_a_process_without_envs_has_the_fewest_that_can_train() -> None:
    agent = {"num_mini_batches": 4}
    config = config_with(num_envs=(16, 8, 0, 0), agent=agent)
    assert share_of(config, 4, 2, 3).envs_by_rank(2) == (4, 0)


@pytest.mark.parametrize(
    ("batch_size", "own_batch_sizes"),
    [(96, (64, 32)), (24, (16, 8)), (8, (6, 2))],
    ids=["samples of an env", "one of each env", "envs of a sample"],
)
def test_what_sac_counts_over_all_ranks_is_shared_out(batch_size: int, own_batch_sizes: tuple[int, int]) -> None:
    num_envs = (16, 8) if batch_size > 8 else (18, 6)
    agent = {"batch_size": batch_size, "replay_size": 24 * 40, "learning_starts": 100, "num_steps_per_env": 4}
    config = config_with(algorithm="sac", num_envs=num_envs, agent=agent)
    for rank, own_batch_size in enumerate(own_batch_sizes):
        alone = share_of(config, 2, rank)
        own = alone.agent_as(SacConfig)
        assert alone.envs_by_rank(1) == (num_envs[rank],)
        assert own.batch_size == own_batch_size
        assert own.capacity_per_env(num_envs[rank]) == 40
        # After 5 env steps of each of 24 envs, and no earlier.
        assert 4 * num_envs[rank] < own.learning_starts <= 5 * num_envs[rank]
        assert own.num_updates == config.agent_as(SacConfig).num_updates


@pytest.mark.parametrize(("num_ranks", "local_ranks", "threads"), [(2, (0,), 4), (4, (0, 1), 2), (8, (0, 1, 2, 3), 2)])
def test_an_engine_has_as_many_threads_as_beside_the_others(
    num_ranks: int, local_ranks: tuple[int, ...], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two processes with 4 threads each, or 8 for four devices."""
    monkeypatch.setattr("jax.process_count", lambda: 2)
    total = 8 if len(local_ranks) == 4 else 4
    alone = share_of(config_with(num_envs=8, env={"num_physics_threads": total}), num_ranks, *local_ranks)
    # As the engine that is called on the host shares them out.
    num_engines = max(1, len(local_ranks) // 2)
    assert alone.env.num_physics_threads // num_engines == threads


@pytest.mark.parametrize("task", ["brax/ant", "gymnax/CartPole-v1", "playground/CartpoleBalance"])
def test_an_env_whose_library_takes_no_threads_is_given_none(task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jax.process_count", lambda: 2)
    config = lockstep.make_config(task, num_envs=16)
    assert share_of(config, 2, 1).env == config.env
