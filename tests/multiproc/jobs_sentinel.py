"""Ranks that hold the state of a small learner in common, one of which may be off by a bit."""

import torch
from torch import nn

from lockstep.core.errors import RunError
from lockstep.distributed.torch_comm import GroupComm
from lockstep.distributed.torch_sentinel import Sentinel
from lockstep.learn.torch.normalizer import Normalizer
from lockstep.learn.torch.statistics import Moments


def replicated() -> dict[str, torch.Tensor]:
    """Return what a learner has after a few updates: the same in every process."""
    generator = torch.Generator().manual_seed(5)
    actor = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    with torch.no_grad():
        for parameter in actor.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    optimizer = torch.optim.Adam(actor.parameters(), lr=torch.tensor(1e-3))
    normalizer = Normalizer(3)
    for _ in range(3):
        samples = torch.randn((16, 3), generator=generator)
        normalizer.merge_(Moments.of(samples))
        optimizer.zero_grad()
        actor(normalizer(samples)).square().mean().backward()
        optimizer.step()
    tensors = {f"policy.actor.{name}": tensor for name, tensor in actor.state_dict().items()}
    tensors |= {f"policy.normalizer.{name}": tensor for name, tensor in normalizer.state_dict().items()}
    for number, moments in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{number}.{name}": tensor for name, tensor in moments.items()}
    return tensors | {
        "iteration": torch.tensor(7),
        "level": torch.arange(4, dtype=torch.int32),
        "is_done": torch.tensor([True, False, True]),
        "half": torch.ones(5, dtype=torch.bfloat16),
        "empty": torch.zeros(0, 3),
    }


def check(comm: GroupComm, plants: list[tuple[int, str]]) -> tuple[str, int]:
    """Flip the lowest bit of the last entry of the named tensors on some ranks; return what the sentinel says.

    Args:
        comm: the ranks.
        plants: rank and name; a name after a minus is left out instead, one after a plus is added.

    Returns:
        The error, or nothing, and the number of collectives.
    """
    tensors = replicated()
    for rank, name in plants:
        if rank != comm.rank:
            continue
        if name.startswith("-"):
            del tensors[name[1:]]
        elif name.startswith("+"):
            tensors[name[1:]] = torch.zeros(2)
        else:
            tensor = tensors[name] = tensors[name].clone()
            tensor.view(-1).view(torch.uint8)[-tensor.element_size()] ^= 1
    try:
        Sentinel(comm, 10).check(40, tensors)
    except RunError as error:
        assert error.shared
        return str(error), comm.collectives.num_started
    return "", comm.collectives.num_started
