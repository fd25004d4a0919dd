"""What makes a training loop of your own one that several ranks can run together."""

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import nn

from lockstep.core.errors import UsageError
from lockstep.core.interrupts import StopReason
from lockstep.core.types import Comm
from lockstep.distributed.torch_gradients import AveragedGradients, average_gradients
from lockstep.distributed.torch_moments import Moments
from lockstep.distributed.torch_state import Replicated, broadcast_named
from lockstep.distributed.torch_statistics import Number, merge_moments, reduce_metrics


class DistributedMixin:
    """Compose it into a runner (``class Runner(DistributedMixin)``) and call its methods where ranks must agree.

    ``lockstep train --runner`` runs it on any number of ranks, and calls ``broadcast`` itself: after the constructor,
    and after every load, which rank 0 alone reads. In a script of your own, call it there yourself. All ranks make the
    same calls in the same order; one process may call everything too.

    The constructor must set ``comm``, which it is handed. What is the same on every rank is what ``replicated``
    returns; everything else, such as the envs, is each rank's own.
    """

    comm: Comm

    def replicated(self) -> Mapping[str, Replicated]:
        """Return by name what must be the same on every rank, in the same order on every rank.

        By default: the modules, optimizers and learning-rate schedules among the attributes. A runner that keeps some
        elsewhere (in a list, or an object of its own), or that has tensors such as those of a normaliser, says so here.

        Raises:
            UsageError: there is no module among the attributes.
        """
        kinds = (nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)
        found: dict[str, Replicated] = {name: value for name, value in vars(self).items() if isinstance(value, kinds)}
        if isinstance(self, nn.Module):
            found = {"self": self} | found
        if not any(isinstance(value, nn.Module) for value in found.values()):
            raise UsageError(
                f"{type(self).__name__} has no module among its attributes; let replicated() return what ranks have in "
                "common"
            )
        return found

    def broadcast(self) -> None:
        """Give every rank rank 0's ``replicated`` state, bit for bit; see ``broadcast_state``."""
        broadcast_named(self.replicated(), self.comm)

    def average_gradients(
        self, module_or_parameters: nn.Module | Iterable[nn.Module | nn.Parameter], num_samples: Number
    ) -> AveragedGradients:
        """Make every ``.grad`` the mean over the samples of all ranks; see ``average_gradients``."""
        return average_gradients(module_or_parameters, num_samples, comm=self.comm)

    def reduce_metrics(self, metrics: Mapping[str, Number | tuple[Number, Number]]) -> dict[str, float]:
        """Return every metric's mean over the data of all ranks; see ``reduce_metrics``."""
        return reduce_metrics(metrics, comm=self.comm)

    def merge_moments(self, new: Moments, running: Moments | None = None) -> Moments:
        """Return the moments of all ranks' samples; see ``merge_moments``."""
        return merge_moments(new, running, comm=self.comm)

    def agree_on_stop(self, reason: StopReason | None) -> StopReason | None:
        """Return why all ranks stop now, the same on every rank; None to go on. Ask once per iteration.

        Args:
            reason: why this rank would stop, as its observer's ``stop_requested`` says; a signal may reach one rank
                alone. An interruption goes before a preemption.
        """
        reasons = self.comm.gather_text(reason or "", "stop")
        return "interrupted" if "interrupted" in reasons else "preempted" if "preempted" in reasons else None

    def on_main(self, work: Callable[[], str]) -> str:
        """Run ``work`` on rank 0 alone, to write a file of your own say, and return its text on every rank.

        The others wait for it. The observer's ``record`` and ``save`` need no such care: they write on rank 0 only.

        Raises:
            LockstepError: what ``work`` raised, on every rank.
        """
        return self.comm.on_main(work, "runner")


def require_mixin(kind: type, name: str, world_size: int) -> None:
    """Refuse a runner without the mixin on several ranks: they would drift apart without a word.

    Raises:
        UsageError: with the mend.
    """
    if world_size > 1 and not issubclass(kind, DistributedMixin):
        raise UsageError(
            f"{name} can't train on {world_size} ranks: it does not derive from lockstep.distributed.DistributedMixin, "
            "which keeps ranks in step; derive it from the mixin, or run it with one process"
        )
