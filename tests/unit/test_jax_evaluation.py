"""Evaluation in JAX: one whole episode per env, shared out to ranks, padding left out; worked out by hand."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.distributed.jax import REPLICATED, SHARDED, make_mesh
from lockstep.learn.jax.evaluation import run_episodes, summarise
from tests.unit.jax_env_fixtures import toy_jax_env
from tests.unit.jax_ppo_fixtures import padded_ids
from tests.unit.learner_fixtures import Line
from tests.unit.watched_fixtures import watched

pytestmark = pytest.mark.usefixtures("double_precision")

NAN = float("nan")


@pytest.mark.parametrize("shares", [(4,), (2, 2), (1, 3, 0)], ids=str)
def test_returns_lengths_and_metrics_by_hand(shares: tuple[int, ...]) -> None:
    # By their ids the envs go from 0 by 1 to 3, by 2 to 4, by 3 to 3; the last one fails. Padding would go by 1.
    pace = jnp.array([1.0, 2.0, 3.0, NAN, 1.0])

    def run(env_ids: Any) -> Any:
        def act(observations: Any, memory: Any) -> Any:
            return pace[env_ids][:, None], memory

        episodes = run_episodes(env, act, jnp.zeros(env_ids.shape), env_ids)
        return episodes, summarise(episodes, env_ids, env)

    with watched(Line):
        env = toy_jax_env(Line())
        ranks = make_mesh(jax.devices()[: len(shares)])
        ids = padded_ids(shares)
        program = ranks.compile(run, (SHARDED,), (SHARDED, REPLICATED))
        episodes, metrics = program(ranks.shard(ids))
    # In the order of the task: progress, alive, distance, is_step.
    assert np.asarray(episodes.term_sums)[ids >= 0].tolist() == [[3, 3, 6, 3], [4, 2, 6, 2], [3, 1, 3, 1], [0] * 4]
    assert np.asarray(episodes.lengths)[ids >= 0].tolist() == [3, 2, 1, 1]
    assert not np.asarray(episodes.term_sums)[ids < 0].any()
    assert {name: float(value) for name, value in metrics.items()} == {
        "mean_return": 16 / 4,
        "mean_episode_length": 7 / 4,
        "reward/progress": 10 / 4,
        "reward/alive": 6 / 4,
        "metric/distance": pytest.approx(15 / 7),
        "metric/is_step": pytest.approx(6 / 7),
    }
