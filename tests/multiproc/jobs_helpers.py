"""What ranks do in the tests of the helpers for a loop of one's own: they call them as a user's script would."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lockstep
from lockstep import distributed
from lockstep.core.errors import LockstepError
from lockstep.core.types import Comm
from tests.unit.learner_fixtures import small_config

Tensors = dict[str, torch.Tensor]


class Heads(nn.Module):
    """Three weights, each the factor of a head of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.used_on_rank_0, self.unused = (nn.Parameter(torch.ones(())) for _ in range(3))


def average_unequal(comm: Comm) -> tuple[float, float, bool, float]:
    """Average the gradients of 1 sample here and 3 there, in a module whose heads are not all used everywhere."""
    heads = Heads()
    samples = torch.tensor([1.0]) if comm.rank == 0 else torch.tensor([4.0, 5.0, 6.0])
    loss = heads.used * samples
    if comm.rank == 0:
        loss = loss + 2 * heads.used_on_rank_0
    loss.mean().backward()
    averaged = distributed.average_gradients(heads, num_samples=len(samples))
    assert heads.used.grad is not None and heads.used_on_rank_0.grad is not None
    return (
        heads.used.grad.item(),
        heads.used_on_rank_0.grad.item(),
        heads.unused.grad is None,
        averaged.num_samples.item(),
    )


def average_channels_last(comm: Comm) -> tuple[list[float], tuple[int, ...], str]:
    """Average the gradients 0, 1, 2, ... and 100, 101, 102, ... of an image weight, strided otherwise on each rank."""
    weight = nn.Parameter(torch.zeros(2, 3, 2, 2).to(memory_format=torch.channels_last))
    gradient = torch.arange(24.0).view(2, 3, 2, 2) + 100 * comm.rank
    weight.grad = gradient.to(memory_format=torch.channels_last) if comm.rank == 0 else gradient
    strides = weight.grad.stride()
    distributed.average_gradients([weight], num_samples=1)
    return weight.grad.flatten().tolist(), strides, str(weight.grad.stride() == strides)


def average_in_half_precision(comm: Comm) -> tuple[str, float]:
    """Average bfloat16 gradients whose sum weighted by samples is beyond bfloat16's own precision."""
    weight = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    weight.grad = torch.full((1,), 1.0 + comm.rank, dtype=torch.bfloat16)
    distributed.average_gradients([weight], num_samples=1000 + comm.rank)
    return str(weight.grad.dtype), weight.grad.item()


def average_with_an_idle_rank(comm: Comm) -> tuple[float, list[int]]:
    """Average where rank 1 has no samples, so that its mean loss is no number."""
    weight = nn.Parameter(torch.zeros(1))
    weight.grad = torch.tensor([3.0 if comm.rank == 0 else float("nan")])
    averaged = distributed.average_gradients([weight], num_samples=0 if comm.rank == 1 else torch.tensor(5))
    return weight.grad.item(), averaged.nonfinite_ranks()


def average_infinite(comm: Comm) -> tuple[bool, str]:
    """Average where rank 1 has an infinity; return whether all is finite and what is said."""
    weight = nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor([1.0, float("inf") if comm.rank == 1 else 1.0])
    averaged = distributed.average_gradients([weight], num_samples=1)
    try:
        averaged.require_finite()
    except LockstepError as error:
        return averaged.are_finite(), str(error)
    return averaged.are_finite(), ""


def average_differently(comm: Comm) -> str:
    """Give one rank another parameter; return what is said."""
    module = nn.Linear(2 + comm.rank, 1)
    try:
        distributed.average_gradients(module, num_samples=1)
    except LockstepError as error:
        assert error.shared
        return str(error)
    return ""


def average_wrapped(comm: Comm, past_the_wrapper: bool) -> float:
    """Average the gradients of a wrapped module, as many samples on each rank unless its wrapper is passed by."""
    module = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(module.weight)
    wrapped = DistributedDataParallel(module)
    num_samples = 1 + 2 * comm.rank if past_the_wrapper else 2
    samples = torch.full((num_samples, 1), 1.0 + 4 * comm.rank)
    (module if past_the_wrapper else wrapped)(samples).mean().backward()
    distributed.average_gradients(wrapped, num_samples)
    assert module.weight.grad is not None
    return module.weight.grad.item()


