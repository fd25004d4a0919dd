"""Direct exchanges between threads that play ranks: what arrives, and what is said when it does not."""

import signal
import socket
import threading
import time
from typing import Any

import pytest
import torch

from lockstep.core.errors import RunError
from lockstep.distributed import torch_direct, torch_group
from lockstep.distributed.torch_collectives import _DirectSum
from lockstep.distributed.torch_direct import MAX_BYTES, DirectExchange
from tests.unit.direct_fixtures import connected, summed, together


def bits(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype, bytes]:
    return tensor.shape, tensor.dtype, tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


# Of each type: one value per rank, and what 2, 3 and 4 of them are together if they are added in the order of ranks.
VALUES: dict[torch.dtype, tuple[list[Any], list[Any]]] = {
    torch.float32: ([1e8, 1.0, -1e8, 3.0], [1e8, 0.0, 3.0]),
    torch.float64: ([1e16, 1.0, -1e16, 3.0], [1e16, 0.0, 3.0]),
    torch.bfloat16: ([256.0, 1.0, -256.0, 3.0], [256.0, 0.0, 3.0]),
    torch.int64: ([2**62, 5, -(2**62), 2], [2**62 + 5, 5, 7]),
    torch.uint8: ([1, 2, 3, 4], [3, 6, 10]),
    torch.bool: ([False, False, True, False], [False, True, True]),
}


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("dtype", VALUES, ids=str)
@pytest.mark.parametrize("shape", [(), (5,), (0, 4), (3, 2)], ids=str)
def test_sums_and_gathers_are_the_same_bits_on_all_ranks(
    num_ranks: int, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    values, sums = VALUES[dtype]

    def work(end: DirectExchange) -> tuple[torch.Tensor, torch.Tensor]:
        own = torch.full(shape, values[end.rank], dtype=dtype)
        gathered = torch.stack(end.start(own, "gather", "test").wait())
        return summed(end, own), gathered

    results = together(connected(num_ranks), work)
    assert len({(bits(total), bits(table)) for total, table in results}) == 1
    total, table = results[0]
    assert bits(total) == bits(torch.full(shape, sums[num_ranks - 2], dtype=dtype))
    for rank in range(num_ranks):
        assert bits(table[rank]) == bits(torch.full(shape, values[rank], dtype=dtype))


def test_tensors_that_are_no_plain_stretch_of_memory() -> None:
    def work(end: DirectExchange) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        strided = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]).T * (end.rank + 1)
        (_, of_rank_1) = end.start(strided, "gather", "strided").wait()
        parameter = torch.nn.Parameter(torch.tensor([1.0, 10.0]))
        summed(end, parameter)
        return of_rank_1, summed(end, strided), parameter.detach()

    for gathered, total, parameter in together(connected(2), work):
        assert gathered.tolist() == [[2.0, 8.0], [4.0, 10.0], [6.0, 12.0]]
        assert total.tolist() == [[3.0, 12.0], [6.0, 15.0], [9.0, 18.0]]
        assert parameter.tolist() == [2.0, 20.0]


