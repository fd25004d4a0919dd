"""The action distributions, on numbers worked out by hand and beside those of torch.distributions."""

import math

import pytest
import torch

from lockstep.learn.torch.distributions import Categorical, Gaussian

LN_2 = math.log(2.0)


def doubles(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def gaussian(mean: float, std: float) -> Gaussian:
    return Gaussian(doubles(mean), doubles(math.log(std)))


def categorical(*probabilities: float) -> Categorical:
    return Categorical(doubles(*probabilities).log() + 3.0)  # logits have no zero point


def test_gaussian_by_hand() -> None:
    # The log density of N(1, 2) at its mean: -ln 2 - ln(2 pi) / 2 = -0.693147 - 0.918939; at 5, two deviations out,
    # 2 less. Entropy: 1/2 + 0.918939 + 0.693147.
    assert gaussian(1, 2).log_prob(doubles(1)).item() == pytest.approx(-1.612086, abs=1e-6)
    assert gaussian(1, 2).log_prob(doubles(5)).item() == pytest.approx(-3.612086, abs=1e-6)
    assert gaussian(1, 2).entropy().item() == pytest.approx(2.112086, abs=1e-6)
    # KL(N(0, 1) || N(1, 2)) = ln 2 + (1 + 1) / 8 - 1/2; the other way round: -ln 2 + (4 + 1) / 2 - 1/2.
    assert gaussian(1, 2).kl_from(gaussian(0, 1)).item() == pytest.approx(LN_2 - 0.25, abs=1e-12)
    assert gaussian(0, 1).kl_from(gaussian(1, 2)).item() == pytest.approx(2.0 - LN_2, abs=1e-12)
    assert gaussian(1, 2).kl_from(gaussian(1, 2)).item() == 0.0
    assert gaussian(1, 2).sample(doubles(-1.5)).item() == pytest.approx(-2.0, abs=1e-12)
    assert gaussian(1, 2).mode().item() == 1.0


def test_categorical_by_hand() -> None:
    choices = categorical(0.125, 0.25, 0.625)
    assert choices.log_prob(torch.tensor(1)).item() == pytest.approx(-2 * LN_2, abs=1e-12)
    assert choices.mode().item() == 2
    # A half bit for each of two halves and two quarters: ln 2 / 2 + 2 * (1/4 * 2 ln 2).
    assert categorical(0.5, 0.25, 0.25).entropy().item() == pytest.approx(1.5 * LN_2, abs=1e-12)
    # KL((1/2, 1/2) || (1/4, 3/4)) = ln 2 / 2 + ln(2/3) / 2 = ln(4/3) / 2 = 0.143841;
    # the other way round: ln(1/2) / 4 + 3/4 ln(3/2) = 0.130812.
    fair, loaded = categorical(0.5, 0.5), categorical(0.25, 0.75)
    assert loaded.kl_from(fair).item() == pytest.approx(0.143841, abs=1e-6)
    assert fair.kl_from(loaded).item() == pytest.approx(0.130812, abs=1e-6)
    assert fair.kl_from(fair).item() == 0.0


def test_categorical_sampling_inverts_the_cumulative_distribution() -> None:
    noise = doubles(0.0, 0.124, 0.126, 0.374, 0.376, 1 - 2**-24).unsqueeze(1)
    assert categorical(0.125, 0.25, 0.625).sample(noise).tolist() == [0, 0, 1, 1, 2, 2]
    grid = ((torch.arange(4000, dtype=torch.float64) + 0.5) / 4000).unsqueeze(1)
    assert categorical(0.125, 0.25, 0.625).sample(grid).bincount().tolist() == [500, 1000, 2500]


def test_categorical_never_draws_what_is_impossible() -> None:
    generator = torch.Generator().manual_seed(5)
    possible = 2 * torch.randn((2000, 3), generator=generator)
    never = torch.full((2000, 1), -math.inf)
    for noise in (0.0, 1 - 2**-24):  # the smallest and the largest uniform float32
        last = Categorical(torch.cat((possible, never), dim=1)).sample(torch.full((2000, 1), noise))
        assert (last != 3).all()
        first = Categorical(torch.cat((never, possible), dim=1)).sample(torch.full((2000, 1), noise))
        assert (first != 0).all()


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def test_gaussian_beside_torch(generator: torch.Generator) -> None:
    means, old_means, actions = torch.randn((3, 7, 5, 4), generator=generator, dtype=torch.float64)
    log_std, old_log_std = torch.randn((2, 4), generator=generator, dtype=torch.float64)
    own, old = Gaussian(means, log_std), Gaussian(old_means, old_log_std)
    theirs = torch.distributions.Independent(torch.distributions.Normal(means, log_std.exp()), 1)
    their_old = torch.distributions.Independent(torch.distributions.Normal(old_means, old_log_std.exp()), 1)
    torch.testing.assert_close(own.log_prob(actions), theirs.log_prob(actions), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(own.entropy(), theirs.entropy(), rtol=1e-12, atol=1e-12)
    divergence = torch.distributions.kl_divergence(their_old, theirs)
    torch.testing.assert_close(own.kl_from(old), divergence, rtol=1e-12, atol=1e-12)


def test_categorical_beside_torch(generator: torch.Generator) -> None:
    logits, old_logits = 3 * torch.randn((2, 7, 5, 4), generator=generator, dtype=torch.float64)
    actions = torch.randint(4, (7, 5), generator=generator)
    own, old = Categorical(logits), Categorical(old_logits)
    theirs, their_old = (torch.distributions.Categorical(logits=values) for values in (logits, old_logits))
    torch.testing.assert_close(own.log_prob(actions), theirs.log_prob(actions), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(own.entropy(), theirs.entropy(), rtol=1e-12, atol=1e-12)
    divergence = torch.distributions.kl_divergence(their_old, theirs)
    torch.testing.assert_close(own.kl_from(old), divergence, rtol=1e-12, atol=1e-12)
    assert torch.equal(own.mode(), theirs.mode)


def test_packed_and_unpacked_is_the_same_distribution(generator: torch.Generator) -> None:
    parameters = torch.randn((7, 5, 4), generator=generator, dtype=torch.float64)
    one = Gaussian(parameters, torch.randn(4, generator=generator, dtype=torch.float64))
    again = Gaussian.unpack(one.pack())
    assert one.pack().shape == (7, 5, 8)
    assert torch.equal(again.mean, one.mean)
    assert torch.equal(again.log_std, one.log_std.expand(7, 5, 4))
    choice = Categorical(parameters)
    assert choice.pack().shape == (7, 5, 4)
    torch.testing.assert_close(Categorical.unpack(choice.pack()).log_probs, choice.log_probs, rtol=0, atol=1e-15)


def test_leading_axes_are_free() -> None:
    for leading in ((), (3,), (3, 2)):
        normal = Gaussian(torch.zeros((*leading, 4)), torch.zeros(4))
        choice = Categorical(torch.zeros((*leading, 4)))
        assert normal.sample(torch.zeros((*leading, 4))).shape == (*leading, 4)
        assert choice.sample(torch.zeros((*leading, 1))).shape == leading
        for distribution, action in ((normal, torch.zeros((*leading, 4))), (choice, torch.zeros(leading).long())):
            assert distribution.log_prob(action).shape == leading
            assert distribution.entropy().shape == leading
