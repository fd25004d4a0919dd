"""Checksums over raw bits, and what the sentinel says of ranks that differ (as threads of this process)."""

import re
from collections.abc import Callable

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from lockstep.core.errors import RunError
from lockstep.distributed.torch_comm import SoloComm
from lockstep.distributed.torch_sentinel import Sentinel, checksums
from lockstep.distributed.wording import name_ranks

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.complex128,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.bool,
]  # fmt: skip


def checksum(tensor: torch.Tensor) -> int:
    (total,) = checksums({"tensor": tensor}).tolist()
    return int(total)


def random_bytes(num_bytes: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    limit = 2 if dtype == torch.bool else 256
    return torch.randint(limit, (num_bytes,), generator=generator, dtype=torch.uint8).view(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_single_bit_counts(dtype: torch.dtype) -> None:
    tensor = random_bytes(48, dtype)
    seen = {checksum(tensor)}
    for index in range(48):
        for bit in range(1 if dtype == torch.bool else 8):
            changed = tensor.clone()
            changed.view(torch.uint8)[index] ^= 1 << bit
            seen.add(checksum(changed))
    assert len(seen) == 1 + 48 * (1 if dtype == torch.bool else 8)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int8], ids=str)
def test_changes_do_not_cancel(dtype: torch.dtype) -> None:
    tensor = torch.arange(1, 9).to(dtype)
    sums = [checksum(tensor)]
    for first in range(8):
        for second in range(first):
            swapped, flipped, shifted = tensor.clone(), tensor.clone(), tensor.clone()
            swapped[[first, second]] = tensor[[second, first]]
            flipped[[first, second]] *= -1  # the highest bit of both, for floats
            shifted[first] += 1
            shifted[second] -= 1
            sums += [checksum(swapped), checksum(flipped), checksum(shifted)]
    assert len(set(sums)) == 1 + 28 * 3


def test_all_signs_flipped_are_seen() -> None:
    for dtype in (torch.float64, torch.float32):
        for size in (2, 64, 1024):
            tensor = torch.linspace(1, 2, size, dtype=dtype)
            assert checksum(tensor) != checksum(-tensor)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_equal_numbers_of_other_bits_differ_and_equal_nans_do_not(dtype: torch.dtype) -> None:
    zero = torch.zeros(3, dtype=dtype)
    assert checksum(zero) != checksum(-zero)
    words = {torch.float64: torch.int64, torch.float32: torch.int32}[dtype]
    nan = torch.full((3,), torch.nan, dtype=dtype)
    payload = (nan.view(words) | 5).view(dtype)
    assert payload.isnan().all()
    assert checksum(nan) != checksum(payload)
    assert checksum(nan) == checksum(nan.clone())


def test_memory_layout_does_not_count() -> None:
    image = torch.randn(2, 3, 4, 5)
    assert checksum(image) == checksum(image.to(memory_format=torch.channels_last))
    assert checksum(image.transpose(0, 3)) == checksum(image.transpose(0, 3).contiguous())
    assert checksum(image.transpose(0, 3)) != checksum(image)
    assert checksum(image[:, 1, ::2]) == checksum(image[:, 1, ::2].clone())
    assert checksum(torch.ones(1).expand(7)) == checksum(torch.ones(7))
    numbers = torch.tensor([1 + 2j, 3 - 4j])
    assert checksum(numbers.conj()) == checksum(torch.tensor([1 - 2j, 3 + 4j]))
    assert checksum(numbers.conj().imag) == checksum(torch.tensor([-2.0, 4.0]))


def test_sizes_from_nothing_to_more_than_one_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    assert checksums({}).tolist() == []
    assert checksum(torch.zeros(0)) == checksum(torch.zeros(3, 0, dtype=torch.int8)) == 0
    scalar = torch.tensor(2.5)
    assert checksum(scalar) == checksum(scalar.reshape(1))
    whole = {"a": torch.randn(1000), "b": torch.arange(77)}
    at_once = checksums(whole).tolist()
    monkeypatch.setattr("lockstep.distributed.torch_sentinel._CHUNK", 64)
    assert checksums(whole).tolist() == at_once
    assert checksum(torch.zeros(64)) != checksum(torch.zeros(65))


def test_zeros_give_the_published_numbers_of_splitmix64() -> None:
    # The first outputs of the generator for seed 0, of which the checksum of zeros is the sum.
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    for count in (1, 2, 3):
        assert checksum(torch.zeros(count)) % 2**64 == sum(published[:count]) % 2**64


