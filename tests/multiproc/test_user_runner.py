"""A runner of one's own on real ranks: in step from the first iteration, after a load, and at the end."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.rank_pool import PerRank, RankPool
from tests.unit.learner_fixtures import differences

RUN = "tests.multiproc.jobs_runner:run"


def counters(answer: dict[str, Any]) -> list[tuple[int, int]]:
    return [(entry["iteration"], entry["env_steps"]) for entry in answer["metrics"]]


def test_ranks_begin_and_stay_alike(ranks_2: RankPool) -> None:
    first, other = ranks_2.run(RUN, "Fitting", [12, 4])  # their own weights differ: each is seeded by its rank
    assert first["status"] == other["status"] == "finished"
    assert differences(first["state"], other["state"]) == []
    assert counters(first) == counters(other) == [(1, 32), (2, 64), (3, 96), (4, 128)]
    assert [entry["mean_return"] for entry in first["metrics"]] == [entry["mean_return"] for entry in other["metrics"]]


def test_only_rank_0_needs_the_checkpoint(ranks_2: RankPool, ranks_4: RankPool) -> None:
    path = Path("model_2.pt")
    ranks_2.run(RUN, "Fitting", [12, 4], 2, None, path.absolute())
    saved = torch.load(path, weights_only=True)
    assert (saved["iteration"], saved["env_steps"]) == (2, 64)
    answers = ranks_4.run(RUN, "Fitting", [4, 4, 4, 4], 5, PerRank([path.absolute(), *[Path("not there")] * 3]))
    for answer in answers:
        assert counters(answer) == [(3, 96), (4, 128), (5, 160)]
        assert differences(answer["state"], answers[0]["state"]) == []
    assert answers[0]["state"]["optimizer"]["state"][0]["step"] == 5


@pytest.mark.parametrize("asked", [0, 1])
def test_a_stop_that_one_rank_was_asked_for_is_everyones(ranks_2: RankPool, asked: int) -> None:
    stop_in = PerRank([2 if rank == asked else None for rank in range(2)])
    answers = ranks_2.run(RUN, "Fitting", [4, 4], 4, None, None, stop_in)
    assert [(answer["status"], len(answer["metrics"])) for answer in answers] == [("preempted", 2)] * 2


def test_a_runner_whose_ranks_drift_apart_is_stopped(ranks_2: RankPool) -> None:
    answers = ranks_2.run(RUN, "Drifting", [12, 4])
    assert answers[0]["error"] == answers[1]["error"]
    assert answers[0]["error"].startswith("ranks are out of step in iteration 1: model.weight differs on rank 1 (of 2)")
    assert [len(answer["metrics"]) for answer in answers] == [1, 1]


def test_a_checkpoint_past_the_end_is_refused_by_all(ranks_2: RankPool) -> None:
    path = Path("model_2.pt").absolute()
    ranks_2.run(RUN, "Fitting", [4, 4], 2, None, path)
    answers = ranks_2.run(RUN, "Fitting", [4, 4], 1, path)
    assert answers[0] == answers[1]
    assert "is of iteration 2, past max_iterations 1" in answers[0]["error"]
