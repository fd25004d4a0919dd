"""The sentinel among real ranks: one bit that differs on one of them is found and named."""

import pytest

from tests.multiproc.jobs_sentinel import replicated
from tests.rank_pool import RankPool

CHECK = "tests.multiproc.jobs_sentinel:check"


def the_line(ranks: RankPool, *plants: tuple[int, str]) -> str:
    """Return what every rank says."""
    answers = ranks.run(CHECK, list(plants))
    assert len(set(answers)) == 1
    line, _ = answers[0]
    assert isinstance(line, str)
    return line


def test_equal_ranks_exchange_once(ranks_4: RankPool) -> None:
    assert ranks_4.run(CHECK, []) == [("", 1)] * 4


@pytest.mark.parametrize(
    "name",
    [
        "policy.actor.0.weight",
        "policy.actor.1.bias",
        "policy.normalizer.count",
        "policy.normalizer.mean",
        "policy.normalizer.m2",
        "optimizer.0.exp_avg",
        "optimizer.3.exp_avg_sq",
        "optimizer.2.step",
        "iteration",
        "level",
        "is_done",
        "half",
    ],
)
def test_one_bit_on_one_rank_is_named(ranks_2: RankPool, name: str) -> None:
    assert the_line(ranks_2, (1, name)).startswith(
        f"ranks are out of step in iteration 40: {name} differs on rank 1 (of 2), and no other tensor does; "
    )


def test_the_rank_of_the_minority_is_named(ranks_4: RankPool) -> None:
    name = "optimizer.1.exp_avg"
    assert f" {name} differs on rank 2 (of 4), and no" in the_line(ranks_4, (2, name))
    assert f" {name} differs on rank 0 (of 4), and no" in the_line(ranks_4, (0, name))
    assert f" {name} differs on ranks 1 and 3 (of 4), and so does 1 other tensor;" in the_line(
        ranks_4, (1, name), (3, name), (2, "half")
    )


def test_everything_different_is_counted(ranks_2: RankPool) -> None:
    names = [name for name, tensor in replicated().items() if tensor.numel()]
    line = the_line(ranks_2, *((1, name) for name in names))
    assert f" {names[0]} differs on rank 1 (of 2), and so do {len(names) - 1} other tensors;" in line


@pytest.mark.parametrize(
    ("plant", "expected"),
    [
        (
            (1, "-optimizer.1.exp_avg"),
            "rank 1 has optimizer.1.exp_avg_sq (float32 (4,)) where rank 0 has optimizer.1.exp_avg (float32 (4,))",
        ),
        ((0, "-half"), "rank 0 has empty (float32 (0, 3)) where rank 1 has half (bfloat16 (5,))"),
        ((3, "+optimizer.9.exp_avg"), "rank 3 has optimizer.9.exp_avg (float32 (2,)) where rank 0 has nothing"),
        ((1, "+level"), "rank 1 has level (float32 (2,)) where rank 0 has level (int32 (4,))"),
    ],
)
def test_other_tensors_are_named_and_do_not_hang(ranks_4: RankPool, plant: tuple[int, str], expected: str) -> None:
    assert the_line(ranks_4, plant).startswith(f"ranks are out of step in iteration 40: {expected}; ")
