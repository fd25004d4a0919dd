"""The losses of proximal policy optimisation and their gradients by what the networks gave, summed over samples.

The same numbers as those of ``losses`` and their backward pass, which tests hold beside them. What has a closed form
takes a third of the passes.
"""

from typing import NamedTuple

import torch

from lockstep.learn.config import PpoConfig
from lockstep.learn.torch.distributions import HALF_LOG_TWO_PI, Gaussian
from lockstep.learn.torch.losses import PolicyRiders, policy_loss
from lockstep.learn.torch.minibatches import Batch
from lockstep.learn.torch.networks import ActorCritic
from lockstep.learn.torch.perceptron import exp_


class PolicyGradient(NamedTuple):
    """The gradient of the policy's loss, and its riders."""

    outputs: torch.Tensor  # (num_samples, size) by the actor's outputs
    log_std: torch.Tensor | None  # (size,), None without such a parameter
    riders: PolicyRiders


def policy_gradient(config: PpoConfig, policy: ActorCritic, outputs: torch.Tensor, batch: Batch) -> PolicyGradient:
    """Return the gradient of ``losses.policy_loss`` by the actor's outputs ``(num_samples, size)``."""
    if policy.log_std is not None:
        return gaussian_gradient(config, Gaussian(outputs, policy.log_std.detach()), batch)
    with torch.inference_mode(False), torch.enable_grad():
        outputs = outputs.clone().requires_grad_()
        loss, riders = policy_loss(config, policy.distribution(outputs), policy.unpack(batch.distributions), batch)
        (by_outputs,) = torch.autograd.grad(loss, outputs)
    return PolicyGradient(by_outputs, None, riders)


def gaussian_gradient(config: PpoConfig, new: Gaussian, batch: Batch) -> PolicyGradient:
    """Return the gradient by means and standard deviation in closed form.

    Args:
        config: of the loss.
        new: means ``(num_samples, size)``, logarithms of the standard deviation ``(size,)``.
        batch: the samples; its distributions have one standard deviation for all.
    """
    num_samples, size = new.mean.shape
    precision = (-2.0 * new.log_std).exp()  # 1 / variance
    deviation = batch.actions - new.mean
    squares = deviation.square()
    # Sums over the few entries of an action are products with a vector, which torch does ten times as fast.
    log_ratio = torch.addmv(batch.log_probs, squares, -0.5 * precision, beta=-1.0)
    ratio = exp_(log_ratio.sub_(new.log_std.sum() + size * HALF_LOG_TWO_PI))
    gain = ratio * batch.advantages
    bounded = ratio.clamp_(1.0 - config.clip_param, 1.0 + config.clip_param).mul_(batch.advantages)
    surrogate = -torch.minimum(gain, bounded).sum()
    # By the log probability: the gain itself, unless the bounded one is the smaller and so the one that counts.
    slope = gain.mul_(torch.le(gain, bounded, out=bounded))
    by_mean = deviation.mul_(slope.unsqueeze(-1)).mul_(-precision)
    by_log_std = slope.sum() - torch.mv(squares.t(), slope) * precision - config.entropy_coef * num_samples

    old_mean, old_log_std = batch.distributions.split(size, dim=-1)
    change = torch.sub(old_mean, new.mean, out=squares).square_().sum(0) * precision
    log_ratios = old_log_std[:1] - new.log_std  # (1, size), or none of no samples
    per_sample = 0.5 * (2.0 * log_ratios).exp() - 0.5 - log_ratios
    kl = 0.5 * change.sum() + num_samples * per_sample.sum()
    entropy = num_samples * (new.log_std + (0.5 + HALF_LOG_TWO_PI)).sum()
    return PolicyGradient(by_mean, by_log_std, (kl, surrogate, entropy))


def value_gradient(config: PpoConfig, values: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradient of the weighted value loss by ``values (num_samples,)``, and the loss, not weighted."""
    errors = values - batch.targets
    if not config.use_clipped_value_loss:
        return errors * (2.0 * config.value_loss_coef), torch.dot(errors, errors)
    moved = values - batch.values
    near = batch.values + moved.clamp(-config.clip_param, config.clip_param) - batch.targets
    larger = torch.maximum(errors.square(), near.square())
    # Where the clipped value errs more, only a value that was not clipped has any say in it.
    counts = (errors.square() == larger) | (moved.abs() <= config.clip_param)
    return errors * counts * (2.0 * config.value_loss_coef), larger.sum()
