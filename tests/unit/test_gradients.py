"""The flat gradient buffer: views, means over samples, riders, flags and clipping."""

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.core.types import FlatGradients
from lockstep.distributed.torch_comm import GroupComm, SoloComm
from lockstep.learn.torch.gradients import GradientBuffer
from tests.unit.learner_fixtures import (
    Meeting,
    ThreadCollectives,
    make_training,
    on_every_rank,
    small_config,
    thread_comm,
)


def buffer_over(*sizes: int, world_size: int = 1) -> tuple[GradientBuffer, list[nn.Parameter]]:
    parameters = [nn.Parameter(torch.zeros(size, dtype=torch.float64)) for size in sizes]
    named = {f"parameter{index}": parameter for index, parameter in enumerate(parameters)}
    return GradientBuffer(named, ("loss", "kl"), world_size), parameters


def scalars(*values: float) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor(value, dtype=torch.float64) for value in values)


def are_views(buffer: GradientBuffer) -> bool:
    """Whether the gradients lie one behind the other at the start of the buffer."""
    place = buffer.flat.data_ptr()
    for parameter in buffer.parameters.values():
        if parameter.grad is None or parameter.grad.data_ptr() != place:
            return False
        place += parameter.grad.nbytes
    return True


def test_means_by_hand() -> None:
    buffer, (parameter,) = buffer_over(2)
    for factor, num_samples in ((1.0, 3), (2.0, 1)):
        (parameter * torch.tensor([factor, -factor], dtype=torch.float64)).sum().backward()
        buffer.ride_(scalars(10.0 * factor, 2.0), num_samples)
    SoloComm().mean_gradients_(buffer)
    # Sums (3, -3), 30 and 4 over 4 samples.
    assert buffer.gradients.tolist() == [0.75, -0.75]
    assert buffer.means.tolist() == [7.5, 1.0]
    assert buffer.flags.tolist() == [0.0]


def test_without_a_sample_everything_stays_zero() -> None:
    buffer, _ = buffer_over(2)
    SoloComm().mean_gradients_(buffer)
    assert buffer.flat.tolist() == [0.0] * 6


def test_gradients_are_views_and_an_unused_parameter_has_zeros() -> None:
    buffer, (used, unused) = buffer_over(3, 2)
    buffer.flat.fill_(9.0)
    buffer.zero_()
    used.sum().backward()
    assert are_views(buffer)
    assert used.grad is not None
    assert unused.grad is not None
    assert used.grad.tolist() == [1.0] * 3
    assert unused.grad.tolist() == [0.0] * 2
    buffer.zero_()
    assert used.grad.tolist() == [0.0] * 3


@pytest.mark.parametrize("kind", ["none", "gru", "lstm"])
def test_gradients_stay_views_through_updates(kind: str) -> None:
    training = make_training(small_config(agent={"recurrent": kind}))
    for _ in range(2):
        training.iterate()
        assert are_views(training.learner.gradients)
    assert training.learner.gradients.gradients.abs().max() > 0
    trained = [parameter for group in training.learner.optimizer.param_groups for parameter in group["params"]]
    own = list(training.learner.gradients.parameters.values())
    assert [id(parameter) for parameter in trained] == [id(parameter) for parameter in own]
    assert len(own) == len(list(training.policy.parameters()))


def test_chunks_of_unequal_size_give_the_gradient_of_the_whole() -> None:
    generator = torch.Generator().manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    samples = torch.randn((11, 3), generator=generator, dtype=torch.float64)
    parameters = dict(network.named_parameters())
    whole = torch.autograd.grad(network(samples).square().mean(), list(parameters.values()))
    buffer = GradientBuffer(parameters, ("loss",), 1)
    for chunk in samples.split([3, 7, 1]):
        loss = network(chunk).square().sum()
        loss.backward()
        buffer.ride_((loss.detach(),), chunk.shape[0])
    SoloComm().mean_gradients_(buffer)
    expected = torch.cat([gradient.flatten() for gradient in whole])
    torch.testing.assert_close(buffer.gradients, expected, rtol=1e-12, atol=1e-12)
    assert buffer.means.item() == pytest.approx(network(samples).square().mean().item(), rel=1e-12)


def test_ranks_count_by_their_samples() -> None:
    # 1 sample with gradient 8 here, 3 samples with gradients of 0 there: the mean is 2, not (8 + 0) / 2.
    meeting = Meeting(2)

    def work(rank: int) -> GradientBuffer:
        buffer, (parameter,) = buffer_over(1, world_size=2)
        (parameter * (8.0, 0.0)[rank]).sum().backward()
        buffer.ride_(scalars((4.0, 0.0)[rank], 1.0), (1, 3)[rank])
        thread_comm(rank, meeting).mean_gradients_(buffer)
        return buffer

    for buffer in on_every_rank(meeting, work):
        assert buffer.gradients.tolist() == [2.0]
        assert buffer.means.tolist() == [1.0, 0.5]


@pytest.mark.parametrize("values", [(math.nan, 1.0), (math.inf, 1.0), (math.inf, -math.inf), (-math.inf, 0.0)])
@pytest.mark.parametrize("where", ["gradient", "rider"])
def test_what_is_not_finite_raises_the_flag_of_its_rank(values: tuple[float, float], where: str) -> None:
    buffer, (parameter,) = buffer_over(2, world_size=3)
    assert parameter.grad is not None
    if where == "gradient":
        parameter.grad.copy_(torch.tensor(values))
    buffer.ride_(scalars(*(values if where == "rider" else (0.0, 0.0))), 1)
    buffer.flag_nonfinite_(1, buffer.parts[0])
    assert buffer.flags.tolist() == [0.0, 1.0, 0.0]
    buffer.zero_()
    buffer.ride_(scalars(1e300, -5.0), 1)
    buffer.flag_nonfinite_(1, buffer.parts[0])
    assert buffer.flags.tolist() == [0.0, 0.0, 0.0]


