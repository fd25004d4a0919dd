"""RSL-RL's normalisers with moments that all ranks' samples count in, exactly, and are merged once per iteration."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from rsl_rl.modules import EmpiricalNormalization
from torch import nn

from lockstep.core.types import Comm
from lockstep.distributed.torch_moments import Moments, merge_over_ranks
from lockstep.distributed.torch_statistics import moments_of


class MergedNormalization(EmpiricalNormalization):  # type: ignore[misc]
    """An ``EmpiricalNormalization`` that only notes what it is shown; ``merge`` takes all ranks' notes up.

    RSL-RL's own, where there is a process group, makes three exchanges per call (for rewards of random network
    distillation: at every env step), and sums in float32; a rank without envs makes NaN of it on all.

    What it computes, and the names in its ``state_dict``, are RSL-RL's; the moments in float64 that it counts with are
    saved apart (``moments``). Rewards of a rollout are divided by the deviation that was known when it began.

    Args:
        like: whose shape, epsilon, limit and device it takes.
    """

    moments: torch.Tensor  # (1 + 2 * size,) float64: as ``Moments.pack`` gives them

    def __init__(self, like: EmpiricalNormalization) -> None:
        self._shape = tuple(like._mean.shape[1:])
        super().__init__(self._shape, like.eps, like.until)
        self.to(like._mean.device)
        nothing = torch.zeros(1 + 2 * like._mean.numel(), dtype=torch.float64, device=like._mean.device)
        self.register_buffer("moments", nothing, persistent=False)
        self._new: Moments | None = None

    def update(self, x: torch.Tensor) -> None:
        """Note samples ``(num_samples, ...)``."""
        if self.training:
            new = moments_of(x)
            self._new = new if self._new is None else self._new.merge(new)

    def take(self) -> Moments:
        """Return this rank's moments since the last call; those of no samples where the limit is reached."""
        new, self._new = self._new, None
        is_full = self.until is not None and int(self.moments[0]) >= self.until
        return Moments.unpack(torch.zeros_like(self.moments), self._shape) if new is None or is_full else new

    def take_up(self, new: Moments) -> None:
        """Count samples that are known by their moments."""
        self.load(Moments.unpack(self.moments, self._shape).merge(new).pack())

    @torch.no_grad()
    def load(self, moments: torch.Tensor) -> None:
        """Go on from ``moments``; without a sample in them it stays as it is."""
        self.moments.copy_(moments)
        merged = Moments.unpack(self.moments, self._shape)
        if merged.count > 0:
            self.count.copy_(merged.count)
            self._mean.copy_(merged.mean)
            self._std.copy_(merged.std())
            self._var.copy_(merged.std().square())


def put_in(model: nn.Module) -> None:
    """Replace the normalisers of a model by merged ones, wherever they are in it."""
    for module in [*model.modules()]:
        for name, child in [*module.named_children()]:
            if type(child) is EmpiricalNormalization:
                setattr(module, name, MergedNormalization(child))


def normalizers_of(models: Mapping[str, nn.Module]) -> dict[str, MergedNormalization]:
    """Return the merged normalisers in some models by name, each once."""
    found: dict[MergedNormalization, str] = {}
    for model_name, model in models.items():
        for name, module in model.named_modules():
            if isinstance(module, MergedNormalization):
                found.setdefault(module, f"{model_name}.{name}")
    return {name: module for module, name in found.items()}


def merge(normalizers: Sequence[MergedNormalization], comm: Comm) -> None:
    """Have every normaliser count the samples of all ranks: one exchange for all, none without normalisers."""
    for normalizer, new in zip(normalizers, _shared(normalizers, comm), strict=True):
        normalizer.take_up(new)


def _shared(normalizers: Sequence[MergedNormalization], comm: Comm) -> Iterator[Moments]:
    yield from merge_over_ranks([normalizer.take() for normalizer in normalizers], comm) if normalizers else ()
