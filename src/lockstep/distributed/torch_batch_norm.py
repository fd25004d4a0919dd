"""Batch normalisation of one rank's data alone is refused on several ranks; it can be synchronised."""

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lockstep.core.errors import UsageError
from lockstep.core.types import Comm


def require_synchronised(module: nn.Module, name: str, comm: Comm) -> None:
    """Refuse, on several ranks, a module with batch normalisation that looks at this rank's data alone.

    It would compute other gradients than one process with all samples, and keep running statistics that part from
    rank to rank. A layer in evaluation mode is refused too: nobody could tell that it stays so.

    Args:
        module: searched with all that is inside it.
        name: of the module in the message; "" for none.
        comm: the ranks.

    Raises:
        UsageError: naming the first such layer; alike on every rank that has it.
    """
    if comm.world_size == 1:
        return
    for path, layer in module.named_modules():
        if isinstance(layer, _BatchNorm) and not isinstance(layer, nn.SyncBatchNorm):
            place = ".".join(part for part in (name, path) if part) or "the module"
            raise UsageError(
                f"{place} is a {type(layer).__name__}, which would follow the data of each of the {comm.world_size} "
                "ranks alone; use torch.nn.SyncBatchNorm.convert_sync_batchnorm(module) (GPUs only), or another "
                "normalisation such as LayerNorm"
            )
