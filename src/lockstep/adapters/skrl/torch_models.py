"""Networks, normalisers and schedules in skrl's own classes, whose exchanges between ranks are ours (torch)."""

from collections.abc import Callable, Sequence
from typing import Any, Self, cast

import torch
from gymnasium import Space
from skrl.models.torch import CategoricalMixin, DeterministicMixin, GaussianMixin, Model
from skrl.resources.preprocessors.torch import RunningStandardScaler
from skrl.resources.schedulers.torch import KLAdaptiveLR
from torch import nn
from torch.nn import functional

from lockstep.adapters.skrl.policy import Head, actions_of
from lockstep.core.types import ActionSpace, Comm
from lockstep.distributed.torch_moments import Moments, merge_over_ranks
from lockstep.learn.torch.perceptron import Perceptron

_LOG_STD_BOUNDS = (-20.0, 2.0)
Inputs = dict[str, Any]
Outputs = tuple[torch.Tensor, dict[str, Any]]


class Network(Model):  # type: ignore[misc]
    """A model of skrl made of our layers.

    Args:
        layers: from inputs to outputs.
        space: of the actions.
        spaces: of observations, states and actions, as the library has them.
        device: of the parameters.
        sees: the groups that it is given, in their order.

    Attributes:
        num_samples: that went through it last.
        exchange: averages the gradients of this network over the ranks, and of those that have theirs at the same
            time; None where another network's does it.
    """

    exchange: Callable[[int], None] | None = None

    def __init__(
        self,
        layers: Perceptron,
        space: ActionSpace,
        spaces: dict[str, Space[Any] | None],
        device: torch.device,
        sees: Sequence[str] = ("observations",),
    ) -> None:
        super().__init__(**spaces, device=device)
        self.layers, self.space, self.sees = layers, space, tuple(sees)
        self.num_samples = 0

    def compute(self, inputs: Inputs, role: str = "") -> Outputs:
        """Return what the layers make of the inputs."""
        given = [inputs[name] for name in self.sees]
        self.num_samples = given[0].shape[0]
        return self.layers.infer(given[0] if len(given) == 1 else torch.cat(given, dim=1)), {}

    def random_act(self, inputs: Inputs, *, role: str = "") -> Outputs:
        """Return actions uniform in the space, drawn by torch: the library's own would draw without a seed."""
        num_envs, limit = inputs["observations"].shape[0], self.space.limit
        if self.space.kind == "discrete":
            return torch.randint(0, self.space.size, (num_envs, 1), device=self.device), {}
        uniform = torch.rand((num_envs, self.space.size), device=self.device)
        return limit * (2.0 * uniform - 1.0), {}

    def broadcast_parameters(self, *, rank: int = 0) -> None:
        """Do nothing: all of the training is broadcast once it is built, and nothing of it pickled."""

    def reduce_parameters(self) -> None:
        """Average gradients over the samples of all ranks."""
        if self.exchange is not None:
            self.exchange(self.num_samples)


class GaussianNetwork(GaussianMixin, Network):  # type: ignore[misc]
    """A Gaussian whose standard deviation depends on nothing; on top of its mean the noise of RPO, if it is told so."""

    def __init__(self, layers: Perceptron, init_std: float, **named: Any) -> None:
        Network.__init__(self, layers, **named)
        GaussianMixin.__init__(self)
        self.log_std = nn.Parameter(torch.full((self.space.size,), init_std).log())

    def compute(self, inputs: Inputs, role: str = "") -> Outputs:
        """Return means ``(num_samples, size)``, and ``log_std`` of the same shape."""
        means, _ = super().compute(inputs, role)
        if "alpha" in inputs:
            means = means + torch.empty_like(means).uniform_(-inputs["alpha"], inputs["alpha"])
        return means, {"log_std": self.log_std.expand_as(means)}


class CategoricalNetwork(CategoricalMixin, Network):  # type: ignore[misc]
    """A choice by logits."""

    def __init__(self, layers: Perceptron, **named: Any) -> None:
        Network.__init__(self, layers, **named)
        CategoricalMixin.__init__(self)


class DeterministicNetwork(DeterministicMixin, Network):  # type: ignore[misc]
    """Values; or, with a head, actions."""

    def __init__(self, layers: Perceptron, head: Head = "mean", **named: Any) -> None:
        Network.__init__(self, layers, **named)
        DeterministicMixin.__init__(self)
        self.head: Head = head

    def compute(self, inputs: Inputs, role: str = "") -> Outputs:
        """Return ``(num_samples, num_outputs)``."""
        outputs, more = super().compute(inputs, role)
        return actions_of(outputs, self.head, self.space.limit), more


