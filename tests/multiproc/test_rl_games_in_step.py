"""rl_games' learner on two ranks that differ in what they see and in how much: one policy, one normaliser, one rate."""

from typing import Any

import pytest
import torch

from tests.rank_pool import RankPool

JOBS = "tests.multiproc.jobs_rl_games"
UNEQUAL = {"num_envs": (16, 8)}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"agent": {"recurrent": "gru"}},
        {"task": "cartpole_classic", "library": {"config": {"schedule_type": "standard"}}},
    ],
    ids=["central value", "memory", "standard schedule"],
)
def test_ranks_that_see_and_count_differently_stay_in_step(ranks_2: RankPool, settings: dict[str, Any]) -> None:
    first, second = results = ranks_2.run(f"{JOBS}:iterate_shifted", UNEQUAL | settings, 3)
    assert first["digest"] == second["digest"]
    assert first["learning_rate"] == second["learning_rate"] != 1e-3  # it was steered, and alike
    for group, (count, mean, variance) in first["moments"].items():
        pooled = torch.tensor([row for each in results for row in each["seen"][group]], dtype=torch.float64)
        beginning = 1.0  # rl_games begins as if one sample of mean 0 and variance 1 had been seen
        assert count == len(pooled) + beginning == 3 * 6 * (16 + 8) + beginning
        total = pooled.sum(0) / count
        torch.testing.assert_close(torch.tensor(mean, dtype=torch.float64), total, rtol=1e-6, atol=1e-6)
        spread = ((pooled - total).square().sum(0) + beginning * (1 + total.square())) / count
        torch.testing.assert_close(torch.tensor(variance, dtype=torch.float64), spread, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("task", ["cartpole_balance", "cartpole_classic"])
def test_an_update_of_two_ranks_is_that_of_one_process_with_all_samples(ranks_2: RankPool, task: str) -> None:
    """With one minibatch per pass, since rl_games deals samples to minibatches by their order."""
    settings = UNEQUAL | {"task": task, "agent": {"num_mini_batches": 1, "num_learning_epochs": 4}}
    apart = ranks_2.run(f"{JOBS}:one_update_apart", settings)
    together, alone = apart[0]["together"], apart[0]["alone"]
    assert apart[1]["together"] == together
    assert together.keys() == alone.keys()
    for name, values in together.items():
        assert values == pytest.approx(alone[name], rel=1e-4, abs=1e-5), name


def test_what_rank_0_alone_has_read_is_on_all_ranks(ranks_2: RankPool) -> None:
    (saved_digest, content), _ = ranks_2.run(f"{JOBS}:train_on", UNEQUAL, 2)
    first, second = ranks_2.run(f"{JOBS}:go_on", UNEQUAL, content)
    assert first == second
    assert first[0] == saved_digest
