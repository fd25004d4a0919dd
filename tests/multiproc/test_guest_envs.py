"""Other people's envs on several ranks: the update that one process makes, and the same bits on every rank."""

import pytest
import torch

from lockstep.distributed.torch_comm import SoloComm
from tests.multiproc import jobs_guest_envs
from tests.multiproc.test_in_step import assert_same_training, the_one
from tests.rank_pool import RankPool

TRAIN = "tests.multiproc.jobs_guest_envs:train"
TASKS = ("gymnasium/CartPole-v1", "envpool/CartPole-v1")


@pytest.mark.parametrize("task", TASKS)
def test_ranks_train_on_the_envs_that_one_process_would_have(ranks_2: RankPool, task: str) -> None:
    torch.set_num_threads(1)
    alone = jobs_guest_envs.train(SoloComm(), task, (16,), 3)
    assert alone["curve"][2]["num_episodes"] > 0
    for shares in ((12, 4), (0, 16)):
        assert_same_training(the_one(ranks_2.run(TRAIN, task, shares, 3)), alone)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("shares", [(8, 8), (12, 4), (4, 12)])
def test_ranks_that_see_different_numbers_hold_the_normalisers_of_all_of_them(
    ranks_2: RankPool, task: str, shares: tuple[int, int]
) -> None:
    results = ranks_2.run(TRAIN, task, shares, 2, 10.0)
    policy = the_one(results)["policy"]
    seen = torch.cat([result["seen"] for result in results])
    counts = [len(result["seen"]) for result in results]
    assert counts == [2 * 24 * share for share in shares]
    # Rank 1 sees numbers around 10, rank 0 around 0; to forget how many each saw would be off by up to 2.5.
    between = [float(result["seen"].mean()) for result in results]
    assert between[1] - between[0] == pytest.approx(10.0, abs=1.0)
    for group in ("actor", "critic"):
        count, mean, m2 = (policy[f"{group}_normalizer.{name}"] for name in ("count", "mean", "m2"))
        assert count == sum(counts)
        torch.testing.assert_close(mean, seen.mean(dim=0), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(m2 / count, seen.var(dim=0, correction=0), rtol=1e-12, atol=1e-12)
