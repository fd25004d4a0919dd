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


def test_ranks_that_see_different_numbers_hold_the_same_normalisers_and_policy(ranks_2: RankPool) -> None:
    shifted = the_one(ranks_2.run(TRAIN, TASKS[0], (8, 8), 2, 10.0))
    # Rank 1 sees numbers around 10, rank 0 around 0.
    mean = shifted["policy"]["actor_normalizer.mean"]
    torch.testing.assert_close(mean, torch.full_like(mean, 5.0), atol=1.0, rtol=0.0)
