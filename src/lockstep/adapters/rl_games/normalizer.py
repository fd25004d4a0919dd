"""rl_games' running mean and standard deviation, merged exactly over ranks (rl-games 1.6.5)."""

from typing import Any

import torch
from rl_games.algos_torch.running_mean_std import RunningMeanStd

from lockstep.core.types import Comm
from lockstep.distributed.torch_moments import Moments
from lockstep.distributed.torch_statistics import merge_moments, moments_of


class FrozenMeanStd(RunningMeanStd):  # type: ignore[misc]
    """Normalises as rl_games does, but changes by ``merge_`` alone.

    rl_games' own takes up the samples of every minibatch in every pass over them, each rank its own, while the policy
    is trained on inputs that are shifted meanwhile.
    """

    running_mean: torch.Tensor
    running_var: torch.Tensor
    count: torch.Tensor

    def train(self, mode: bool = True) -> "FrozenMeanStd":
        """Stay in evaluation mode, in which nothing is taken up."""
        super().train(False)
        return self

    @torch.no_grad()
    def merge_(self, samples: torch.Tensor, comm: Comm) -> None:
        """Take up all ranks' ``samples (num_samples, size)``, each once; the same result on every rank."""
        before = Moments(self.count, self.running_mean, self.running_var * self.count)
        merged = merge_moments(moments_of(samples), before, comm=comm)
        self.count.copy_(merged.count)
        self.running_mean.copy_(merged.mean)
        self.running_var.copy_(merged.m2 / merged.count)


def freeze(model: Any) -> None:
    """Put frozen normalisers in the place of those that a new model of rl_games has, with the same state."""
    for name in ("running_mean_std", "value_mean_std"):
        old: Any = getattr(model, name, None)
        if old is not None:
            new = FrozenMeanStd(tuple(old.running_mean.shape)).to(old.running_mean.device)
            new.load_state_dict(old.state_dict())
            setattr(model, name, new.train(False))
