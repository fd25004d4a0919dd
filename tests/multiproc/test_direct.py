"""Direct exchanges between real ranks: the same numbers as gloo's, and gloo where they can't be had."""

from pathlib import Path

import pytest
import torch

from lockstep.distributed.torch_direct import MAX_BYTES
from tests.rank_pool import RankPool

JOBS = "tests.multiproc.jobs_direct"


@pytest.fixture
def store(tmp_path: Path) -> str:
    return str(tmp_path / "store")


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64], ids=str)
@pytest.mark.parametrize(("num_bytes", "is_direct"), [(16, True), (MAX_BYTES, True), (MAX_BYTES + 16, False)])
def test_two_ranks_get_what_gloo_gives(
    ranks_2: RankPool, store: str, dtype: torch.dtype, num_bytes: int, is_direct: bool
) -> None:
    results = ranks_2.run(f"{JOBS}:compare_with_gloo", store, num_bytes, dtype)
    assert len({result["digest"] for result in results}) == 1
    for result in results:
        assert (result["same sum"], result["same table"], result["counted"]) == (True, True, 2)
        assert result["direct"] is is_direct


def test_four_ranks_sum_in_one_order_on_all(ranks_4: RankPool, store: str) -> None:
    results = ranks_4.run(f"{JOBS}:compare_with_gloo", store, 40_000, torch.float32)
    assert len({result["digest"] for result in results}) == 1
    assert all(result["same table"] and result["direct"] for result in results)


@pytest.mark.parametrize("unlucky", [0, 1, 3])
def test_where_one_rank_cannot_connect_all_use_gloo(ranks_4: RankPool, store: str, unlucky: int) -> None:
    for connected, took_s, total in ranks_4.run(f"{JOBS}:cannot_connect", store, unlucky):
        assert not connected
        assert took_s < 10
        assert total == [10.0, 10.0, 10.0]


def test_waiting_is_measured_where_it_happens(ranks_2: RankPool, store: str) -> None:
    (late, late_again), (early, early_again) = ranks_2.run(f"{JOBS}:wait_s", store, [0.5, 0.0])
    assert early > 0.3
    assert late < early
    assert (late_again, early_again) == (0.0, 0.0)


def test_ranks_that_part_name_each_other(ranks_4: RankPool, store: str) -> None:
    said = ranks_4.run(f"{JOBS}:part", store, ["third", "third", "else", "third"], False)
    for rank in (0, 1, 3):
        assert said[rank].startswith(
            f"the ranks have parted: rank {rank} is at exchange 3, sum of (2,) float32 'third', "
            "rank 2 at exchange 3, sum of (2,) float32 'else'; "
        )
    assert said[2].startswith("the ranks have parted: rank 2 is at exchange 3, sum of (2,) float32 'else', rank ")


def test_the_debug_mode_sees_it_before_anything_is_sent(ranks_2: RankPool, store: str) -> None:
    same = ranks_2.run(f"{JOBS}:part", store, ["third", "third"], True)
    assert same == ["[2.0, 2.0]"] * 2
    said = ranks_2.run(f"{JOBS}:part", f"{store}_2", ["third", "else"], True)
    assert said[0] == said[1]
    assert said[0].startswith("at collective 3 rank 0 calls all_reduce (2,) float32 'third' at ")
