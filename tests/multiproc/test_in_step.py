"""Several ranks make the update that one process makes, and hold the same bits."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.distributed.torch_comm import SoloComm
from tests.multiproc import jobs_training
from tests.multiproc.jobs_training import Result
from tests.rank_pool import RankPool

JOBS = "tests.multiproc.jobs_training"
# A whirling pole doubles a difference about every 16 env steps, so after 640 of them (20 iterations of the recipe) even
# one process whose sums are re-ordered is 1e-4 away from itself. After 320 it is 1e-9.
FIXED = {"agent": {"schedule": "fixed", "learning_rate": 1e-3, "num_steps_per_env": 16}}
ADAPTIVE = {"agent": {"schedule": "adaptive"}}
TOTAL = 512
NUM_FIXED, NUM_ADAPTIVE = 20, 5


def alone(settings: dict[str, Any], num_iterations: int, task: str = "cartpole_swingup", **files: Path) -> Result:
    torch.set_num_threads(1)
    return jobs_training.train(SoloComm(), settings, num_iterations, task, files.get("resume"), files.get("save"))


@pytest.fixture(scope="module")
def fixed_alone() -> Result:
    return alone({"num_envs": TOTAL} | FIXED, NUM_FIXED)


@pytest.fixture(scope="module")
def adaptive_alone() -> Result:
    return alone({"num_envs": TOTAL} | ADAPTIVE, NUM_ADAPTIVE)


def untimed(metrics: dict[str, Any]) -> dict[str, float]:
    """What does not depend on how fast a rank is; -1 stands for a mean over no episodes."""
    kept = {name: value for name, value in metrics.items() if not name.startswith(("time/", "steps_per_s"))}
    return {name: -1.0 if value is None else value for name, value in kept.items()}


def assert_same_training(one: Result, other: Result, tolerance: float = 1e-6) -> None:
    """Compare the end of the curve that both have, parameters and normalisers."""
    shared = min(len(one["curve"]), len(other["curve"]))
    for mine, theirs in zip(one["curve"][-shared:], other["curve"][-shared:], strict=True):
        assert untimed(mine) == pytest.approx(untimed(theirs), rel=tolerance, abs=tolerance)
    assert one["policy"].keys() == other["policy"].keys()
    for name, tensor in one["policy"].items():
        torch.testing.assert_close(tensor, other["policy"][name], rtol=tolerance, atol=tolerance, msg=name)


def the_one(results: list[Result]) -> Result:
    """Return what all ranks agree on, bit for bit."""
    assert len({result["digest"] for result in results}) == 1
    assert len({str([untimed(metrics) for metrics in result["curve"]]) for result in results}) == 1
    return results[0]


# --- world size ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shares", [TOTAL // 2, (320, 192)])
def test_two_ranks_train_as_one_process_does(
    ranks_2: RankPool, shares: Any, fixed_alone: Result, adaptive_alone: Result
) -> None:
    fixed = the_one(ranks_2.run(f"{JOBS}:train", {"num_envs": shares} | FIXED, NUM_FIXED))
    assert_same_training(fixed, fixed_alone)
    adaptive = the_one(ranks_2.run(f"{JOBS}:train", {"num_envs": shares} | ADAPTIVE, NUM_ADAPTIVE))
    assert_same_training(adaptive, adaptive_alone)


def test_four_ranks_train_as_one_process_does(ranks_4: RankPool, fixed_alone: Result, adaptive_alone: Result) -> None:
    fixed = the_one(ranks_4.run(f"{JOBS}:train", {"num_envs": TOTAL // 4} | FIXED, NUM_FIXED))
    assert_same_training(fixed, fixed_alone)
    adaptive = the_one(ranks_4.run(f"{JOBS}:train", {"num_envs": TOTAL // 4} | ADAPTIVE, NUM_ADAPTIVE))
    assert_same_training(adaptive, adaptive_alone)


# Pushes and new commands several times within 1.6 s, and all else that is random: robots, noise, starts.
LIVELY = {
    "num_envs": TOTAL,
    "env": {
        "push_interval_s": (0.1, 1.0),
        "command_interval_s": (0.2, 1.0),
        "randomize_initial_episode_length": False,
        "num_physics_threads": 1,
    },
    "agent": {"schedule": "adaptive", "num_steps_per_env": 16},
}


@pytest.fixture(scope="module")
def robots_alone() -> Result:
    result = alone(LIVELY, NUM_ADAPTIVE, "quadruped_velocity_flat")
    assert sum(metrics["num_episodes"] for metrics in result["curve"]) > TOTAL / 4  # many fall
    return result


def test_a_robot_trains_the_same_on_any_number_of_ranks(
    ranks_2: RankPool, ranks_4: RankPool, robots_alone: Result
) -> None:
    for pool in (ranks_2, ranks_4):
        settings = LIVELY | {"num_envs": TOTAL // pool.world_size}
        results = pool.run(f"{JOBS}:train", settings, NUM_ADAPTIVE, "quadruped_velocity_flat")
        assert_same_training(the_one(results), robots_alone)


def test_rounding_is_amplified_no_more_than_in_one_process(ranks_2: RankPool) -> None:
    # Rollouts of the recipe's length, twice as many iterations as are asked to agree.
    def parameters(result: Result) -> torch.Tensor:
        return torch.cat([tensor.flatten() for name, tensor in result["policy"].items() if "normalizer" not in name])

    settings: dict[str, Any] = {"num_envs": 64} | ADAPTIVE
    whole = parameters(alone(settings, 10))
    reordered = [settings | {"agent": ADAPTIVE["agent"] | {"chunk_size": size}} for size in (100, 200, 300)]
    own = max(float((parameters(alone(each, 10)) - whole).abs().max()) for each in reordered)
    shared = parameters(the_one(ranks_2.run(f"{JOBS}:train", settings | {"num_envs": 32}, 10)))
    assert 0.0 < float((shared - whole).abs().max()) < 10 * own


def test_a_run_of_two_ranks_goes_on_at_one_and_at_four(
    ranks_2: RankPool, ranks_4: RankPool, fixed_alone: Result, tmp_path: Path
) -> None:
    half, path = NUM_FIXED // 2, tmp_path / "half.pt"
    ranks_2.run(f"{JOBS}:train", {"num_envs": TOTAL // 2} | FIXED, half, "cartpole_swingup", None, path)
    assert_same_training(alone({"num_envs": TOTAL} | FIXED, half, resume=path), fixed_alone)
    four = ranks_4.run(f"{JOBS}:train", {"num_envs": TOTAL // 4} | FIXED, half, "cartpole_swingup", path)
    assert_same_training(the_one(four), fixed_alone)


@pytest.mark.parametrize("schedule", ["adaptive", "fixed"])
def test_curves_are_of_all_ranks_episodes(ranks_4: RankPool, schedule: str) -> None:
    # Episodes of a few steps, which end on every rank, and more often where there are more envs.
    settings = {"agent": {"schedule": schedule, "num_steps_per_env": 32}, "seed": 5}
    expected = alone({"num_envs": 48} | settings, 4, "cartpole_classic")
    shared = the_one(ranks_4.run(f"{JOBS}:train", {"num_envs": (4, 24, 12, 8)} | settings, 4, "cartpole_classic"))
    assert sum(metrics["num_episodes"] for metrics in expected["curve"]) > 50
    assert_same_training(shared, expected, 1e-9)


@pytest.mark.parametrize("recurrent", ["none", "gru", "lstm"])
def test_a_rank_without_envs_takes_part_and_changes_nothing(ranks_2: RankPool, recurrent: str) -> None:
    agent = {"recurrent": recurrent, "recurrent_hidden_dim": 8}
    for task in ("cartpole_classic", "cartpole_swingup"):
        expected = alone({"num_envs": 16, "agent": agent}, 3, task)
        ranks = ranks_2.run(f"{JOBS}:train", {"num_envs": (16, 0), "agent": agent}, 3, task)
        assert_same_training(the_one(ranks), expected, 1e-9)


# --- all options ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("normalize", "schedule", "recurrent"),
    list(product([True, False], ["adaptive", "fixed"], ["none", "gru", "lstm"])),
)
def test_ranks_hold_the_same_bits_also_after_a_resume(
    ranks_2: RankPool, tmp_path: Path, normalize: bool, schedule: str, recurrent: str
) -> None:
    agent = {
        "normalize_observations": normalize,
        "normalize_advantages": normalize,
        "schedule": schedule,
        "recurrent": recurrent,
        "recurrent_hidden_dim": 8,
        "actor_hidden_dims": (16,),
        "critic_hidden_dims": (16,),
    }
    settings: dict[str, Any] = {"num_envs": (24, 8), "agent": agent}
    path = tmp_path / "only_rank_0_reads_it.pt"
    whole = the_one(ranks_2.run(f"{JOBS}:train", settings, 4, "cartpole_classic"))
    ranks_2.run(f"{JOBS}:train", settings, 2, "cartpole_classic", None, path)
    resumed = the_one(ranks_2.run(f"{JOBS}:train", settings, 2, "cartpole_classic", path))
    assert resumed["digest"] == whole["digest"]


# --- the sentinel --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "policy.actor.perceptron.2.weight",
        "policy.critic_normalizer.m2",
        "optimizer.critic.perceptron.0.bias.exp_avg_sq",
        "optimizer.actor.perceptron.0.weight.step",
        "learning_rate",
    ],
)
def test_a_planted_difference_is_named_by_the_next_look(ranks_4: RankPool, name: str) -> None:
    said = ranks_4.run(f"{JOBS}:train_with_a_difference", name, 2, 4)
    assert len(set(said)) == 1
    assert said[0].startswith(f"ranks are out of step in iteration 4: {name} differs on rank 2")


# --- exchanges -----------------------------------------------------------------------------------------------------


def test_exchanges_of_an_iteration(ranks_2: RankPool) -> None:
    settings = {"num_envs": 32, "agent": {"num_learning_epochs": 3, "num_mini_batches": 4}}
    for counts in ranks_2.run(f"{JOBS}:count_collectives", settings):
        assert counts == {"iteration": 3 * 4 + 2, "rollout": 0}


@pytest.mark.parametrize(("rank", "reason"), [(0, "preempted"), (3, "preempted"), (2, "interrupted")])
def test_what_one_rank_is_asked_all_do(ranks_4: RankPool, rank: int, reason: str) -> None:
    assert ranks_4.run(f"{JOBS}:stop_where_asked", rank, reason) == [(2, reason)] * 4


@pytest.mark.parametrize("num_episodes", [10, 3])
def test_evaluation_is_shared_out(ranks_2: RankPool, ranks_4: RankPool, num_episodes: int) -> None:
    expected = jobs_training.evaluation(SoloComm(), num_episodes)
    for pool in (ranks_2, ranks_4):
        results = pool.run(f"{JOBS}:evaluation", num_episodes)
        assert results[0]["summary"] == pytest.approx(expected["summary"], rel=1e-9)
        assert [result["summary"] for result in results] == [results[0]["summary"]] * pool.world_size
        assert sum(result["num_steps"] for result in results) == expected["num_steps"]
