"""The losses of proximal policy optimisation as pure functions, per sample, nothing averaged."""

import torch

from lockstep.learn.config import PpoConfig
from lockstep.learn.torch.distributions import Distribution
from lockstep.learn.torch.minibatches import Batch

PolicyRiders = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""KL divergence, surrogate and entropy: scalars, summed over samples."""


def policy_loss(
    config: PpoConfig, new: Distribution, old: Distribution, batch: Batch
) -> tuple[torch.Tensor, PolicyRiders]:
    """Return the loss of the policy, with its graph, and the riders, without one; all summed over the samples.

    Args:
        config: of the loss.
        new: what the policy would do now.
        old: what it did.
        batch: the samples, with the leading axes of the distributions.
    """
    surrogate = surrogate_loss(new.log_prob(batch.actions), batch.log_probs, batch.advantages, config.clip_param).sum()
    entropy = new.entropy().sum()
    with torch.no_grad():
        kl = new.kl_from(old).sum()
    return surrogate - config.entropy_coef * entropy, (kl, surrogate.detach(), entropy.detach())


def surrogate_loss(
    log_prob: torch.Tensor, old_log_prob: torch.Tensor, advantage: torch.Tensor, clip_param: float
) -> torch.Tensor:
    """Return the clipped surrogate (Schulman et al. 2017, arXiv:1707.06347, equation 7), negated: lower is better.

    All tensors have the shape of ``advantage``.
    """
    ratio = (log_prob - old_log_prob).exp()
    clipped = ratio.clamp(1.0 - clip_param, 1.0 + clip_param)
    return -torch.minimum(ratio * advantage, clipped * advantage)


def value_loss(
    value: torch.Tensor, old_value: torch.Tensor, target: torch.Tensor, clip_param: float, clipped: bool
) -> torch.Tensor:
    """Return the squared error of the value, or the larger of it and that of a value kept near the old one."""
    loss = (value - target).square()
    if not clipped:
        return loss
    near = old_value + (value - old_value).clamp(-clip_param, clip_param)
    return torch.maximum(loss, (near - target).square())


def adapt_learning_rate_(
    learning_rate: torch.Tensor, kl: torch.Tensor, desired_kl: float, lowest: float, highest: float
) -> None:
    """Steer a scalar tensor by the KL divergence, in place and without asking the device for its value.

    Above twice the desired divergence it is divided by 1.5, below half of it multiplied by 1.5 (Schulman et al. 2017,
    section 4, as the locomotion field applies it to the learning rate). A divergence that is zero but for rounding, as
    the first of every update is, counts as small: whether it came out above zero must decide nothing.
    """
    factor = torch.ones_like(learning_rate)
    factor = torch.where(kl > 2.0 * desired_kl, 1.0 / 1.5, factor)
    factor = torch.where(kl < 0.5 * desired_kl, 1.5, factor)
    # Within the bounds already: a rate outside them that nothing asks to change stays (the user chose it).
    steered = (learning_rate * factor).clamp(lowest, highest)
    learning_rate.copy_(torch.where(factor == 1.0, learning_rate, steered))