def normalise_batches(comm: Comm, call: str) -> str:
    """Hand a module with batch normalisation over; return what is said before anything is exchanged."""
    from lockstep.distributed.torch_comm import GroupComm

    assert isinstance(comm, GroupComm)
    inner = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3, affine=False))
    module = nn.ModuleDict({"torso": inner, "head": nn.Linear(3, 1)})
    if call.startswith("synchronised "):
        module = nn.SyncBatchNorm.convert_sync_batchnorm(module)

    class Runner(distributed.DistributedMixin):
        def __init__(self) -> None:
            self.comm, self.policy = comm, module

    calls: dict[str, Callable[[], object]] = {
        "gradients": lambda: distributed.average_gradients(module, 1, comm=comm),
        "several": lambda: distributed.average_gradients([nn.Linear(1, 1), module], 1, comm=comm),
        "evaluation": lambda: distributed.average_gradients(module.eval(), 1, comm=comm),
        "state": lambda: distributed.broadcast_state(nn.Linear(1, 1), module, comm=comm),
        "mixin": lambda: Runner().broadcast(),
    }
    before = comm.collectives.num_started
    try:
        calls[call.removeprefix("synchronised ")]()
    except LockstepError as error:
        assert comm.collectives.num_started == before
        return str(error)
    assert comm.collectives.num_started > before
    return ""


def count_exchanges(comm: Comm) -> list[int]:
    """Return the exchanges of three averages in a row."""
    from lockstep.distributed.torch_comm import GroupComm

    assert isinstance(comm, GroupComm)
    module = nn.Linear(2, 1)
    counts = []
    for _ in range(3):
        before = comm.collectives.num_started
        module(torch.ones(4, 2)).mean().backward()
        distributed.average_gradients(module, 4, comm=comm)
        counts.append(comm.collectives.num_started - before)
    return counts


# --- state -----------------------------------------------------------------------------------------------------------


class Learner:
    """Two networks with an optimizer each, a schedule, and a buffer that is not saved."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.actor = nn.Sequential(nn.Conv2d(3, 4, 2), nn.Flatten(), nn.Linear(4, 2))
        self.actor.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.actor.register_buffer("mask", torch.rand(3), persistent=False)
        self.critic = nn.Linear(12, 1)
        self.actor_optimizer = torch.optim.Adam(self.actor.parameters(), lr=0.01)
        self.critic_optimizer = torch.optim.SGD(self.critic.parameters(), lr=0.1, momentum=0.9)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.actor_optimizer, step_size=3, gamma=0.5)

    def everything(self) -> tuple[Any, ...]:
        return self.actor, self.critic, self.actor_optimizer, self.critic_optimizer, self.schedule

    def step(self, seed: int, num_samples: int, comm: Comm | None = None) -> None:
        """Update by samples that no other seed has; with all ranks if there are any."""
        generator = torch.Generator().manual_seed(seed)
        images = torch.randn(num_samples, 3, 2, 2, generator=generator)
        loss = self.actor(images).square().mean() + (self.critic(images.flatten(1)) - 1).square().mean()
        for optimizer in (self.actor_optimizer, self.critic_optimizer):
            optimizer.zero_grad()
        loss.backward()
        if comm is not None:
            distributed.average_gradients([self.actor, self.critic], num_samples).require_finite()
        for optimizer in (self.actor_optimizer, self.critic_optimizer):
            optimizer.step()
        self.schedule.step()

    def state(self) -> dict[str, Any]:
        names = ("actor", "critic", "actor_optimizer", "critic_optimizer", "schedule")
        return {name: copy.deepcopy(getattr(self, name).state_dict()) for name in names} | {
            "mask": self.actor.get_buffer("mask").clone()
        }


def share_state(comm: Comm, rank_with_history: int, num_updates: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Let one rank train alone, then share rank 0's state, then train together; return both states."""
    learner = Learner(seed=10 + comm.rank)
    if comm.rank == rank_with_history:
        for seed in range(4):
            learner.step(seed, num_samples=8)
    distributed.broadcast_state(*learner.everything())
    shared = learner.state()
    for update in range(num_updates):
        learner.step(100 * (comm.rank + 1) + update, num_samples=4 + 3 * comm.rank, comm=comm)
    return shared, learner.state()


