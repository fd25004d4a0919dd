"""Finding the first tensor that is not finite, after an update was stopped by one."""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from lockstep.learn.torch.networks import PolicyState
from lockstep.learn.torch.ppo import Ppo, Samples
from lockstep.learn.torch.rollout import Rollout


class Finding(NamedTuple):
    """A cause, and where in the flow of data it was met: of several ranks' findings the least ``order`` came first."""

    order: int
    text: str


def first_nonfinite(
    learner: Ppo, rollout: Rollout, samples: Samples, state: PolicyState, iteration: int
) -> Finding | None:
    """Name the earliest cause on this rank, as data flows: parameters, rollout, estimates, gradients.

    The update skipped every step from the first bad minibatch on, so the parameters still are those it was met with.
    No other rank takes part, so None is the answer of a rank whose own tensors are all finite.
    """
    order = 0
    for order, (name, tensor) in enumerate(_in_order_of_flow(learner, rollout, samples)):
        bad = (~torch.isfinite(tensor)).nonzero()
        if bad.shape[0]:
            share = f"({bad.shape[0]} of {tensor.numel()} entries)"
            return Finding(order, f"{name} at index {tuple(bad[0].tolist())} {share}")
    for number, minibatch in enumerate(learner.minibatches(samples, state, iteration)):
        learner.accumulate(minibatch)
        for name, parameter in learner.gradients.parameters.items():
            gradient = parameter.grad
            if gradient is not None and not torch.isfinite(gradient).all():
                return Finding(order + 1 + number, f"gradient of {name} in minibatch {number}")
        if not torch.isfinite(learner.gradients.means).all():
            return Finding(order + 1 + number, f"loss of minibatch {number}")
    return None


def _in_order_of_flow(learner: Ppo, rollout: Rollout, samples: Samples) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in learner.gradients.parameters.items():
        yield f"parameter {name}", parameter.detach()
    for name in ("actor_observations", "critic_observations", "actions", "log_probs", "rewards"):
        yield name, getattr(rollout, name)
    # Only where the time limit cut an episode are they used; a diverged env has nothing sensible there.
    yield "final_critic_observations", rollout.final_critic_observations[rollout.truncated]
    for name in ("values", "advantages", "targets"):
        yield name, getattr(samples.batch, name)