def test_clipping_by_hand() -> None:
    buffer, (one, two) = buffer_over(1, 1)
    assert one.grad is not None
    assert two.grad is not None
    one.grad.fill_(3.0)
    two.grad.fill_(-4.0)
    buffer.ride_(scalars(100.0, 100.0), 1)
    # The norm is 5; riders don't count and are not scaled.
    assert buffer.clip_(10.0).item() == 5.0
    assert buffer.gradients.tolist() == [3.0, -4.0]
    assert buffer.clip_(1.0).item() == 5.0
    assert buffer.gradients.tolist() == pytest.approx([0.6, -0.8], rel=1e-6)
    assert buffer.means.tolist() == [100.0, 100.0]


def test_clipping_comes_after_the_mean() -> None:
    # Gradients (30, 3) and (-30, 3) of one sample each: their mean (0, 3) is within the bound of 4, though each alone
    # is far beyond it, and so is the sum (0, 6).
    buffer, (parameter,) = buffer_over(2)
    for direction in (1.0, -1.0):
        (parameter * torch.tensor([30.0 * direction, 3.0])).sum().backward()
        buffer.ride_(scalars(0.0, 0.0), 1)
    SoloComm().mean_gradients_(buffer)
    assert buffer.clip_(4.0).item() == 3.0
    assert buffer.gradients.tolist() == [0.0, 3.0]


@pytest.mark.parametrize("mixed", [torch.float32, torch.bfloat16])
def test_one_buffer_has_one_dtype(mixed: torch.dtype) -> None:
    parameters: dict[str, Any] = {
        "first": nn.Parameter(torch.zeros(1, dtype=torch.float64)),
        "odd": nn.Parameter(torch.zeros(1, dtype=mixed)),
    }
    with pytest.raises(ValueError, match=r"odd is torch.*float64"):
        GradientBuffer(parameters, (), 1)


# --- parts ---------------------------------------------------------------------------------------------------------


def network_and_buffer(part_bytes: int, world_size: int) -> tuple[nn.Sequential, GradientBuffer]:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    return network, GradientBuffer(dict(network.named_parameters()), ("loss",), world_size, part_bytes)


def test_a_small_buffer_travels_in_one_piece() -> None:
    _, buffer = network_and_buffer(2**20, 1)
    assert buffer.parts == [slice(0, 121 + 1 + 1 + 1)]


def test_parts_cover_the_buffer_and_end_with_what_rides_along() -> None:
    # From the end: 1, 8, 8, 64, 8 and 32 gradients of 8 bytes; a part ends where it reaches 512 bytes.
    _, buffer = network_and_buffer(512, 1)
    assert buffer.parts == [slice(40, 121), slice(0, 40), slice(121, 124)]


class Recording(GroupComm):
    """Notes which parts have left when the backward pass is over."""

    sent_in_backward: list[int]

    @contextmanager
    def last_backward(self, gradients: FlatGradients) -> Iterator[None]:
        with super().last_backward(gradients):
            yield
        self.sent_in_backward.append(len(self._sent))


@pytest.mark.parametrize("part_bytes", [1, 64, 512, 2**20])
@pytest.mark.parametrize("unused", [False, True])
def test_parts_sent_during_the_backward_pass_change_no_bit(part_bytes: int, unused: bool) -> None:
    samples = torch.randn((12, 4), generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def reduced(part_bytes: int) -> list[tuple[torch.Tensor, list[int]]]:
        meeting = Meeting(2)

        def work(rank: int) -> tuple[torch.Tensor, list[int]]:
            network, buffer = made[rank]
            comm = Recording(ThreadCollectives(rank, meeting))
            comm.sent_in_backward = []
            for _ in range(2):  # the second minibatch finds everything as the first did
                buffer.zero_()
                chunks = samples[8 * rank : 8 + 8 * rank].split(4)
                for number, chunk in enumerate(chunks):
                    # On rank 1 the last layer takes no part.
                    output = network[:3](chunk) if unused and rank == 1 else network(chunk)
                    loss = output.square().sum()
                    with comm.last_backward(buffer) if number == len(chunks) - 1 else nullcontext():
                        loss.backward()
                    buffer.ride_((loss.detach(),), chunk.shape[0])
                comm.mean_gradients_(buffer)
            return buffer.flat.clone(), comm.sent_in_backward

        made = [network_and_buffer(part_bytes, 2) for _ in range(2)]
        return on_every_rank(meeting, work)

    whole, parts = reduced(2**20), reduced(part_bytes)
    for (expected, _), (flat, _) in zip(whole, parts, strict=True):
        assert torch.equal(flat, expected)
    num_parts = len(network_and_buffer(part_bytes, 2)[1].parts)
    in_backward = 0 if num_parts == 1 else num_parts - 1
    assert parts[0][1] == [in_backward] * 2
    # What was left out comes to its turn after the backward pass, and all behind it.
    assert parts[1][1] == [0 if unused else in_backward] * 2


def test_a_part_that_is_not_finite_raises_its_ranks_flag() -> None:
    network, buffer = network_and_buffer(64, 3)
    comm = SoloComm()
    comm.rank = 2
    bias = network[0].bias
    assert isinstance(bias, nn.Parameter)
    assert bias.grad is not None
    bias.grad[3] = math.nan
    comm.mean_gradients_(buffer)
    assert buffer.flags.tolist() == [0.0, 0.0, 1.0]
