"""What a user hears of a disk that refuses."""

import pytest

from lockstep.core.errors import RunError
from lockstep.core.refusals import Refusals


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_refusal_is_said_once_and_so_is_its_end() -> None:
    clock, said = Clock(), list[str]()
    refusals = Refusals("continue", said.append, clock)

    def attempt(kind: str, error: RunError | None) -> None:
        def work() -> None:
            if error is not None:
                raise error

        refusals.attempt(kind, work, "the training goes on")

    for _ in range(1000):
        attempt("metrics", RunError("can't write a: full"))
        attempt("checkpoints", None)
        clock.now_s += 0.1
    attempt("checkpoints", RunError("can't write b: full"))
    attempt("metrics", None)
    attempt("metrics", None)
    assert said == [
        "lockstep: warning: can't write a: full; the training goes on",
        "lockstep: warning: can't write b: full; the training goes on",
        "lockstep: metrics can be written again",
    ]


def test_a_disk_that_cannot_make_up_its_mind_is_not_told_every_time() -> None:
    clock, said = Clock(), list[str]()
    refusals = Refusals("continue", said.append, clock)
    for number in range(36_000):  # ten hours
        clock.now_s += 1.0
        refusals.note("metrics", RunError("full") if number % 3 == 0 else None, "")
    assert 10 < len(said) < 100
    assert {said[0], said[1]} == {"lockstep: warning: full; ", "lockstep: metrics can be written again"}


def test_with_stop_the_refusal_is_raised() -> None:
    error, said = RunError("full"), list[str]()
    refusals = Refusals("stop", said.append)
    refusals.note("metrics", None, "")
    with pytest.raises(RunError) as caught:
        refusals.note("metrics", error, "")
    assert caught.value is error
    assert said == []
