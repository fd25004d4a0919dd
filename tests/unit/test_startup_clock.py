"""The clock of a start's phases, and the functions that it names."""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from lockstep.benchmark.startup.clock import PHASES, PhaseClock, Stats, most_expensive, name_of, time_engine


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets the time."""

    def set_time(now_s: float) -> None:
        monkeypatch.setattr(time, "monotonic", lambda: now_s)

    return set_time


def test_phases_follow_one_another_and_may_come_again(at: Callable[[float], None], tmp_path: Path) -> None:
    note = tmp_path / "phase"
    clock = PhaseClock("interpreter", 10.0, note)
    at(12.0)
    clock.enter("imports")
    assert note.read_text() == "imports"
    at(15.0)
    clock.enter("env_creation")
    at(16.0)
    with clock.within("imports"):
        at(20.0)
    assert note.read_text() == "env_creation"
    at(25.0)
    clock.stop()
    at(99.0)
    assert clock.seconds == {"interpreter": 2.0, "imports": 7.0, "env_creation": 6.0}
    assert clock.total_s == 15.0
    assert clock.functions() == []


def test_an_engine_is_timed_where_it_is_made(at: Callable[[float], None], monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("engine_of_test")

    def make(num_envs: int) -> int:
        at(7.0)
        return num_envs

    module.make = make  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "engine_of_test", module)
    at(1.0)
    clock = PhaseClock("env_creation", 0.0)
    time_engine(clock, "engine_of_test:make")
    at(2.0)
    assert module.make(5) == 5
    at(8.0)
    clock.stop()
    assert clock.seconds == {"env_creation": 3.0, "engine_start": 5.0, "imports": 0.0}


def test_functions_are_told_by_phase() -> None:
    clock = PhaseClock("learner", time.monotonic(), profiles=True)
    clock.stop()
    clock.enter("imports")
    busy_s(0.01)
    with clock.within("engine_start"):
        busy_s(0.02)
    clock.stop()
    found = [each for each in clock.functions() if each["function"].endswith("busy_s")]
    assert [each["phase"] for each in found] == ["imports", "engine_start"]  # in the order of a start
    assert all(0 < each["own_s"] <= each["total_s"] and each["calls"] == 1 for each in found)
    assert found[0]["total_s"] >= 0.01 and found[1]["total_s"] >= 0.02


def busy_s(duration_s: float) -> None:
    end_s = time.perf_counter() + duration_s
    while time.perf_counter() < end_s:
        pass


WHOLE, LOAD, OUTER, INNER, LEAF, TINY = (
    ("/a/m.py", 1, name) for name in ("whole", "load", "outer", "inner", "leaf", "tiny")
)
FROZEN = ("<frozen importlib._bootstrap>", 1, "_find_and_load")


def test_half_are_what_took_longest_and_half_what_did_so_by_itself() -> None:
    stats: Stats = {
        TINY: (1, 1, 0.09, 0.09, {}),  # less than a hundredth of the whole
        WHOLE: (1, 1, 0.1, 10.0, {}),
        OUTER: (1, 1, 0.0, 6.0, {WHOLE: (1, 1, 0.0, 6.0)}),  # passes all of it on
        INNER: (1, 2, 1.0, 5.9, {OUTER: (1, 1, 1.0, 5.9)}),
        LOAD: (1, 1, 3.0, 3.0, {WHOLE: (1, 1, 3.0, 3.0)}),
        LEAF: (5, 5, 3.5, 3.5, {INNER: (5, 5, 3.5, 3.5)}),
        FROZEN: (1, 1, 9.0, 9.0, {}),
    }
    found = most_expensive(stats, 4)
    assert [each["function"] for each in found] == [f"/a/m.py:1 {name}" for name in ("whole", "inner", "leaf", "load")]
    assert found[2] == {"function": "/a/m.py:1 leaf", "calls": 5, "own_s": 3.5, "total_s": 3.5}
    assert [each["function"].split()[1] for each in most_expensive(stats)] == [
        "whole",
        "outer",
        "inner",
        "leaf",
        "load",
    ]


def test_a_module_that_loads_an_expensive_one_is_not_taken_for_it() -> None:
    stats: Stats = {
        ("/a/loader.py", 1, "<module>"): (1, 1, 0.0, 2.02, {}),
        ("/a/big.py", 1, "<module>"): (1, 1, 1.0, 2.0, {}),
        ("/a/part.py", 1, "<module>"): (1, 1, 1.0, 1.0, {}),
    }
    assert [each["function"] for each in most_expensive(stats, 2)] == ["/a/big.py:1 <module>", "/a/part.py:1 <module>"]


def test_where_nothing_took_time_nothing_is_named() -> None:
    assert most_expensive({WHOLE: (1, 1, 0.0, 1e-5, {})}) == []


def test_functions_have_the_names_by_which_they_are_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", ["", "/a", "/a/site"])
    assert name_of(("/a/site/torch/nn.py", 7, "forward")) == "torch/nn.py:7 forward"
    assert name_of(("/b/own.py", 3, "train")) == "/b/own.py:3 train"
    assert name_of(("~", 0, "<built-in method marshal.loads>")) == "<built-in method marshal.loads>"


def test_every_phase_is_explained() -> None:
    assert all(words and not words.endswith(".") for words in PHASES.values())
    assert list(PHASES)[-1] == "total"
