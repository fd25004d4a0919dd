"""From a chunk of samples to sums of gradients and riders: by autograd, or in passes that are spelled out."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import cast

import torch

from lockstep.learn.config import PpoConfig
from lockstep.learn.torch.loss_gradients import policy_gradient, value_gradient
from lockstep.learn.torch.losses import policy_loss, value_loss
from lockstep.learn.torch.minibatches import Batch, Sequences
from lockstep.learn.torch.networks import ActorCritic

RIDERS = ("kl", "surrogate", "value", "entropy")
Riders = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Scalars in the order of RIDERS, summed over samples."""


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
    # One network after the other: the second one finds the memory of the first still in the cache.
    actor, critic = policy.actor.perceptron, policy.critic.perceptron
    trace = actor.trace(batch.actor_observations)
    gradient = policy_gradient(config, policy, trace.outputs, batch)
    actor.backward_(trace, gradient.outputs)
    if policy.log_std is not None:
        cast(torch.Tensor, policy.log_std.grad).add_(cast(torch.Tensor, gradient.log_std))
    del trace
    trace = critic.trace(batch.critic_observations)
    by_values, error = value_gradient(config, trace.outputs.squeeze(-1), batch)
    critic.backward_(trace, by_values.unsqueeze(-1))
    kl, surrogate, entropy = gradient.riders
    return kl, surrogate, error, entropy


def add_gradients_by_autograd_(
    config: PpoConfig, policy: ActorCritic, chunk: Sequences, precision: Callable[[], AbstractContextManager[object]]
) -> Riders:
    """Do what ``add_gradients_`` does with any policy; ``precision`` makes the context that its networks run in."""
    batch = chunk.batch
    with precision():
        distribution, value = policy.evaluate(
            batch.actor_observations, batch.critic_observations, chunk.start, batch.done
        )
    loss, (kl, surrogate, entropy) = policy_loss(config, distribution, policy.unpack(batch.distributions), batch)
    error = value_loss(value, batch.values, batch.targets, config.clip_param, config.use_clipped_value_loss).sum()
    (loss + config.value_loss_coef * error).backward()
    return kl, surrogate, error.detach(), entropy