def share_in_place(comm: Comm) -> tuple[bool, Tensors, float]:
    """Share tensors of many types, and an optimizer with a rate that is a tensor; return whether all are the same."""
    rank = comm.rank
    tensors = {
        "double": torch.tensor([float("nan"), -0.0, 1.0 / 3.0 + rank], dtype=torch.float64),
        "half": torch.arange(3).to(torch.bfloat16) + rank,
        "flags": torch.tensor([rank == 0, True]),
        "count": torch.tensor(2**62 + rank),
        "empty": torch.zeros(0, 3),
        "strided": (torch.arange(6.0) + rank).view(2, 3).T,
    }
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.Adam([weight], lr=torch.tensor(0.5 if rank == 0 else 0.25))
    before = [*map(id, tensors.values()), id(optimizer.param_groups[0]["lr"])]
    distributed.broadcast_state(tensors, weight, optimizer)
    after = [*map(id, tensors.values()), id(optimizer.param_groups[0]["lr"])]
    return before == after, tensors, optimizer.param_groups[0]["lr"].item()


def share_differently(comm: Comm, what: str) -> str:
    """Call ``broadcast_state`` with objects that differ on rank 1; return what is said."""
    odd = comm.rank == 1
    objects: dict[str, Any] = {
        "shape": nn.Linear(3 if odd else 2, 1),
        "name": nn.ModuleDict({"other" if odd else "actor": nn.Linear(2, 1)}),
        "kind": nn.Linear(2, 1) if odd else {"weight": torch.zeros(1, 2)},
        "more": [nn.Linear(2, 1)] * (2 if odd else 1),
        "type": torch.zeros(2, dtype=torch.float64 if odd else torch.float32),
    }
    chosen = objects[what]
    try:
        distributed.broadcast_state(*(chosen if isinstance(chosen, list) else [chosen]))
    except LockstepError as error:
        assert error.shared
        return str(error)
    return ""


def share_value(comm: Comm, value: Any) -> Any:
    """Return what rank 0 has."""
    return distributed.broadcast_value(value if comm.rank == 0 else None)


# --- statistics and decisions ----------------------------------------------------------------------------------------


def reduce(comm: Comm, by_rank: list[dict[str, Any]]) -> dict[str, float]:
    """Reduce each rank's metrics."""
    return distributed.reduce_metrics(by_rank[comm.rank])


def samples_of(rank: int, merge: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Return samples that are shifted by rank and of another number each time; rank 1 has none at times."""
    num_samples = (7, 0, 31, 3)[(rank + merge) % 4]
    generator = torch.Generator().manual_seed(10 * rank + merge)
    return 3 * rank + torch.randn(num_samples, *shape, dtype=torch.float64, generator=generator)


def merge(comm: Comm, num_merges: int, shape: tuple[int, ...]) -> tuple[float, torch.Tensor, torch.Tensor]:
    """Merge the moments of some batches; return count, mean and variance."""
    running = None
    for number in range(num_merges):
        running = distributed.merge_moments(distributed.moments_of(samples_of(comm.rank, number, shape)), running)
    assert running is not None
    return running.count.item(), running.mean, running.std().square()


def decide(comm: Comm) -> dict[str, Any]:
    """Return what the small helpers say."""
    return {
        "main_only": distributed.main_only(lambda number: number + 1)(41),
        "any": distributed.any_rank(comm.rank == comm.world_size - 1),
        "none": distributed.any_rank(False),
        "texts": distributed.gather_text("ä" * comm.rank),
        "rank": distributed.get_global_rank(),
        "world_size": distributed.get_world_size(),
        "is_main": distributed.is_main_process(),
    }


def start(comm: Comm) -> tuple[lockstep.Place, float, str, list[str]]:
    """Do what a script does that has lockstep train in between; return its place, a random number and the run."""
    place = lockstep.init("cpu", seed=7)
    assert lockstep.init("cpu", seed=7) == place
    number = torch.rand(()).item()
    outcome = lockstep.train(small_config(num_envs=4, max_iterations=1, logger="none", evaluation={"interval": 0}))
    return place, number, str(outcome.run_path), distributed.gather_text(outcome.status)
