"""Generalised advantage estimation, on numbers worked out by hand."""

import pytest
import torch

from lockstep.learn.torch.gae import generalised_advantages

NEVER = [False, False, False]


def advantages(
    rewards: list[float],
    values: list[float],
    next_values: list[float],
    terminated: list[bool],
    done: list[bool],
    gamma: float = 0.5,
    lam: float = 0.5,
) -> list[float]:
    """One env: a column of each."""

    def column(numbers: list[float]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.float64).unsqueeze(1)

    ends = (torch.tensor(terminated).unsqueeze(1), torch.tensor(done).unsqueeze(1))
    estimate = generalised_advantages(column(rewards), column(values), column(next_values), *ends, gamma, lam)
    return [float(number) for number in estimate.squeeze(1)]


def test_an_episode_that_goes_on() -> None:
    # One-step differences: 1 + 8/2 - 4 = 1, 2 + 12/2 - 8 = 0, 3 + 16/2 - 12 = -1; each adds a quarter of the next sum:
    # -1, 0 - 1/4, 1 - 1/16.
    assert advantages([1, 2, 3], [4, 8, 12], [8, 12, 16], NEVER, NEVER) == [0.9375, -0.25, -1.0]


def test_nothing_follows_a_termination() -> None:
    # The second step's difference is 2 - 8 = -6, whatever the value of what it led to; the first: 1 - 6/4.
    ended = [False, True, False]
    assert advantages([1, 2, 3], [4, 8, 12], [8, 12, 16], ended, ended) == [-0.5, -6.0, -1.0]
    assert advantages([1, 2, 3], [4, 8, 12], [8, float("nan"), 16], ended, ended) == [-0.5, -6.0, -1.0]


def test_the_time_limit_is_bootstrapped() -> None:
    # The final observation is worth 20: 2 + 20/2 - 8 = 4; the first: 1 + 4/4. The third step begins anew.
    assert advantages([1, 2, 3], [4, 8, 12], [8, 20, 16], NEVER, [False, True, False]) == [2.0, 4.0, -1.0]


def test_the_last_step_may_end_an_episode() -> None:
    # 3 - 12 = -9; 0 - 9/4; 1 - 9/16.
    last = [False, False, True]
    assert advantages([1, 2, 3], [4, 8, 12], [8, 12, 16], last, last) == [0.4375, -2.25, -9.0]


def test_lambda_0_looks_one_step_ahead_and_lambda_1_to_the_end() -> None:
    assert advantages([1, 2, 3], [4, 8, 12], [8, 12, 16], NEVER, NEVER, lam=0.0) == [1.0, 0.0, -1.0]
    # Discounted returns: 3 + 16/2 = 11; 2 + 11/2 = 7.5; 1 + 7.5/2 = 4.75; less the values.
    assert advantages([1, 2, 3], [4, 8, 12], [8, 12, 16], NEVER, NEVER, lam=1.0) == [0.75, -0.5, -1.0]


def test_without_discount_the_return_is_the_sum() -> None:
    assert advantages([1, 2, 3], [0, 0, 0], [0, 0, 10], NEVER, NEVER, gamma=1.0, lam=1.0) == [16.0, 15.0, 13.0]


@pytest.mark.parametrize("kind", ["terminated", "truncated"])
def test_nothing_leaks_from_one_episode_into_the_one_before(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    rewards, values, next_values = torch.randn((3, 12, 5), generator=generator, dtype=torch.float64)
    done = torch.zeros((12, 5), dtype=torch.bool)
    done[6, :3] = True
    terminated = done if kind == "terminated" else torch.zeros_like(done)
    before = generalised_advantages(rewards, values, next_values, terminated, done, 0.99, 0.95)
    for tensor in (rewards, values, next_values):
        tensor[7:] += 1000.0
    after = generalised_advantages(rewards, values, next_values, terminated, done, 0.99, 0.95)
    assert torch.equal(after[:7, :3], before[:7, :3])
    # It is the end of the episode that holds it back: where none ended, the change does arrive.
    assert (after[:7, 3:] != before[:7, 3:]).all()
    assert (after[7:] != before[7:]).all()


def test_envs_do_not_mix() -> None:
    one = ([1.0, 2.0, 3.0], [4.0, 8.0, 12.0], [8.0, 12.0, 16.0])
    two = ([0.0, 0.0, 8.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0])
    rewards, values, next_values = (torch.tensor(pair).T.contiguous() for pair in zip(one, two, strict=True))
    never = torch.zeros((3, 2), dtype=torch.bool)
    estimate = generalised_advantages(rewards, values, next_values, never, never, 0.5, 0.5)
    assert estimate.dtype == torch.float32
    assert estimate.T.tolist() == [[0.9375, -0.25, -1.0], [0.5, 2.0, 8.0]]
