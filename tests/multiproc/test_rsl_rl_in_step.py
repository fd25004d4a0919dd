"""RSL-RL's learners on several ranks: the same on all of them, and what one process would make of all samples."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.rank_pool import PerRank, RankPool

pytest.importorskip("rsl_rl", reason="needs RSL-RL: pip install 'lockstep-rl[rsl-rl]'")

from lockstep.learn.torch import checkpoint
from tests.unit.rsl_rl_fixtures import MEMORY, config_with, training_of

JOBS = "tests.multiproc.jobs_rsl_rl"
RND = {"num_outputs": 2, "predictor_hidden_dims": [4], "target_hidden_dims": [4], "weight": 1.0}
NORMALIZED_RND = RND | {"state_normalization": True, "reward_normalization": True}


@pytest.mark.parametrize(
    "settings",
    [
        {"num_envs": (6, 2)},
        {"num_envs": (2, 6), "agent": MEMORY | {"recurrent": "lstm"}},
        {"num_envs": (8, 0)},
        {"num_envs": (0, 4), "agent": MEMORY},
        {"num_envs": (4, 2), "library": {"algorithm": {"rnd_cfg": NORMALIZED_RND}}},
    ],
)
def test_unequal_ranks_with_shifted_observations_stay_in_step(ranks_2: RankPool, settings: dict[str, Any]) -> None:
    one, other = ranks_2.run(f"{JOBS}:iterate_shifted", settings, 3)
    assert one["digest"] == other["digest"]
    assert one["learning_rate"] == other["learning_rate"] != 1e-3  # steered, and the same
    # Each observation counts once, on whatever rank it was seen.
    seen = torch.tensor([row for result in (one, other) for row in result["seen"]], dtype=torch.float64)
    assert len(seen) == 3 * 6 * sum(settings["num_envs"])
    for mean, std, count in (one["moments"], other["moments"]):
        assert count == len(seen)
        torch.testing.assert_close(torch.tensor(mean[0], dtype=torch.float64), seen.mean(0), atol=1e-6, rtol=1e-6)
        expected = seen.std(0, unbiased=False)
        torch.testing.assert_close(torch.tensor(std[0], dtype=torch.float64), expected, atol=1e-6, rtol=1e-6)
    for mine, theirs in zip(one["metrics"], other["metrics"], strict=True):
        assert mine == pytest.approx(theirs, nan_ok=True)
        assert mine["loss/value"] > 0


@pytest.mark.parametrize("agent", [{}, MEMORY])
def test_an_update_is_that_of_one_process_with_all_samples(ranks_2: RankPool, agent: dict[str, Any]) -> None:
    # One minibatch, since ranks deal their samples to several on their own; and a learning rate that can only fall: the
    # divergence of the first pass is 0 but for rounding, which would decide whether it rises.
    steered = {"num_mini_batches": 1, "desired_kl": 1e-6, "max_learning_rate": 1e-3}
    settings = {"num_envs": (5, 2), "agent": steered | agent}
    one, other = ranks_2.run(f"{JOBS}:one_update_apart", settings)
    assert one["together"] == other["together"]
    assert one["alone"].keys() == one["together"].keys()
    for name, values in one["alone"].items():
        assert one["together"][name] == pytest.approx(values, rel=1e-4, abs=1e-6), name
    assert one["together"]["learning_rate"] == [pytest.approx(1e-3 / 1.5)]  # by the second pass


def test_each_minibatch_is_one_exchange_and_a_rollout_none(ranks_2: RankPool) -> None:
    rnd = {"library": {"algorithm": {"rnd_cfg": NORMALIZED_RND}}}
    # 2 passes over 2 minibatches, and the advantages' moments.
    assert ranks_2.run(f"{JOBS}:count_exchanges", {}) == [(0, 5, 1)] * 2
    assert ranks_2.run(f"{JOBS}:count_exchanges", rnd) == [(0, 5, 1)] * 2


def test_a_training_goes_on_from_what_rank_0_alone_has_read(ranks_2: RankPool) -> None:
    settings = {"num_envs": (2, 4), "agent": MEMORY}
    (before, content), _ = ranks_2.run(f"{JOBS}:train_on", settings, 2)
    (after, _), _ = ranks_2.run(f"{JOBS}:train_on", settings, 3)
    assert ranks_2.run(f"{JOBS}:go_on", settings, PerRank([content, None])) == [(before, after)] * 2
    elsewhere = ranks_2.run(f"{JOBS}:go_on", settings | {"num_envs": (4, 2)}, PerRank([content, None]))
    assert elsewhere[0] == elsewhere[1]
    assert elsewhere[0][0] == before


def test_a_student_learns_in_step_from_a_teacher_that_rank_0_alone_can_read(ranks_2: RankPool) -> None:
    teacher = training_of(config_with())
    teacher.iterate()
    checkpoint.save(teacher.state_dict(), Path("teacher.pt"))
    one, other = ranks_2.run(f"{JOBS}:distil", PerRank([Path("teacher.pt"), Path("nowhere.pt")]))
    assert one == other
    assert one[1] < 0.5
