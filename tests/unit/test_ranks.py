"""Which rank am I; and the helpers for a loop of one's own in a process that has no others."""

import json
import math
import random
import subprocess
import sys
from collections.abc import Callable

import numpy
import pytest
import torch
from torch import nn

import lockstep
from lockstep import distributed
from lockstep.core.errors import RunError, UsageError
from lockstep.distributed.torch_comm import SoloComm
from lockstep.session.process import seed_generators


@pytest.fixture
def third_of_four(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rank of the second of two nodes."""
    for name, value in {"RANK": 2, "LOCAL_RANK": 0, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))


def test_alone() -> None:
    assert not distributed.is_distributed()
    assert distributed.is_main_process()
    assert (distributed.get_global_rank(), distributed.get_local_rank(), distributed.get_world_size()) == (0, 0, 1)


def test_one_of_many(third_of_four: None) -> None:
    assert distributed.is_distributed()
    assert not distributed.is_main_process()  # its local rank is 0, its global one is not
    assert (distributed.get_global_rank(), distributed.get_local_rank(), distributed.get_world_size()) == (2, 0, 4)


def test_slurm_alone_makes_nothing_distributed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_PROCID", "3")
    monkeypatch.setenv("SLURM_NTASKS", "8")
    assert not distributed.is_distributed()
    assert distributed.is_main_process()


def test_main_only(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    @distributed.main_only
    def note(number: int, *, twice: bool = False) -> int:
        """Take a note."""
        calls.append(number)
        return 2 * number if twice else number

    assert note(3, twice=True) == 6
    monkeypatch.setenv("RANK", "1")  # decided at the call, not at the definition
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert note(4) is None
    assert calls == [3]
    assert (note.__name__, note.__doc__) == ("note", "Take a note.")


def test_every_name_is_there_and_no_other() -> None:
    for name in distributed.__all__:
        assert getattr(distributed, name).__name__ == name
    assert set(distributed.__all__) <= set(dir(distributed))
    assert set(distributed.__all__) == set(distributed._HOME_OF)
    with pytest.raises(AttributeError, match=r"'lockstep.distributed' has no attribute 'is_chief'"):
        _ = distributed.is_chief


@pytest.mark.parametrize(
    "statement",
    [
        "import lockstep; lockstep.distributed.is_main_process()",
        "from lockstep.distributed import main_only, get_world_size",
    ],
)
def test_asking_for_the_rank_loads_no_torch(statement: str) -> None:
    code = f"{statement}\nimport json, sys\nprint(json.dumps('torch' in sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(result.stdout) is False


# --- a process alone -------------------------------------------------------------------------------------------------


def test_without_a_group_gradients_keep_their_bits() -> None:
    module = nn.Linear(3, 2)
    unused = nn.Parameter(torch.ones(1))
    module(torch.rand(7, 3)).square().mean().backward()
    assert module.weight.grad is not None and module.bias.grad is not None
    before = module.weight.grad.clone(), module.bias.grad.clone()
    averaged = distributed.average_gradients([module, unused], num_samples=7)
    assert torch.equal(module.weight.grad, before[0]) and torch.equal(module.bias.grad, before[1])
    assert unused.grad is None
    assert averaged.are_finite() and averaged.nonfinite_ranks() == [] and averaged.num_samples == 7
    module.bias.grad[0] = math.nan
    averaged = distributed.average_gradients(module, num_samples=7)
    assert averaged.nonfinite_ranks() == [0]
    with pytest.raises(RunError, match=r"gradients of rank 0 \(of 1\) are not finite"):
        averaged.require_finite()


def test_without_a_group_state_and_values_stay() -> None:
    module = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(module.parameters())
    weight = module.weight.detach().clone()
    distributed.broadcast_state(module, optimizer, {"a": torch.ones(1)})
    assert torch.equal(module.weight, weight) and not optimizer.state
    value = {"anything": object()}
    assert distributed.broadcast_value(value) is value
    distributed.barrier()
    distributed.cleanup()


def test_without_a_group_statistics_are_ones_own() -> None:
    assert distributed.reduce_metrics({"a": (3.0, 2), "b": torch.tensor(0.1, dtype=torch.float64)}) == {
        "a": 1.5,
        "b": 0.1,
    }
    samples = torch.rand(5, 3, dtype=torch.float64)
    own = distributed.moments_of(samples)
    merged = distributed.merge_moments(own)
    assert merged.count == 5 and torch.equal(merged.mean, own.mean) and torch.equal(merged.m2, own.m2)
    both = distributed.merge_moments(distributed.moments_of(samples[:0]), own)
    assert both.count == 5 and torch.equal(both.mean, own.mean)
    assert distributed.gather_text("ä") == ["ä"]
    assert distributed.any_rank(True) and not distributed.any_rank(False)


def test_moments_by_hand() -> None:
    moments = distributed.moments_of(torch.tensor([[1.0, 10.0], [3.0, 10.0]]))
    assert (moments.count.item(), moments.mean.tolist(), moments.m2.tolist()) == (2.0, [2.0, 10.0], [2.0, 0.0])
    assert moments.std().tolist() == [1.0, 0.0]
    # 1, 3 and 8: mean 4, squared deviations 9 + 1 + 16
    merged = distributed.merge_moments(distributed.moments_of(torch.tensor([[8.0, 10.0]])), moments)
    assert (merged.count.item(), merged.mean.tolist(), merged.m2.tolist()) == (3.0, [4.0, 10.0], [26.0, 0.0])
    assert distributed.moments_of(torch.zeros(0, 2)).std().tolist() == [0.0, 0.0]


def test_moments_of_samples_of_any_shape() -> None:
    scalars = distributed.moments_of(torch.tensor([1.0, 3.0]))
    assert (scalars.count.item(), scalars.mean.item(), scalars.m2.item()) == (2.0, 2.0, 2.0)
    images = torch.tensor([[[1.0, 2.0, 3.0]], [[3.0, 2.0, 7.0]]])
    moments = distributed.merge_moments(distributed.moments_of(images))
    assert moments.mean.tolist() == [[2.0, 2.0, 5.0]] and moments.m2.tolist() == [[2.0, 0.0, 8.0]]
    assert distributed.moments_of(torch.zeros(0, 2, 3)).mean.shape == (2, 3)


def test_the_mean_of_no_samples_has_no_say() -> None:
    nothing = distributed.Moments(torch.tensor(0.0), torch.tensor([math.nan]), torch.tensor([math.nan]))
    merged = distributed.merge_moments(nothing, distributed.moments_of(torch.tensor([[1.0], [3.0]])))
    assert (merged.count.item(), merged.mean.tolist(), merged.m2.tolist()) == (2.0, [2.0], [2.0])


class Twin(SoloComm):
    """Two ranks that do the same."""

    world_size = 2

    def gather(self, tensor: torch.Tensor, tag: str) -> torch.Tensor:
        return tensor.expand(2, *tensor.shape)


def test_averages_and_moments_do_not_wait_for_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(name: str) -> Callable[..., object]:
        def fail(*arguments: object, **options: object) -> object:
            raise AssertionError(f"{name} waits for the device")

        return fail

    comm, module = Twin(), nn.Linear(2, 1)
    module(torch.ones(4, 2)).mean().backward()
    distributed.average_gradients(module, 4, comm=comm)  # the first compares the parameters
    count = torch.tensor(4)
    with monkeypatch.context() as patch:
        for name in ("item", "tolist", "cpu", "numpy", "new_tensor", "__bool__", "__int__", "__float__"):
            patch.setattr(torch.Tensor, name, forbidden(name))
        for name in ("tensor", "as_tensor", "from_numpy"):  # each copies the host's memory to the device
            patch.setattr(torch, name, forbidden(name))
        distributed.average_gradients(module, 4, comm=comm)
        distributed.average_gradients(module, count, comm=comm)
        distributed.merge_moments(distributed.moments_of(torch.ones(3, 2)), comm=comm)


def test_ranks_that_have_not_joined_are_told_to(third_of_four: None) -> None:
    module = nn.Linear(2, 1)
    for call in (
        lambda: distributed.broadcast_state(module),
        lambda: distributed.average_gradients(module, 1),
        lambda: distributed.reduce_metrics({}),
    ):
        with pytest.raises(
            UsageError, match=r"WORLD_SIZE is 4 and the ranks have not joined; call lockstep.init\(\) first"
        ):
            call()
    distributed.barrier()  # this one waits for nobody then


def test_what_can_not_be_averaged_is_named() -> None:
    with pytest.raises(UsageError, match="given no parameter that needs a gradient"):
        distributed.average_gradients(nn.Linear(2, 1).requires_grad_(False), 1)
    embedding = nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(
        UsageError, match="the gradient of parameter weight is sparse; build its layer with sparse=False"
    ):
        distributed.average_gradients(embedding, 1)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (3, "can't send object 1, a int; it takes modules"),
        ({"count": 3}, r"object 1\['count'\] is no tensor that could be overwritten"),
        (nn.LazyLinear(2), "object 1.weight has no shape yet; run the module once"),
    ],
)
def test_what_can_not_be_sent_is_named(entry: object, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        distributed.broadcast_state(nn.Linear(2, 1), entry)  # type: ignore[arg-type]


# --- lockstep.init ---------------------------------------------------------------------------------------------------


def test_init_alone_twice() -> None:
    place = lockstep.init("cpu")
    assert (place.rank, place.local_rank, place.world_size, place.device) == (0, 0, 1, torch.device("cpu"))
    assert lockstep.init("cpu") == place


def numbers() -> list[float]:
    return [random.random(), numpy.random.rand(), torch.rand(()).item()]  # noqa: NPY002


def test_init_seeds_every_generator_if_asked_to() -> None:
    lockstep.init("cpu", seed=5)
    first = numbers()
    lockstep.init("cpu")
    assert numbers() != first
    lockstep.init("cpu", seed=5)
    assert numbers() == first


def test_no_two_ranks_and_seeds_share_their_numbers() -> None:
    drawn = []
    for seed, rank in [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]:
        seed_generators(seed, rank)
        drawn += numbers()
    assert len(set(drawn)) == len(drawn)


def test_init_refuses_what_is_not_there() -> None:
    with pytest.raises(UsageError, match="device 'gpu' is unknown; use auto, cpu, cuda"):
        lockstep.init("gpu")
