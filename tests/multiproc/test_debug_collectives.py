"""LOCKSTEP_DEBUG_COLLECTIVES among real ranks: where they part is said by all, and none of them hangs."""

import re
from pathlib import Path
from typing import Any

import pytest

from lockstep.core.errors import UsageError
from lockstep.distributed.torch_debug import is_wanted
from tests.multiproc.jobs_debug_collectives import Step
from tests.rank_pool import PerRank, RankPool

FOLLOW = "tests.multiproc.jobs_debug_collectives:follow"
AT = r"at multiproc/jobs_debug_collectives\.py:\d+"

SUM: Step = ("all_reduce", (9,), "float32", "gradients")
MOMENTS: Step = ("all_gather", (4,), "float64", "moments")


def follow(ranks: RankPool, *scripts: list[Step], timeout_s: float = 20.0) -> list[dict[str, Any]]:
    """Let every rank go through its script."""
    store = str(Path.cwd() / "store")
    return ranks.run(FOLLOW, PerRank(scripts), store, timeout_s)


def the_line(answers: list[dict[str, Any]]) -> str:
    """Return what all ranks say, none of which may have started what the others did not."""
    assert len({answer["error"] for answer in answers}) == 1
    assert all(answer["shared"] for answer in answers)
    assert all(answer["took_s"] < 3 for answer in answers)
    assert len({answer["num_started"] for answer in answers}) == 1
    line = answers[0]["error"]
    assert isinstance(line, str)
    assert "\n" not in line
    return line


def test_ranks_in_step_get_what_they_would_without_it(ranks_2: RankPool) -> None:
    script: list[Step] = [
        ("all_reduce", (2,), "float32", "a"),
        ("start_all_reduce", (), "int64", "b"),
        ("broadcast", (2,), "float64", "c"),
        ("all_gather", (1,), "int32", "d"),
        ("gather", (1,), "int32", "e"),
    ]
    for rank, answer in enumerate(follow(ranks_2, script, script)):
        assert answer["error"] == ""
        assert answer["results"] == [[3.0, 3.0], 3, [1.0, 1.0], [[1], [2]], [[1], [2]] if rank == 0 else None]
        assert answer["num_started"] == 5
        assert answer["wait_s"] > 0
        lines = Path(f"collectives_rank_{rank}.log").read_text().splitlines()
        assert [line.split()[1:3] for line in lines[:-1]] == [
            ["1", "all_reduce"],
            ["2", "all_reduce"],
            ["3", "broadcast"],
            ["4", "all_gather"],
            ["5", "gather"],
        ]
        assert re.fullmatch(rf"\S+ 1 all_reduce \(2,\) float32 'a' {AT}", lines[0])
        assert lines[-1].endswith(" 6 leaving the group")


@pytest.mark.parametrize(
    ("other", "described"),
    [
        (MOMENTS, r"all_gather \(4,\) float64 'moments'"),
        (("broadcast", (9,), "float32", "gradients"), r"broadcast \(9,\) float32 'gradients'"),
        (("all_reduce", (8,), "float32", "gradients"), r"all_reduce \(8,\) float32 'gradients'"),
        (("all_reduce", (3, 3), "float32", "gradients"), r"all_reduce \(3, 3\) float32 'gradients'"),
        (("all_reduce", (9,), "float64", "gradients"), r"all_reduce \(9,\) float64 'gradients'"),
        (("all_reduce", (9,), "float32", "kl"), r"all_reduce \(9,\) float32 'kl'"),
    ],
    ids=["operation", "root", "size", "shape", "dtype", "tag"],
)
def test_where_two_ranks_part(ranks_2: RankPool, other: Step, described: str) -> None:
    line = the_line(follow(ranks_2, [SUM, SUM, SUM], [SUM, SUM, other]))
    sums = r"all_reduce \(9,\) float32 'gradients'"
    assert re.match(
        rf"at collective 3 rank 0 calls {sums} {AT}, rank 1 calls {described} {AT}, "
        rf"last common: collective 2, {sums} {AT}; every rank must start the same operations",
        line,
    ), line
    for rank in range(2):
        assert Path(f"collectives_rank_{rank}.log").read_text().count("at collective 3 rank 0 calls") == 1


