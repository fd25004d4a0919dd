"""The losses and the learning rate rule, on numbers worked out by hand."""

import math

import pytest
import torch

from lockstep.learn.torch.losses import adapt_learning_rate_, surrogate_loss, value_loss

LN_1_5, LN_0_5 = math.log(1.5), math.log(0.5)


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "loss", "gradient"),
    [
        # Better than before and already likelier: the gain counts up to a ratio of 1.2, and pulls no further.
        (LN_1_5, 2.0, -2.4, 0.0),
        # Better, but less likely than before: min(0.5 * 2, 0.8 * 2) = 1; d(-ratio * 2) = -1.
        (LN_0_5, 2.0, -1.0, -1.0),
        # Worse, and likelier than before: min(1.5 * -2, 1.2 * -2) = -3; d(-ratio * -2) = 3.
        (LN_1_5, -2.0, 3.0, 3.0),
        # Worse and already less likely: min(0.5 * -2, 0.8 * -2) = -1.6.
        (LN_0_5, -2.0, 1.6, 0.0),
        # Within the clip range nothing is cut.
        (0.0, 2.0, -2.0, -2.0),
        (0.0, 0.0, 0.0, 0.0),
    ],
)
def test_surrogate(log_ratio: float, advantage: float, loss: float, gradient: float) -> None:
    old = torch.tensor([-0.7], dtype=torch.float64)
    new = (old + log_ratio).requires_grad_()
    result = surrogate_loss(new, old, torch.tensor([advantage], dtype=torch.float64), 0.2)
    assert result.shape == (1,)
    assert result.item() == pytest.approx(loss, abs=1e-12)
    result.sum().backward()
    assert new.grad is not None
    assert new.grad.item() == pytest.approx(gradient, abs=1e-12)


@pytest.mark.parametrize(
    ("value", "target", "loss", "gradient"),
    [
        # The old value is 0, the clip range 0.2.
        (0.1, 3.0, 8.41, -5.8),  # within the range: (0.1 - 3)^2, and 2 * (0.1 - 3)
        (1.0, 3.0, 7.84, 0.0),  # moved beyond it: the error of 0.2 is larger than (1 - 3)^2 and has no slope
        (3.0, 3.0, 7.84, 0.0),
        (-1.0, 3.0, 16.0, -8.0),  # moved the wrong way: (-1 - 3)^2 is larger than the error of -0.2, 10.24
        (1.0, -3.0, 16.0, 8.0),
    ],
)
def test_clipped_value_loss(value: float, target: float, loss: float, gradient: float) -> None:
    new = torch.tensor([value], dtype=torch.float64, requires_grad=True)
    old, aim = torch.zeros_like(new), torch.tensor([target], dtype=torch.float64)
    result = value_loss(new, old, aim, 0.2, clipped=True)
    assert result.item() == pytest.approx(loss, abs=1e-12)
    result.sum().backward()
    assert new.grad is not None
    assert new.grad.item() == pytest.approx(gradient, abs=1e-12)


def test_plain_value_loss_is_the_squared_error() -> None:
    loss = value_loss(torch.tensor([1.0, 3.0]), torch.zeros(2), torch.tensor([3.0, 3.0]), 0.2, clipped=False)
    assert loss.tolist() == [4.0, 0.0]


@pytest.mark.parametrize(
    ("rate", "kl", "expected"),
    [
        # Aim 0.01, bounds 1e-5 and 1e-2.
        (9e-4, 0.021, 6e-4),  # above twice the aim: divided by 1.5
        (9e-4, 0.02, 9e-4),  # exactly twice is not above
        (9e-4, 0.01, 9e-4),
        (9e-4, 0.005, 9e-4),  # exactly half is not below
        (6e-4, 0.0049, 9e-4),
        (6e-4, 0.0, 9e-4),  # the first minibatch of an update: the policy is still the old one
        (6e-4, -1e-9, 9e-4),  # the same with a rounding below zero, which must make no difference
        (9e-4, math.nan, 9e-4),
        (1.2e-5, 1.0, 1e-5),
        (9e-3, 0.001, 1e-2),
        (5e-2, 0.01, 5e-2),  # chosen outside the bounds by the user, and nothing asks to change it
        (5e-2, 1.0, 1e-2),
        (1e-6, 0.001, 1e-5),
    ],
)
def test_learning_rate_follows_the_kl_divergence(rate: float, kl: float, expected: float) -> None:
    tensor = torch.tensor(rate, dtype=torch.float64)
    place = tensor.data_ptr()
    adapt_learning_rate_(tensor, torch.tensor(kl, dtype=torch.float64), 0.01, 1e-5, 1e-2)
    assert tensor.item() == pytest.approx(expected, rel=1e-12)
    assert tensor.data_ptr() == place