def test_a_tensor_may_be_overwritten_as_soon_as_it_is_on_its_way() -> None:
    def work(end: DirectExchange) -> list[float]:
        tensor = torch.full((MAX_BYTES // 4,), float(end.rank + 1))
        exchanges = [end.start(tensor.mul_(10), "gather", f"turn {turn}") for turn in range(3)]
        tensor.zero_()
        return [float(row[-1]) for exchange in exchanges for row in exchange.wait()]

    assert together(connected(2), work) == [[10.0, 20.0, 100.0, 200.0, 1000.0, 2000.0]] * 2


@pytest.mark.parametrize("last_first", [False, True])
def test_more_under_way_than_the_sockets_hold(last_first: bool) -> None:
    # 3 x 60 x 160 kB: what does not fit waits at its sender, while others go on at their own pace.
    num_exchanges = 60

    def work(end: DirectExchange) -> list[float]:
        tensors = [torch.full((MAX_BYTES // 8,), float(end.rank + turn), dtype=torch.float64) for turn in range(60)]
        works = []
        for tensor in tensors:
            works.append(_DirectSum(end.start(tensor, "sum", "much"), tensor))
            if end.rank == 1:
                time.sleep(0.002)
        for one in reversed(works) if last_first else works:
            one.wait()
        return [float(tensor[-1]) for tensor in tensors]

    expected = [6.0 + 4 * turn for turn in range(num_exchanges)]
    assert together(connected(4), work) == [expected] * 4


def test_who_is_ahead_does_not_keep_who_waits_for_another_busy() -> None:
    ends = connected(3)
    large = torch.zeros(MAX_BYTES, dtype=torch.uint8)
    with pytest.MonkeyPatch.context() as patch:
        # Room for less than one message: rank 1 has begun two, and takes rank 0's only when it waits.
        for neighbour in ends[0]._neighbours:
            neighbour.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        polls = 0
        poll = torch_direct._wait_for

        def counted(*arguments: Any) -> None:
            nonlocal polls
            polls += threading.current_thread().name == "rank 0"
            poll(*arguments)

        patch.setattr(torch_direct, "_wait_for", counted)

        def early(end: DirectExchange) -> None:
            threading.current_thread().name = "rank 0"
            end.start(large, "gather", "one").wait()

        def ahead(end: DirectExchange) -> None:
            first, _ = end.start(large, "gather", "one"), end.start(torch.zeros(1), "gather", "two")
            time.sleep(0.5)
            first.wait()

        together(ends, early, ahead, lambda end: end.start(large, "gather", "one").wait())
    assert polls < 500  # a loop that never sleeps makes some ten thousand in that time


# --- ranks that have parted ------------------------------------------------------------------------------------------

HERE = ("sum", torch.zeros(8), "gradients")
OURS = "exchange 3, sum of (8,) float32 'gradients'"


@pytest.mark.parametrize(
    ("name", "tensor", "tag", "described"),
    [
        ("sum", torch.zeros(8), "moments", "sum of (8,) float32 'moments'"),
        ("gather", torch.zeros(8), "gradients", "gather of (8,) float32 'gradients'"),
        ("sum", torch.zeros(9), "gradients", "sum of (9,) float32 'gradients'"),
        ("sum", torch.zeros(0), "gradients", "sum of (0,) float32 'gradients'"),
        ("sum", torch.zeros(4, 2), "gradients", "sum of (4, 2) float32 'gradients'"),
        ("sum", torch.zeros(8, dtype=torch.int32), "gradients", "sum of (8,) int32 'gradients'"),
        ("sum", torch.zeros(4, dtype=torch.float64), "gradients", "sum of (4,) float64 'gradients'"),
    ],
    ids=["tag", "operation", "more", "nothing", "shape", "type", "wider type"],
)
def test_ranks_that_have_parted_say_where(name: str, tensor: torch.Tensor, tag: str, described: str) -> None:
    def follow(end: DirectExchange, last: tuple[str, torch.Tensor, str]) -> None:
        for operation, content, each in (HERE, HERE, last, HERE):
            end.start(content, operation, each).wait()

    here, there = together(connected(2), lambda end: follow(end, HERE), lambda end: follow(end, (name, tensor, tag)))
    theirs = f"exchange 3, {described}"
    assert str(here).startswith(f"the ranks have parted: rank 0 is at {OURS}, rank 1 at {theirs}; ")
    assert str(there).startswith(f"the ranks have parted: rank 1 is at {theirs}, rank 0 at {OURS}; ")
    assert "LOCKSTEP_DEBUG_COLLECTIVES=1" in str(here)
    assert "\n" not in str(here)


def test_a_rank_that_is_one_ahead_gives_no_wrong_sum() -> None:
    ends = connected(2)
    ahead = ends[1].start(torch.ones(2), "sum", "left out by rank 0")
    results = together(ends, lambda end: summed(end, torch.ones(2), "second"), lambda end: ahead.wait())
    assert all("parted" in str(result) for result in results)
    # What was broken stays so, even if somebody goes on: the bytes that follow would belong to nothing.
    for end in ends:
        with pytest.raises(RunError, match=r"the ranks have parted: rank [01] is at exchange 1, "):
            summed(end, torch.ones(2), "third")
    with pytest.raises(RunError, match="the ranks have parted"):
        ahead.wait()


def test_tags_that_differ_only_after_the_part_that_is_shown() -> None:
    long = "x" * 300
    results = together(
        connected(2),
        lambda end: summed(end, torch.ones(2), f"{long}a"),
        lambda end: summed(end, torch.ones(2), f"{long}b"),
    )
    assert all(str(result).startswith("the ranks have parted") for result in results)


def test_what_a_rank_was_at_is_told_even_if_it_has_ended_since() -> None:
    ends = connected(2)
    ends[1].start(torch.ones(2), "sum", "other")
    ends[1].close()
    (said,) = together(ends[:1], lambda end: summed(end, torch.zeros(MAX_BYTES, dtype=torch.uint8), "large"))
    assert "rank 1 at exchange 1, sum of (2,) float32 'other'" in str(said)


# --- ranks that are gone, or late ------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_bytes", [0, 5, 128, 1000])
def test_a_rank_that_ends_in_the_middle_of_a_message_is_named(num_bytes: int) -> None:
    own, other = socket.socketpair()
    idle, _idle_end = socket.socketpair()
    (whole,) = (connected(2)[0].start(torch.zeros(1000), "gather", "news")._table,)
    other.send(whole[0].numpy().tobytes()[:num_bytes])
    other.close()
    end = DirectExchange(0, {1: idle, 2: own}, 30.0)
    began = time.monotonic()
    with pytest.raises(RunError, match=r"^lost another rank in the exchange of news: rank 2 has ended; see what it"):
        end.start(torch.zeros(1000), "gather", "news").wait()
    assert time.monotonic() - began < 10


def test_ranks_that_do_not_answer_are_named_and_a_late_one_learns_that_the_others_have_gone() -> None:
    ends = connected(4, timeout_s=0.3)
    arrived = ends[2].start(torch.ones(1), "gather", "news")
    with pytest.raises(
        RunError, match=r"^no answer within 0\.3 s in the exchange of news from ranks 1 and 3; .*LOCKSTEP_TIMEOUT_S"
    ):
        ends[0].start(torch.ones(1), "gather", "news").wait()
    for end in (ends[0], ends[2]):
        end.close()
    with pytest.raises(RunError, match=r"^lost another rank in the exchange of news: rank [02] has ended"):
        ends[1].start(torch.ones(1), "gather", "news").wait()
    with pytest.raises(RunError):
        arrived.wait()


def test_a_time_out_of_months_is_one() -> None:
    def late(end: DirectExchange) -> torch.Tensor:
        time.sleep(0.2)
        return summed(end, torch.ones(1))

    ends = connected(2, timeout_s=9e6)
    assert together(ends, lambda end: summed(end, torch.ones(1)), late) == [torch.tensor([2.0])] * 2


def test_the_time_in_exchanges_is_taken_once() -> None:
    def late(end: DirectExchange) -> torch.Tensor:
        time.sleep(0.5)
        return summed(end, torch.ones(1))

    ends = connected(2)
    together(ends, lambda end: summed(end, torch.ones(1)), late)
    assert [[(wait.seconds > 0.3, wait.num_bytes) for wait in end.take_waits()] for end in ends] == [
        [(True, 4)],
        [(False, 4)],
    ]
    assert [end.take_waits() for end in ends] == [[], []]


def test_signals_disturb_no_exchange() -> None:
    ends = connected(2)
    heard = 0

    def hear(*_: object) -> None:
        nonlocal heard
        heard += 1

    def disturb(end: DirectExchange) -> float:
        for _ in range(20):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
            time.sleep(0.01)
        return float(summed(end, torch.full((MAX_BYTES // 8,), 2.0))[-1])

    before = signal.signal(signal.SIGUSR1, hear)
    found: list[float] = []
    thread = threading.Thread(target=lambda: found.append(disturb(ends[1])), daemon=True)
    try:
        thread.start()
        assert float(summed(ends[0], torch.full((MAX_BYTES // 8,), 1.0))[-1]) == 3.0
        thread.join(30)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert found == [3.0]
    assert heard > 1


def test_leaving_the_group_closes_the_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = connected(2)
    monkeypatch.setattr(torch_group, "_direct", ends[0])
    torch_group.cleanup()
    assert torch_group._direct is None
    with pytest.raises(RunError, match="rank 0 has ended"):
        summed(ends[1], torch.ones(1))


def test_only_what_is_small_and_on_the_cpu_goes_this_way() -> None:
    (end, _) = connected(2)
    assert end.fits(torch.zeros(MAX_BYTES, dtype=torch.uint8))
    assert not end.fits(torch.zeros(MAX_BYTES + 1, dtype=torch.uint8))
    assert not end.fits(torch.zeros(1, device="meta"))
