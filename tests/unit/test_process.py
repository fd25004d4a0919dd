"""What a process is made ready with before it trains."""

import random
from itertools import product

import numpy
import pytest
import torch

from lockstep.session.process import prepare
from tests.unit.learner_fixtures import small_config


@pytest.fixture(autouse=True)
def _generators_as_they_were() -> object:
    state = random.getstate(), numpy.random.get_state(), torch.get_rng_state(), torch.get_num_threads()  # noqa: NPY002
    yield
    random.setstate(state[0])
    numpy.random.set_state(state[1])  # noqa: NPY002
    torch.set_rng_state(state[2])
    torch.set_num_threads(state[3])


def first_draws(seed: int, rank: int) -> tuple[float, float, float]:
    prepare(small_config(seed=seed), rank)
    return random.random(), float(numpy.random.random()), float(torch.rand(()))  # noqa: NPY002


def test_no_two_ranks_draw_alike_whatever_the_seed() -> None:
    # With seed + rank, seeds 0 and 1 on four ranks would share three of their streams.
    draws = {(seed, rank): first_draws(seed, rank) for seed, rank in product(range(4), range(4))}
    for generator in range(3):
        assert len({drawn[generator] for drawn in draws.values()}) == len(draws)


def test_a_seed_and_a_rank_give_the_same_numbers_again() -> None:
    assert first_draws(3, 1) == first_draws(3, 1)
