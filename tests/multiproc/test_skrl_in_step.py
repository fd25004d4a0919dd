"""skrl's agents on two ranks that differ in what they see and in how much: one policy, one normaliser, one rate."""

from typing import Any

import pytest
import torch

from tests.rank_pool import RankPool
from tests.unit.skrl_fixtures import DISCRETE

JOBS = "tests.multiproc.jobs_skrl"
UNEQUAL = {"num_envs": (16, 8)}
CRITICS = {"critic_1", "critic_2", "critic_optimizer", "target_critic_1", "target_critic_2"}


@pytest.mark.parametrize(
    ("settings", "changed"),
    [
        ({}, {"policy", "value", "optimizer", "scheduler"}),
        ({"library": {"value_preprocessor": "RunningStandardScaler"}}, {"policy", "value", "value_preprocessor"}),
        ({"algorithm": "a2c"} | DISCRETE, {"policy", "value", "optimizer"}),
        ({"algorithm": "rpo"}, {"policy", "value", "optimizer"}),
        (
            {"algorithm": "sac"},
            CRITICS | {"policy", "policy_optimizer", "entropy_optimizer", "log_entropy_coefficient"},
        ),
        ({"algorithm": "td3"}, CRITICS | {"policy", "target_policy", "policy_optimizer"}),
        ({"algorithm": "ddpg"}, {"policy", "target_policy", "critic", "target_critic"}),
        ({"algorithm": "dqn"} | DISCRETE, {"q_network", "target_q_network", "optimizer"}),
        ({"algorithm": "ddqn"} | DISCRETE, {"q_network", "target_q_network", "optimizer"}),
    ],
    ids=["ppo", "ppo with values scaled", "a2c, discrete", "rpo", "sac", "td3", "ddpg", "dqn", "ddqn"],
)
def test_ranks_that_see_and_count_differently_stay_in_step(
    ranks_2: RankPool, settings: dict[str, Any], changed: set[str]
) -> None:
    num_iterations = 4
    first, second = results = ranks_2.run(f"{JOBS}:iterate_shifted", UNEQUAL | settings, num_iterations)
    assert first["digest"] == second["digest"]
    assert changed | {"observation_preprocessor", "counters"} <= set(first["changed"])
    assert first["metrics"] == pytest.approx(second["metrics"], nan_ok=True)
    count, mean, variance = first["moments"]
    pooled = torch.tensor([row for each in results for row in each["seen"]], dtype=torch.float64)
    assert count == len(pooled) == num_iterations * 6 * (16 + 8)
    torch.testing.assert_close(torch.tensor(mean, dtype=torch.float64), pooled.mean(0), rtol=1e-6, atol=1e-6)
    spread = pooled.var(0, correction=0)
    torch.testing.assert_close(torch.tensor(variance, dtype=torch.float64), spread, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "library", [{}, {"value_preprocessor": "RunningStandardScaler"}], ids=["plain", "values scaled"]
)
def test_an_update_of_two_ranks_is_that_of_one_process_with_all_samples(
    ranks_2: RankPool, library: dict[str, Any]
) -> None:
    """With one minibatch per pass, since the library deals samples to minibatches at random, and a fixed rate."""
    agent = {"num_mini_batches": 1, "num_learning_epochs": 4, "schedule": "fixed"}
    apart = ranks_2.run(f"{JOBS}:one_update_apart", UNEQUAL | {"agent": agent, "library": library})
    together, alone = apart[0]["together"], apart[0]["alone"]
    assert apart[1]["together"] == together
    assert together.keys() == alone.keys()
    for name, values in together.items():
        assert values == pytest.approx(alone[name], rel=1e-4, abs=1e-5), name


@pytest.mark.parametrize("algorithm", ["ppo", "sac"])
def test_a_training_goes_on_bitwise_from_what_rank_0_alone_has_read(ranks_2: RankPool, algorithm: str) -> None:
    settings = UNEQUAL | {"algorithm": algorithm}
    (whole, _), _ = ranks_2.run(f"{JOBS}:train_on", settings, 5)
    (half, content), _ = ranks_2.run(f"{JOBS}:train_on", settings, 3)
    assert ranks_2.run(f"{JOBS}:go_on", settings, content, 2) == [(half, whole)] * 2


def test_what_would_let_ranks_go_apart_is_refused_on_all(ranks_2: RankPool) -> None:
    threshold = ranks_2.run(f"{JOBS}:refusal", {"library": {"kl_threshold": 0.02}})
    assert threshold[0] == threshold[1]
    assert "library.kl_threshold 0.02" in threshold[0] and "there are 2" in threshold[0]
    nobody = ranks_2.run(f"{JOBS}:refusal", {"num_envs": (8, 0)})
    assert nobody == ["rl_library skrl can't train on a rank without envs, as rank 1 is; give it some"] * 2