class SquashedNetwork(Network):
    """The policy of soft actor-critic (Haarnoja et al. 2018, arXiv:1812.05905): tanh of a Gaussian, times the limit.

    The layers give its mean, then the logarithm of its standard deviation.
    """

    def act(self, inputs: Inputs, *, role: str = "") -> Outputs:
        """Return sampled actions, and their ``log_prob (num_samples, 1)`` and ``mean_actions``."""
        outputs, _ = self.compute(inputs, role)
        means, log_std = outputs.chunk(2, dim=-1)
        log_std = log_std.clamp(*_LOG_STD_BOUNDS)
        gaussian = torch.distributions.Normal(means, log_std.exp())
        inner = gaussian.rsample()
        # log(1 - tanh(x)^2), without the difference that rounds to zero for large x.
        log_slope = 2.0 * (0.6931471805599453 - inner - functional.softplus(-2.0 * inner))
        # Of actions on the scale of [-1, 1], so that the entropy to aim at does not depend on the limit.
        log_prob = (gaussian.log_prob(inner) - log_slope).sum(-1, keepdim=True)
        mean_actions = actions_of(outputs, "squashed", self.space.limit)
        return self.space.limit * inner.tanh(), {"log_prob": log_prob, "mean_actions": mean_actions}


class SharedScaler(RunningStandardScaler):  # type: ignore[misc]
    """A normaliser that is the same on all ranks: exact moments, of each sample once.

    ``train`` means nothing to it: it is given the observations of each rollout by ``see``, and takes up those of all
    ranks in ``merge_scalers``, once per iteration. Before that it has mean 0, variance 1, and counts no sample.
    """

    def __init__(self, size: Any, *, comm: Comm, **named: Any) -> None:
        super().__init__(size, **named)
        self.comm = comm
        self.current_count: torch.Tensor = self.current_count.zero_()
        self._new = self._nothing()

    def see(self, samples: torch.Tensor) -> None:
        """Count samples ``(..., size)`` of this rank among those of the next merge."""
        self._new = self._new.merge(Moments.of(samples))

    def take(self) -> Moments:
        """Return the moments of what was seen since the last time."""
        taken, self._new = self._new, self._nothing()
        return taken

    def merge_(self, new: Moments) -> None:
        """Take up samples of all ranks, whose number is not 0."""
        merged = Moments(self.current_count, self.running_mean, self.running_variance * self.current_count).merge(new)
        self.current_count.copy_(merged.count)
        self.running_mean.copy_(merged.mean)
        self.running_variance.copy_(merged.m2 / merged.count)

    def _nothing(self) -> Moments:
        zeros = torch.zeros_like(self.running_mean)
        return Moments(torch.zeros_like(self.current_count), zeros, zeros)

    def _compute(self, x: torch.Tensor, *, train: bool = False, inverse: bool = False) -> torch.Tensor:
        return cast(torch.Tensor, super()._compute(x, train=False, inverse=inverse))


class SharedValueScaler(SharedScaler):
    """The same for returns, which the library trains where the ranks are in step: at the start of an update.

    Attributes:
        given: what it was trained on last, ``(num_steps, num_envs, 1)``.
    """

    given: torch.Tensor

    def _compute(self, x: torch.Tensor, *, train: bool = False, inverse: bool = False) -> torch.Tensor:
        if train:
            self.given = x
            self.see(x)
            merge_scalers([self], self.comm)
        return super()._compute(x, inverse=inverse)


def merge_scalers(scalers: Sequence[SharedScaler], comm: Comm) -> None:
    """Have normalisers take up what all ranks have seen since the last time, in one exchange."""
    if scalers:
        merged = merge_over_ranks([scaler.take() for scaler in scalers], comm)
        for scaler, moments in zip(scalers, merged, strict=True):
            scaler.merge_(moments)


class SteeredLearningRate(KLAdaptiveLR):  # type: ignore[misc]
    """The library's schedule by KL divergence, which says what it was told last.

    Attributes:
        kl: of the last epoch, mean over the ranks; None before the first.
    """

    kl: float | None = None

    def step(self, kl: Any = None, *, epoch: int | None = None) -> None:
        """Steer the learning rate by a divergence that is the same on all ranks."""
        super().step(kl, epoch=epoch)
        self.kl = None if kl is None else float(kl)

    def state_dict(self) -> dict[str, Any]:
        """Return the library's, less what is only told."""
        return {name: value for name, value in super().state_dict().items() if name != "kl"}

    def load_state_dict(self, state_dict: dict[str, Any]) -> Self:
        """Take up a state."""
        super().load_state_dict(state_dict)
        return self


def perceptron(widths: Sequence[int], activation: str, gain: float) -> Perceptron:
    """Return layers with a last one of small weights: first actions are centred, first values near zero."""
    layers = Perceptron(widths, activation)
    nn.init.orthogonal_(layers.linear_layers[-1].weight, gain)
    nn.init.zeros_(layers.linear_layers[-1].bias)
    return layers
