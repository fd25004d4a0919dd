"""The time that a GPU's stream stood in exchanges, measured by events that a fake keeps."""

import itertools
from collections.abc import Iterator

import pytest
import torch

from lockstep.distributed import torch_collectives
from lockstep.distributed.torch_collectives import _WaitOnDevice


class FakeEvent:
    """An event that comes 1 ms after the one before, whichever it is of."""

    clock: Iterator[int]
    num_waited = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at_ms = next(FakeEvent.clock)

    def synchronize(self) -> None:
        FakeEvent.num_waited += 1

    def elapsed_time(self, end: "FakeEvent") -> float:
        return float(end.at_ms - self.at_ms)


class FakeWork(torch.distributed.Work):
    """An operation that is over at once."""

    def wait(self, *arguments: object) -> bool:
        return True


@pytest.fixture(autouse=True)
def _fake_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeEvent, "clock", itertools.count(), raising=False)
    monkeypatch.setattr(FakeEvent, "num_waited", 0)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)


def test_the_time_in_operations_is_taken_once() -> None:
    wait = _WaitOnDevice()
    for _ in range(3):
        wait.wait_for(FakeWork(), "gradients", 40)
    assert FakeEvent.num_waited == 0
    assert wait.take() == [("gradients", 1e-3, 40)] * 3
    assert FakeEvent.num_waited == 1
    assert wait.take() == []


def test_a_script_that_never_asks_does_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_collectives, "MAX_WAITS", 5)
    wait = _WaitOnDevice()
    for _ in range(1000):
        wait.wait_for(FakeWork(), "gradients", 40)
    assert len(wait._pairs) == 5
    assert len(wait.take()) == 5
