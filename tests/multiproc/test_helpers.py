"""The helpers for a loop of one's own, among real ranks: what they promise, in numbers worked out by hand."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.multiproc.jobs_helpers import Learner, samples_of
from tests.rank_pool import RankPool
from tests.unit.learner_fixtures import differences

JOBS = "tests.multiproc.jobs_helpers:"


# --- gradients -------------------------------------------------------------------------------------------------------


def test_gradients_count_by_samples_whatever_is_unused_where(ranks_2: RankPool) -> None:
    # used: (1 sample x 1 + 3 samples x 5) / 4; used_on_rank_0: (1 x 2 + 3 x 0) / 4; unused: missing on both
    assert ranks_2.run(JOBS + "average_unequal") == [(4.0, 0.5, True, 4.0)] * 2


def test_channels_last_gradients(ranks_2: RankPool) -> None:
    answers = ranks_2.run(JOBS + "average_channels_last")
    assert answers[0][1] != answers[1][1]
    assert [(values, same) for values, _, same in answers] == [([50.0 + entry for entry in range(24)], "True")] * 2


def test_half_precision_is_summed_in_float32(ranks_2: RankPool) -> None:
    # (1000 x 1 + 1001 x 2) / 2001 = 1.50025, and bfloat16 can't hold 1001
    assert ranks_2.run(JOBS + "average_in_half_precision") == [("torch.bfloat16", 1.5)] * 2


def test_a_rank_without_samples_has_no_say(ranks_2: RankPool) -> None:
    assert ranks_2.run(JOBS + "average_with_an_idle_rank") == [(3.0, [])] * 2


def test_the_rank_with_an_infinity_is_named_on_all(ranks_2: RankPool) -> None:
    answers = ranks_2.run(JOBS + "average_infinite")
    assert answers[0] == answers[1]
    assert answers[0][0] is False
    assert answers[0][1].startswith("gradients of rank 1 (of 2) are not finite; ")


def test_other_parameters_on_one_rank_are_named(ranks_4: RankPool) -> None:
    answers = ranks_4.run(JOBS + "average_differently")
    assert len(set(answers)) == 1
    assert answers[0].startswith(
        "average_gradients: rank 1 has weight (float32 (1, 3)) where rank 0 has weight (float32"
    )


def test_a_wrapped_module(ranks_2: RankPool) -> None:
    # gradients 1 and 5, averaged by the wrapper, and once more
    assert ranks_2.run(JOBS + "average_wrapped", False) == [3.0, 3.0]
    # past the wrapper's hooks nothing is averaged before: (1 x 1 + 3 x 5) / 4
    assert ranks_2.run(JOBS + "average_wrapped", True) == [4.0, 4.0]


@pytest.mark.parametrize(
    ("call", "place"),
    [
        ("gradients", "torso.1"),
        ("several", "torso.1"),
        ("evaluation", "torso.1"),
        ("state", "object 1.torso.1"),
        ("mixin", "policy.torso.1"),
    ],
)
def test_batch_normalisation_is_synchronised_or_refused(ranks_2: RankPool, call: str, place: str) -> None:
    answers = ranks_2.run(JOBS + "normalise_batches", call)
    assert answers[0] == answers[1]
    assert answers[0].startswith(
        f"{place} is a BatchNorm1d, which would follow the data of each of the 2 ranks alone; "
    )
    assert "SyncBatchNorm.convert_sync_batchnorm(module)" in answers[0] and "\n" not in answers[0]
    assert ranks_2.run(JOBS + "normalise_batches", f"synchronised {call}") == ["", ""]


def test_one_exchange_per_update(ranks_2: RankPool) -> None:
    assert ranks_2.run(JOBS + "count_exchanges") == [[2, 1, 1]] * 2  # the first compares the parameters


# --- state -----------------------------------------------------------------------------------------------------------


def test_optimizer_state_that_rank_0_alone_had(ranks_2: RankPool) -> None:
    answers = ranks_2.run(JOBS + "share_state", 0, 5)
    expected = Learner(seed=10)
    for seed in range(4):
        expected.step(seed, num_samples=8)
    for shared, trained in answers:
        assert differences(shared, expected.state()) == []
        assert differences(trained, answers[0][1]) == []
    assert shared["actor_optimizer"]["param_groups"][0]["lr"] == 0.005  # halved by the schedule after 3 steps
    assert shared["actor_optimizer"]["state"][0]["step"] == 4
    assert shared["schedule"]["last_epoch"] == 4


def test_optimizer_state_that_rank_0_did_not_have_goes_away(ranks_2: RankPool) -> None:
    answers = ranks_2.run(JOBS + "share_state", 1, 5)
    for shared, trained in answers:
        assert differences(shared, Learner(seed=10).state()) == []
        assert differences(trained, answers[0][1]) == []


def test_tensors_of_all_types_are_overwritten_bit_for_bit(ranks_2: RankPool) -> None:
    for in_place, tensors, rate in ranks_2.run(JOBS + "share_in_place"):
        assert (in_place, rate) == (True, 0.5)
        assert math.isnan(tensors["double"][0]) and tensors["double"][1:].tolist() == [0.0, 1.0 / 3.0]
        assert math.copysign(1.0, tensors["double"][1].item()) == -1.0
        assert tensors["half"].tolist() == [0.0, 1.0, 2.0]
        assert tensors["flags"].tolist() == [True, True]
        assert tensors["count"].item() == 2**62
        assert tensors["strided"].tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("shape", "rank 1 has object 0.weight (float32 (1, 3)) where rank 0 has object 0.weight (float32 (1, 2))"),
        ("name", "rank 1 has object 0.other.weight (float32 (1, 2)) where rank 0 has object 0.actor.weight (float32"),
        ("kind", "rank 1 has object 0 Linear where rank 0 has object 0 dict"),
        ("more", "rank 1 has object 1 Linear where rank 0 has nothing"),
        ("type", "rank 1 has object 0 (float64 (2,)) where rank 0 has object 0 (float32 (2,))"),
    ],
)
def test_other_objects_on_one_rank_are_named(ranks_2: RankPool, what: str, expected: str) -> None:
    answers = ranks_2.run(JOBS + "share_differently", what)
    assert answers[0] == answers[1]
    assert answers[0].startswith(f"broadcast_state: {expected}")


def test_a_value_that_rank_0_alone_has(ranks_4: RankPool) -> None:
    value = {
        "weights": {"actor.0": torch.tensor([[1.0, -0.0]]), 3: torch.tensor([True])},
        "numbers": [1, 2.5, float("inf"), None, True, "ä\n"],
        "nested": ({"empty": torch.zeros(0)}, ()),
    }
    for received in ranks_4.run(JOBS + "share_value", value):
        assert differences(received, value) == []
        assert received["numbers"] == value["numbers"]
        assert isinstance(received["nested"], tuple)


# --- statistics and decisions ----------------------------------------------------------------------------------------


def test_metrics_are_means_over_all_data(ranks_2: RankPool) -> None:
    by_rank: list[dict[str, Any]] = [
        {"return": (10.0, 4), "loss": 1.0, "nothing": (0.0, 0), "huge": (1e16, 1)},
        {"loss": torch.tensor(2.0), "return": (torch.tensor(2.0), torch.tensor(2)), "nothing": (0.0, 0), "late": 7.0},
    ]
    answers = ranks_2.run(JOBS + "reduce", by_rank)
    for reduced in answers:
        assert math.isnan(reduced.pop("nothing"))
        assert reduced == {"return": 2.0, "loss": 1.5, "huge": 1e16, "late": 7.0}


@pytest.mark.parametrize("shape", [(), (5,), (2, 3)])
@pytest.mark.parametrize("num_merges", [1, 9])
def test_merged_moments_are_those_of_all_samples(ranks_4: RankPool, num_merges: int, shape: tuple[int, ...]) -> None:
    pooled = torch.cat([samples_of(rank, number, shape) for rank in range(4) for number in range(num_merges)])
    answers = ranks_4.run(JOBS + "merge", num_merges, shape)
    for count, mean, variance in answers:
        assert count == len(pooled)
        assert torch.allclose(mean, pooled.mean(0), rtol=0, atol=1e-12)
        assert torch.allclose(variance, pooled.var(0, correction=0), rtol=0, atol=1e-12)
        assert torch.equal(mean, answers[0][1]) and torch.equal(variance, answers[0][2])


def test_small_helpers(ranks_4: RankPool) -> None:
    for rank, answer in enumerate(ranks_4.run(JOBS + "decide")):
        assert answer == {
            "main_only": 42 if rank == 0 else None,
            "any": True,
            "none": False,
            "texts": ["", "ä", "ää", "äää"],
            "rank": rank,
            "world_size": 4,
            "is_main": rank == 0,
        }


def test_a_script_that_joins_trains_and_goes_on(ranks_2: RankPool) -> None:
    answers = ranks_2.run(JOBS + "start")
    assert [(place.rank, place.local_rank, place.world_size) for place, *_ in answers] == [(0, 0, 2), (1, 1, 2)]
    assert answers[0][1] != answers[1][1]
    assert answers[0][2] == answers[1][2]
    assert [texts for *_, texts in answers] == [["finished", "finished"]] * 2  # the group is still there
    assert sorted(path.name for path in Path(answers[0][2], "ranks").iterdir()) == ["rank_0.log", "rank_1.log"]