def test_another_order(ranks_2: RankPool) -> None:
    line = the_line(follow(ranks_2, [MOMENTS, SUM], [SUM, MOMENTS]))
    assert re.match(
        r"at collective 1 rank 0 calls all_gather .*, rank 1 calls all_reduce .*, last common: none; ", line
    )


def test_ranks_that_do_the_same_are_named_together(ranks_4: RankPool) -> None:
    line = the_line(follow(ranks_4, [SUM, MOMENTS], [SUM, SUM], [SUM, SUM], [SUM, SUM]))
    assert re.match(r"at collective 2 rank 0 calls all_gather .*, ranks 1 to 3 call all_reduce ", line)


def test_a_rank_that_does_not_come_is_named_with_its_last_operation(ranks_4: RankPool) -> None:
    late: list[Step] = [SUM, MOMENTS, ("sleep", (2,), "", "")]
    early = [SUM, MOMENTS, SUM]
    answers = follow(ranks_4, early, early, late, early, timeout_s=0.5)
    for rank in (0, 1, 3):
        assert re.fullmatch(
            rf"rank 2 did not come to collective 3 within 0\.5 s: ranks 0, 1 and 3 wait in all_reduce \(9,\) float32 "
            rf"'gradients' {AT}, and the last of rank 2 was collective 2, all_gather \(4,\) float64 'moments' {AT}; "
            "find out what kept it after that",
            answers[rank]["error"],
        ), answers[rank]["error"]
        assert not answers[rank]["shared"]  # each rank says it itself: rank 0 may be the one that does not come
        assert answers[rank]["took_s"] < 1.5


def test_a_rank_that_never_came(ranks_2: RankPool) -> None:
    answers = follow(ranks_2, [("sleep", (1,), "", "")], [SUM], timeout_s=0.3)
    assert "rank 1 waits in all_reduce" in answers[1]["error"]
    assert "the last of rank 0 was no collective at all;" in answers[1]["error"]


def test_a_rank_that_left_is_not_waited_for(ranks_2: RankPool) -> None:
    answers = follow(ranks_2, [SUM, SUM], [SUM, ("end", (), "", "")])
    assert answers[1]["error"] == ""
    assert re.match(r"at collective 2 rank 0 calls .*, rank 1 left the group, last common:", answers[0]["error"])
    assert not answers[0]["shared"]
    assert answers[0]["took_s"] < 3


def test_a_late_rank_is_waited_for(ranks_2: RankPool) -> None:
    answers = follow(ranks_2, [SUM, SUM], [SUM, ("sleep", (1,), "", ""), SUM])
    assert [answer["error"] for answer in answers] == ["", ""]


def test_the_store_does_not_grow(ranks_4: RankPool) -> None:
    for few, many in ranks_4.run("tests.multiproc.jobs_debug_collectives:count_keys", 200):
        assert few == many


def test_a_store_that_is_gone_is_said(ranks_2: RankPool) -> None:
    _, (line, is_shared) = ranks_2.run("tests.multiproc.jobs_debug_collectives:lose_the_store")
    assert line.startswith("at collective 2 rank 1 calls all_reduce (1,) float32 'second' at ")
    assert "can't reach the ranks' store any more (" in line
    assert "\n" not in line
    assert not is_shared


def test_the_place_is_the_caller_of_the_comm_and_earlier_lines_reach_the_log(ranks_2: RankPool) -> None:
    function = "tests.multiproc.jobs_debug_collectives:through_comm"
    for lines in ranks_2.run(function, str(Path.cwd() / "store")):
        shown = [re.sub(AT, "HERE", line) for line in lines]
        assert shown == [
            "1 all_gather (1,) int64 'greeting' HERE",
            "2 all_gather (6,) uint8 'greeting' HERE",
            "3 broadcast (8,) uint8 'state' HERE",
            "4 leaving the group",
        ]


@pytest.mark.parametrize(("value", "expected"), [(None, False), ("", False), ("0", False), ("1", True)])
def test_the_variable_turns_it_on(value: str | None, expected: bool) -> None:
    environment = {} if value is None else {"LOCKSTEP_DEBUG_COLLECTIVES": value}
    assert is_wanted(environment) is expected


def test_another_value_is_refused() -> None:
    with pytest.raises(UsageError, match="LOCKSTEP_DEBUG_COLLECTIVES is 'yes'; give 1"):
        is_wanted({"LOCKSTEP_DEBUG_COLLECTIVES": "yes"})
