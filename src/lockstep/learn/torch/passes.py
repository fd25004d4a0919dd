"""From a chunk of samples to sums of gradients and riders: by autograd, or in passes that are spelled out."""

from typing import cast

import torch

from lockstep.learn.config import PpoConfig
from lockstep.learn.torch.distributions import Gaussian
from lockstep.learn.torch.gaussian_loss import LossGradient, gaussian_loss
from lockstep.learn.torch.losses import Riders, ppo_loss
from lockstep.learn.torch.minibatches import Batch
from lockstep.learn.torch.networks import ActorCritic


def are_spelled_out(policy: ActorCritic, autocast: bool) -> bool:
    """Return whether ``add_gradients_`` can do what autograd does.

    Not with a memory, in bfloat16 or on a GPU; nor where somebody has put a hook on a parameter, as a gradient buffer
    that is sent in parts does.
    """
    hooked = any(
        parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)
        for parameter in policy.parameters()
    )
    first = next(policy.parameters())
    return first.device.type == "cpu" and not (policy.recurrent or autocast or hooked)


@torch.inference_mode()
def add_gradients_(config: PpoConfig, policy: ActorCritic, batch: Batch) -> Riders:
    """Add the gradients of the loss, summed over ``(num_samples,)`` samples, to each parameter's ``.grad``.

    Args:
        config: of the loss.
        policy: see ``are_spelled_out``; every parameter must have a ``.grad``.
        batch: the samples.

    Returns:
        the riders, summed as well.
    """
    actor = policy.actor.perceptron.trace(batch.actor_observations)
    critic = policy.critic.perceptron.trace(batch.critic_observations)
    gradient = loss_gradient(config, policy, actor.outputs, critic.outputs.squeeze(-1), batch)
    policy.actor.perceptron.backward_(actor, gradient.outputs)
    policy.critic.perceptron.backward_(critic, gradient.values.unsqueeze(-1))
    if policy.log_std is not None:
        cast(torch.Tensor, policy.log_std.grad).add_(cast(torch.Tensor, gradient.log_std))
    return gradient.riders


def loss_gradient(
    config: PpoConfig, policy: ActorCritic, outputs: torch.Tensor, values: torch.Tensor, batch: Batch
) -> LossGradient:
    """Return the riders and the gradient by what the networks gave: ``(num_samples, size)`` and ``(num_samples,)``."""
    if policy.log_std is not None:
        return gaussian_loss(config, Gaussian(outputs, policy.log_std.detach()), values, batch)
    with torch.inference_mode(False), torch.enable_grad():
        outputs, values = outputs.clone().requires_grad_(), values.clone().requires_grad_()
        loss, riders = ppo_loss(config, policy.distribution(outputs), policy.unpack(batch.distributions), values, batch)
        by_outputs, by_values = torch.autograd.grad(loss, (outputs, values))
    return LossGradient(by_outputs, by_values, None, riders)