def test_order_and_dtype_of_the_result() -> None:
    one, two = torch.randn(3), torch.arange(4)
    sums = checksums({"one": one, "two": two})
    assert sums.dtype == torch.int64
    assert sums.tolist() == [checksum(one), checksum(two)]


def test_gradients_and_inference_do_not_matter() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    with torch.inference_mode():
        within = checksum(parameter)
    assert within == checksum(parameter) == checksum(torch.ones(3))
    assert parameter.grad is None


@hypothesis.given(
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=2, max_size=6),
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=2, max_size=6),
)
def test_equal_exactly_for_equal_bits(one: list[int], other: list[int]) -> None:
    words = torch.tensor(one), torch.tensor(other[: len(one)] + one[len(other) :])
    assert (checksum(words[0]) == checksum(words[1])) == words[0].equal(words[1])


class RecordedComm(SoloComm):
    """A ``Comm`` that stands for the rank whose turn it is; what the others send was recorded in earlier turns."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.sent: list[list[torch.Tensor | str]] = [[] for _ in range(world_size)]
        self.position = 0

    def gather(self, tensor: torch.Tensor, tag: str) -> torch.Tensor:
        return torch.stack([each for each in self._exchange(tensor) if isinstance(each, torch.Tensor)])

    def gather_text(self, text: str, tag: str) -> list[str]:
        return [each for each in self._exchange(text) if isinstance(each, str)]

    def _exchange(self, own: torch.Tensor | str) -> list[torch.Tensor | str]:
        if len(self.sent[self.rank]) == self.position:
            self.sent[self.rank].append(own)
        if min(map(len, self.sent)) <= self.position:
            raise TurnIsOverError
        self.position += 1
        return [every[self.position - 1] for every in self.sent]


class TurnIsOverError(Exception):
    """The rank would now wait for others."""


Tensors = dict[str, torch.Tensor]


def check_on_all(every: list[Tensors], iterations: list[int] | None = None) -> tuple[list[str], int]:
    """Let every rank check its tensors; return what each raised, and the number of exchanges."""
    comm = RecordedComm(len(every))
    lines: dict[int, str] = {}
    for turn in range(100):
        rank = turn % len(every)
        comm.rank, comm.position = rank, 0
        try:
            Sentinel(comm, 1).check((iterations or [40] * len(every))[rank], every[rank])
        except TurnIsOverError:
            continue
        except RunError as error:
            assert error.shared
            lines[rank] = str(error)
        else:
            lines[rank] = ""
        if len(lines) == len(every):
            return [lines[rank] for rank in range(len(every))], len(comm.sent[0])
    raise AssertionError("the sentinel does not come to an end")


def replicated() -> Tensors:
    return {
        "policy.actor.mlp.0.weight": torch.ones(3, 2),
        "optimizer.exp_avg": torch.zeros(6, dtype=torch.float64),
        "counter": torch.tensor(3),
    }


def changed(*names: str) -> Tensors:
    tensors = replicated()
    for name in names:
        tensors[name].view(-1)[:1] += 1
    return tensors


def the_line(every: list[Tensors], iterations: list[int] | None = None) -> str:
    lines, _ = check_on_all(every, iterations)
    assert lines == [lines[0]] * len(every)
    assert "\n" not in lines[0]
    return lines[0]


def test_equal_ranks_need_one_exchange() -> None:
    assert check_on_all([replicated()] * 4) == ([""] * 4, 1)
    assert check_on_all([{}] * 2) == ([""] * 2, 1)


def test_the_line_in_full() -> None:
    assert the_line([replicated(), changed("policy.actor.mlp.0.weight"), replicated(), replicated()]) == (
        "ranks are out of step in iteration 40: policy.actor.mlp.0.weight differs on rank 1 (of 4), and no other "
        "tensor does; look for what changes it from one rank's own data, or run with LOCKSTEP_DEBUG_COLLECTIVES=1, "
        "which stops where ranks part"
    )


@pytest.mark.parametrize(
    ("every", "expected"),
    [
        ([[], ["counter"]], "counter differs on rank 1 (of 2), and no other tensor does"),
        ([["counter"], []], "counter differs on rank 1 (of 2), and no other tensor does"),
        ([["counter"], [], []], "counter differs on rank 0 (of 3), and no other tensor does"),
        ([[], ["counter"], [], ["counter"]], "counter differs on ranks 1 and 3 (of 4)"),
        ([[], ["counter", "optimizer.exp_avg"], []], "optimizer.exp_avg differs on rank 1 (of 3), and so does 1 other"),
        ([[], list(replicated()), []], "policy.actor.mlp.0.weight differs on rank 1 (of 3), and so do 2 other tensors"),
        ([["counter"], ["optimizer.exp_avg"], []], "optimizer.exp_avg differs on rank 1 (of 3), and so does 1 other"),
    ],
)
def test_the_first_tensor_and_the_minority_are_named(every: list[list[str]], expected: str) -> None:
    assert expected in the_line([changed(*names) for names in every])


def without(name: str) -> Tensors:
    return {key: tensor for key, tensor in replicated().items() if key != name}


@pytest.mark.parametrize(
    ("every", "expected"),
    [
        ([replicated(), without("counter")], "rank 1 has nothing where rank 0 has counter (int64 ())"),
        ([without("counter"), replicated(), replicated()], "rank 0 has nothing where rank 1 has counter (int64 ())"),
        ([replicated(), replicated() | {"z": torch.ones(1)}], "rank 1 has z (float32 (1,)) where rank 0 has nothing"),
        ([replicated(), {}], "rank 1 has nothing where rank 0 has policy.actor.mlp.0.weight (float32 (3, 2))"),
        (
            [replicated(), replicated() | {"counter": torch.ones(2)}],
            "rank 1 has counter (float32 (2,)) where rank 0 has counter (int64 ())",
        ),
        (
            [replicated(), dict(reversed(replicated().items()))],
            "rank 1 has counter (int64 ()) where rank 0 has policy.actor.mlp.0.weight (float32 (3, 2))",
        ),
    ],
)
def test_other_tensors_are_named_instead_of_compared(every: list[Tensors], expected: str) -> None:
    line = the_line(every)
    assert line.startswith(f"ranks are out of step in iteration 40: {expected}; ")


def test_ranks_in_other_iterations_are_named() -> None:
    line = the_line([replicated()] * 3, [40, 40, 60])
    assert line.startswith("ranks are out of step: rank 2 is in iteration 60, rank 0 in iteration 40; ")


def test_it_compares_only_when_due() -> None:
    class Counting(SoloComm):
        world_size = 2
        num_gathered = 0

        def gather(self, tensor: torch.Tensor, tag: str) -> torch.Tensor:
            self.num_gathered += 1
            return tensor.expand(2, *tensor.shape)

    def counts(interval: int) -> list[int]:
        comm = Counting()
        sentinel = Sentinel(comm, interval)
        made = []
        for iteration in range(1, 7):
            sentinel.check(iteration, replicated())
            made.append(comm.num_gathered)
        return made

    assert counts(3) == [0, 0, 1, 1, 1, 2]
    assert counts(0) == [0] * 6


def test_it_says_when_all_were_still_equal() -> None:
    class Twin(SoloComm):
        world_size = 2
        difference = 0

        def gather(self, tensor: torch.Tensor, tag: str) -> torch.Tensor:
            other = tensor.clone()
            other.view(-1)[-1] += self.difference
            return torch.stack((tensor, other))

    comm = Twin()
    sentinel = Sentinel(comm, 10)
    sentinel.check(10, replicated())
    sentinel.check(20, replicated())
    comm.difference = 1
    with pytest.raises(RunError, match=re.escape("no other tensor does (all were equal in iteration 20); look")):
        sentinel.check(30, replicated())


def test_one_process_has_nothing_to_compare() -> None:
    sentinel = Sentinel(SoloComm(), 1)
    assert not sentinel.is_due(1)
    sentinel.check(1, replicated())


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([1], "rank 1"),
        ([1, 2], "ranks 1 and 2"),
        ([3, 0, 5], "ranks 0, 3 and 5"),
        ([0, 1, 2], "ranks 0 to 2"),
        ([0, 1, 2, 3, 7, 9, 10], "ranks 0 to 3, 7, 9 and 10"),
    ],
)
def test_ranks_in_words(ranks: list[int], expected: str) -> None:
    assert name_ranks(ranks) == expected


def test_nothing_waits_for_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(name: str) -> Callable[..., object]:
        def fail(*arguments: object, **options: object) -> object:
            raise AssertionError(f"{name} waits for the device")

        return fail

    for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__"):
        monkeypatch.setattr(torch.Tensor, name, forbidden(name))
    checksums(replicated())
