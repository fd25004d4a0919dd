"""A group of one rank over nccl: what several GPUs exchange goes the same way, and must change nothing."""

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lockstep.core.config import merge
from lockstep.core.errors import UsageError
from lockstep.core.types import Comm, FlatGradients
from lockstep.distributed.torch_collectives import Collectives
from lockstep.distributed.torch_comm import GroupComm, SoloComm
from lockstep.learn.torch import ppo
from lockstep.learn.torch.gradients import GradientBuffer
from lockstep.learn.torch.training import Training
from lockstep.recipes.cartpole import cartpole_classic
from lockstep.session.make_env import build_env
from tests.gpu.test_gpu_path import no_waiting
from tests.multiproc import jobs_comm
from tests.unit.learner_fixtures import differences

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU that torch can use"),
]

GPU = "cuda"
DEVICES = ["cpu", GPU]


class Recording(GroupComm):
    """Notes how many parts of the buffer have left when a backward pass is over."""

    def __init__(self, collectives: Collectives) -> None:
        super().__init__(collectives)
        self.sent_in_backward: list[int] = []

    @contextmanager
    def last_backward(self, gradients: FlatGradients) -> Iterator[None]:
        with super().last_backward(gradients):
            yield
        self.sent_in_backward.append(len(self._sent))


@pytest.fixture(scope="module")
def collectives() -> Iterator[Collectives]:
    device = torch.device(GPU, 0)
    torch.cuda.set_device(device)
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)  # type: ignore[attr-defined]  # on whatever port is free
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, timeout=timedelta(seconds=60), device_id=device)
    yield Collectives(device)
    dist.destroy_process_group()


@pytest.fixture
def comm(collectives: Collectives) -> Recording:
    made = Recording(collectives)
    made.take_waits()
    return made


def make_training(comm: Comm, **agent: Any) -> Training:
    settings = {"num_steps_per_env": 16, "num_learning_epochs": 2, "num_mini_batches": 2, **agent}
    config = merge(cartpole_classic(), {"num_envs": 64, "device": GPU, "agent": settings})
    return Training(config, build_env(config), comm)


def untimed(metrics: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in metrics.items() if not name.startswith(("time/", "steps_per_s"))}


def trained(comm: Comm, **agent: Any) -> dict[str, Any]:
    """Return all that a short training has made, on the host."""
    training = make_training(comm, **agent)
    curve = [untimed(training.iterate()) for _ in range(3)]
    state = {name: tensor.cpu() for name, tensor in training.replicated_state().items()}
    training.env.close()
    return {"curve": curve, "state": state}


# --- training ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["adaptive", "fixed"])
def test_a_group_of_one_trains_as_no_group_does_bit_for_bit(comm: Recording, schedule: str) -> None:
    expected = trained(SoloComm(), schedule=schedule)
    assert differences(trained(SoloComm(), schedule=schedule), expected) == []  # or nothing could be compared
    assert differences(trained(comm, schedule=schedule), expected) == []


def test_parts_sent_during_the_backward_pass_change_no_bit(comm: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = trained(comm)
    assert set(comm.sent_in_backward) == {0}  # such a small buffer travels in one piece, after the pass
    comm.sent_in_backward.clear()
    monkeypatch.setattr(ppo, "GradientBuffer", functools.partial(GradientBuffer, part_bytes=4096))
    in_parts = trained(comm)
    num_parts = len(make_training(comm).learner.gradients.parts)
    assert num_parts > 2
    assert set(comm.sent_in_backward) == {num_parts - 1}  # all but the last, with what rides along
    assert differences(in_parts, expected) == []


@pytest.mark.parametrize("part_bytes", [4096, 2**30])
def test_the_host_waits_for_no_minibatch(comm: Recording, monkeypatch: pytest.MonkeyPatch, part_bytes: int) -> None:
    monkeypatch.setattr(ppo, "GradientBuffer", functools.partial(GradientBuffer, part_bytes=part_bytes))
    training = make_training(comm)
    for _ in range(2):
        training.iterate()
    memory, learner = training.memory, training.learner
    samples = learner.prepare(training.rollout, training.env.observations["critic"], memory)
    with no_waiting():
        learner.update(samples, memory, training.iteration)
        learner.merge_normalizers(samples)
    torch.cuda.synchronize()


def test_waiting_is_a_number_of_seconds_and_asked_for_once(comm: Recording) -> None:
    training = make_training(comm)
    metrics = training.iterate()
    for name in ("time/wait_min", "time/wait_mean", "time/wait_max"):
        value = metrics[name]
        assert value is not None and 0.0 <= value < 60.0
    comm.gather(torch.zeros(1, device=GPU), "test")
    waited_s = sum(wait.seconds for wait in comm.take_waits())
    assert math.isfinite(waited_s) and waited_s >= 0.0
    assert comm.take_waits() == []


# --- exchanges -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_a_broadcast_leaves_rank_0s_bits_as_they_are(comm: Recording, device: str) -> None:
    tensors = {name: tensor.detach().to(device) for name, tensor in jobs_comm.tensors_of(0).items()}
    before = {name: (jobs_comm.bits(tensor), tensor.data_ptr(), tensor.stride()) for name, tensor in tensors.items()}
    comm.broadcast_(tensors, "test")
    after = {name: (jobs_comm.bits(tensor), tensor.data_ptr(), tensor.stride()) for name, tensor in tensors.items()}
    assert after == before


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8])
def test_a_tensor_is_gathered_where_it_was(comm: Recording, device: str, dtype: torch.dtype) -> None:
    own = torch.arange(6, device=device).reshape(2, 3).T.to(dtype)
    gathered = comm.gather(own, "test")
    assert gathered.device.type == device
    assert differences(gathered.cpu(), own.cpu().unsqueeze(0)) == []


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_rows", [0, 3])
@pytest.mark.parametrize(("dtype", "width"), [(torch.float64, (2,)), (torch.bool, ()), (torch.int16, (1, 3))])
def test_rows_are_gathered_where_they_were(
    comm: Recording, device: str, num_rows: int, dtype: torch.dtype, width: tuple[int, ...]
) -> None:
    rows = torch.ones((num_rows, *width), device=device).cumsum(0).to(dtype)
    gathered = comm.gather_rows(rows, "test")
    assert gathered.device.type == device
    assert differences(gathered.cpu(), rows.cpu()) == []


@pytest.mark.parametrize("text", ["", "für alle", "x" * 5000, "\0\n"])
def test_texts_of_any_length(comm: Recording, text: str) -> None:
    assert comm.gather_text(text, "test") == [text]


def test_what_rank_0_does_for_all(comm: Recording) -> None:
    assert comm.on_main(lambda: "fine, größer", "test") == "fine, größer"
    with pytest.raises(UsageError, match="no such thing") as caught:
        comm.on_main(failing(UsageError("no such thing")), "test")
    assert caught.value.shared
    with pytest.raises(ZeroDivisionError):
        comm.on_main(failing(ZeroDivisionError("oh")), "test")


def failing(error: Exception) -> Callable[[], str]:
    def work() -> str:
        raise error

    return work
