"""Who is to blame: the rank that others wait for, and never one that waits, is looked at, or may be slow."""

import contextlib
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep.core import blame
from lockstep.core.beats import Beat
from lockstep.core.blame import HANG_TIMEOUT, Limits, ProcessState, Verdict, judge, process_state, where
from lockstep.core.errors import UsageError

NOW_S = 1000.0
LIMITS = Limits(20.0)
WAITS: dict[str, Any] = {"exchange": "gradients", "still": 500.0}


def beat(rank: int = 0, silent: float = 0.5, still: float = 0.5, **more: Any) -> Beat:
    """Return a beat that was given so many seconds ago."""
    fields: dict[str, Any] = {"iteration": 11, "num_exchanges": 40, "phase": "update", "exchange": ""} | more
    return Beat(rank, 0, 100 + rank, NOW_S - silent, NOW_S - still, **fields)


def blamed(
    *beats: Beat, num_ranks: int | None = None, limits: Limits = LIMITS, **states: ProcessState
) -> Verdict | None:
    """Return the verdict; ``states`` gives the state of processes as ``pid_101``, others run."""
    by_rank = {each.rank: each for each in beats}
    return judge(by_rank, NOW_S, limits, num_ranks, lambda pid: states.get(f"pid_{pid}", "running"))


def kind_and_rank(verdict: Verdict | None) -> tuple[str, int] | None:
    return None if verdict is None else (verdict.kind, verdict.rank)


def test_who_waits_is_healthy_however_long() -> None:
    assert blamed(beat(0, **WAITS), beat(1)) is None
    assert blamed(beat(0, **WAITS), beat(1, **WAITS)) is None  # the others may be on another host
    assert blamed(beat(0, **WAITS), beat(1, **WAITS), num_ranks=3) is None


@pytest.mark.parametrize(
    ("state", "kind"),
    [("stopped", "stopped"), ("running", "silent"), ("disk", "silent"), ("gone", None), ("traced", None)],
)
@pytest.mark.parametrize("exchange", ["", "gradients"])
def test_a_process_without_a_sign_of_life(state: ProcessState, kind: str | None, exchange: str) -> None:
    verdict = blamed(beat(0, **WAITS), beat(1, silent=10.5, still=10.5, exchange=exchange), pid_101=state)
    assert kind_and_rank(verdict) == (None if kind is None else (kind, 1))
    assert verdict is None or (verdict.pid, round(verdict.seconds, 1)) == (101, 10.5)
    assert blamed(beat(1, silent=9.5, still=9.5, exchange=exchange), pid_101=state) is None


def test_a_main_thread_that_does_not_move() -> None:
    assert kind_and_rank(blamed(beat(0, **WAITS), beat(1, still=20.5, phase="rollout"))) == ("stuck", 1)
    assert blamed(beat(0, **WAITS), beat(1, still=19.5, phase="rollout")) is None


def test_a_file_system_may_be_away_for_minutes() -> None:
    assert blamed(beat(0, **WAITS), beat(1, still=590.0, phase="rollout"), pid_101="disk") is None
    verdict = blamed(beat(0, **WAITS), beat(1, still=610.0, phase="rollout"), pid_101="disk")
    assert verdict is not None and kind_and_rank(verdict) == ("stuck", 1)
    assert verdict.in_words().endswith(", waiting for a disk or a driver")


@pytest.mark.parametrize("state", ["gone", "traced", "screen"])
def test_who_is_never_stuck(state: ProcessState) -> None:
    assert blamed(beat(0, **WAITS), beat(1, still=500.0), pid_101=state) is None


@pytest.mark.parametrize("phase", ["compile", "save"])
def test_a_main_thread_may_wait_for_one_that_compiles_or_saves(phase: str) -> None:
    slow, waiting = beat(0, still=30.0, phase=phase), beat(1, still=30.0)
    assert blamed(slow, waiting) is None
    assert kind_and_rank(blamed(beat(0, still=30.0, phase=phase, exchange="envs"), waiting)) == ("stuck", 1)
    assert kind_and_rank(blamed(slow, beat(1, still=601.0))) == ("stuck", 1)


def test_a_main_thread_may_wait_for_one_on_another_host_through_its_device() -> None:
    behind = beat(1, still=30.0, is_behind_others=True)
    assert blamed(beat(0), behind) is None
    assert blamed(beat(0), behind, num_ranks=3) is None
    assert kind_and_rank(blamed(beat(0), beat(1, still=30.0), num_ranks=3)) == ("stuck", 1)
    assert kind_and_rank(blamed(beat(0), behind, num_ranks=2)) == ("stuck", 1)  # nobody is elsewhere
    assert kind_and_rank(blamed(beat(0), beat(1, still=601.0, is_behind_others=True), num_ranks=3)) == ("stuck", 1)


@pytest.mark.parametrize("phase", ["compile", "save"])
def test_compilers_and_disks_may_take_thirty_times_as_long(phase: str) -> None:
    assert blamed(beat(1, silent=590.0, still=590.0, phase=phase)) is None
    assert kind_and_rank(blamed(beat(1, still=610.0, phase=phase))) == ("stuck", 1)
    assert kind_and_rank(blamed(beat(1, silent=610.0, still=610.0, phase=phase))) == ("silent", 1)
    assert kind_and_rank(blamed(beat(1, silent=11.0, phase=phase), pid_101="stopped")) == ("stopped", 1)


@pytest.mark.parametrize("phase", ["start", "end"])
def test_before_and_after_the_training_a_script_does_what_it_likes(phase: str) -> None:
    idle = beat(1, still=1e6, phase=phase)
    assert blamed(idle) is None
    assert blamed(beat(0, phase=phase, **WAITS | {"still": 1e6}), num_ranks=1) is None
    assert kind_and_rank(blamed(idle, limits=LIMITS.for_training())) == ("stuck", 1)
    assert blamed(beat(1, still=590.0, phase=phase), limits=LIMITS.for_training()) is None
    assert kind_and_rank(blamed(beat(1, silent=11.0, phase=phase), pid_101="stopped")) == ("stopped", 1)


def test_of_several_the_surest_and_oldest_is_blamed() -> None:
    silent, earlier, stuck = beat(0, silent=12.0), beat(1, silent=13.0), beat(2, still=400.0)
    assert kind_and_rank(blamed(silent, earlier, stuck)) == ("silent", 1)
    assert kind_and_rank(blamed(silent, earlier, stuck, pid_100="stopped")) == ("stopped", 0)
    assert kind_and_rank(blamed(beat(0, still=30.0), beat(1, still=40.0))) == ("stuck", 1)


def waits(rank: int, num_exchanges: int = 40, tag: str = "gradients", still: float = 25.0, **more: Any) -> Beat:
    return beat(rank, still=still, num_exchanges=num_exchanges, exchange=tag, **more)


def test_of_ranks_that_all_wait_the_one_behind_is_blamed() -> None:
    verdict = blamed(waits(0), waits(1, 39, "moments"), waits(2), num_ranks=3)
    assert verdict is not None and kind_and_rank(verdict) == ("parted", 1)
    assert "waits in the exchange of moments while others wait in that of gradients" in verdict.in_words()
    assert "exchange" not in verdict.where
    verdict = blamed(waits(0), waits(1, 39), num_ranks=2)
    assert verdict is not None and "waits in an earlier exchange of gradients" in verdict.in_words()


def test_of_ranks_that_all_wait_the_one_in_another_exchange_is_blamed() -> None:
    verdict = blamed(waits(0), waits(1), waits(2, tag="text"), num_ranks=3)
    assert verdict is not None and kind_and_rank(verdict) == ("parted", 2)
    assert verdict.is_guilty


def test_when_all_wait_in_the_same_exchange_none_is_guilty() -> None:
    verdict = blamed(waits(0), waits(1), num_ranks=2)
    assert verdict is not None and kind_and_rank(verdict) == ("parted", 0)
    assert not verdict.is_guilty
    assert "the network or the backend hangs" in verdict.in_words()
    verdict = blamed(waits(0, tag="device"), num_ranks=1)
    assert verdict is not None and verdict.in_words().startswith("waits for its device")


def test_all_may_wait_while_one_moves_or_is_looked_at_or_may_be_slow() -> None:
    assert blamed(waits(0), waits(1, still=19.0), num_ranks=2) is None
    assert blamed(waits(0), waits(1, phase="compile"), num_ranks=2) is None
    for state in ("gone", "traced", "stopped", "screen"):
        assert blamed(waits(0), waits(1), num_ranks=2, pid_101=state) is None
    assert blamed(waits(0), beat(1, still=15.0), num_ranks=2) is None


def test_limits_come_from_the_environment() -> None:
    assert Limits.from_environment({}) == Limits(20.0)
    assert Limits.from_environment({HANG_TIMEOUT: "45.5"}).stuck_s("rollout") == 45.5
    off = Limits.from_environment({HANG_TIMEOUT: "0"})
    assert blamed(beat(0, silent=1e6, still=1e6), limits=off, pid_100="stopped") is None
    for value in ("soon", "-1", "0.5", "nan", "inf"):
        with pytest.raises(UsageError, match=f"^LOCKSTEP_HANG_TIMEOUT_S '{value}' must be a number of seconds"):
            Limits.from_environment({HANG_TIMEOUT: value})


def test_a_limit_below_that_of_silence_is_one_of_silence_too() -> None:
    assert kind_and_rank(blamed(beat(0, silent=6.0), limits=Limits(5.0))) == ("silent", 0)
    # A busy host may not let a rank beat every second.
    assert blamed(beat(0, silent=2.5), limits=Limits(1.0)) is None


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "in iteration 12, phase update"),
        ({"exchange": "gradients"}, "in iteration 12, phase update, in the exchange of gradients"),
        ({"exchange": "device"}, "in iteration 12, phase update, waiting for its device"),
        ({"phase": "save"}, "after iteration 11, phase save"),
        ({"phase": "start"}, "in phase start"),
    ],
)
def test_where_a_rank_is(fields: dict[str, Any], words: str) -> None:
    assert where(beat(**fields)) == words


def state_within(pid: int, holds: Callable[[ProcessState], bool], timeout_s: float = 30.0) -> ProcessState:
    deadline = time.monotonic() + timeout_s
    while not holds(process_state(pid)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return process_state(pid)


def test_what_the_kernel_says_of_a_process() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        assert process_state(process.pid) in ("running", "disk")
        process.send_signal(signal.SIGSTOP)
        assert state_within(process.pid, lambda state: state == "stopped") == "stopped"
        process.send_signal(signal.SIGCONT)
        assert state_within(process.pid, lambda state: state == "running") == "running"
    finally:
        process.kill()
    assert state_within(process.pid, lambda state: state == "gone") == "gone"  # a zombie
    process.wait()
    assert process_state(process.pid) == "gone"


def forbidden(task: Path) -> list[str]:
    raise PermissionError(task)


@pytest.mark.parametrize("how", ["system call", "sleep"])
@pytest.mark.parametrize("screen", ["terminal", "pipe"])
def test_a_process_whose_output_nobody_reads_waits_for_the_screen(
    screen: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if how == "sleep":  # as where only a process's ancestors may see its system calls
        monkeypatch.setattr(blame, "_system_call", forbidden)
    reader, writer = pty.openpty() if screen == "terminal" else os.pipe()
    process = subprocess.Popen([sys.executable, "-c", "print('x' * 10_000_000)"], stdout=writer)
    try:
        _skip_unless_told(process.pid, "syscall" if how == "system call" else "wchan")
        assert state_within(process.pid, lambda state: state == "screen") == "screen"
    finally:
        process.kill()
        process.wait()
        os.close(writer)
        os.close(reader)


def _skip_unless_told(pid: int, name: str) -> None:
    """Skip where the kernel never says in what a process sleeps, which then waits in writing within seconds."""
    deadline = time.monotonic() + 10.0
    with contextlib.suppress(OSError):
        while time.monotonic() < deadline:
            if (told := Path(f"/proc/{pid}/{name}").read_text().strip()) and told not in ("0", "running"):
                return
            time.sleep(0.02)
    pytest.skip(f"this kernel does not tell a process's {name}")


def test_a_process_that_waits_for_another_thing_does_not_wait_for_the_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blame, "_system_call", forbidden)
    script = "import os; ends = os.pipe(); print('ready', flush=True); os.write(ends[1], bytes(10_000_000))"
    master, slave = pty.openpty()
    process = subprocess.Popen([sys.executable, "-c", script], stdout=slave, stderr=slave)
    try:
        assert b"ready" in os.read(master, 100)  # it writes into a pipe of its own, and its screen is a terminal
        assert state_within(process.pid, lambda state: state == "screen", 1.0) == "running"
    finally:
        process.kill()
        process.wait()
        os.close(slave)
        os.close(master)


def test_a_compiled_iteration_takes_its_time_but_its_process_lives() -> None:
    waiting: dict[str, Any] = {"phase": "step", "exchange": "device"}
    for still in (21.0, 599.0):
        assert blamed(beat(0, still=still, **waiting), beat(1, still=still, **waiting), num_ranks=2) is None
        assert blamed(beat(0, still=still, **waiting), beat(1, still=still, phase="step"), num_ranks=2) is None
    verdict = blamed(beat(0, still=601.0, **waiting), beat(1, still=602.0, **waiting), num_ranks=2)
    assert verdict is not None and not verdict.is_guilty
    assert verdict.in_words() == "waits for its device, as all ranks do, and nothing has come of it for 601 s"
    assert where(beat(1, **waiting)) == "in iteration 12, phase step, waiting for its device"
    assert kind_and_rank(blamed(beat(0, **waiting), beat(1, still=601.0, phase="step"))) == ("stuck", 1)
    # Its other thread goes on all the while, whatever the device does.
    silent = beat(1, silent=10.5, still=10.5, **waiting)
    assert kind_and_rank(blamed(beat(0, **waiting), silent)) == ("silent", 1)
    assert kind_and_rank(blamed(beat(0, **waiting), silent, pid_101="stopped")) == ("stopped", 1)


def test_a_compiled_evaluation_too() -> None:
    compiled = beat(still=599.0, phase="evaluate", exchange="device")
    assert blamed(compiled, num_ranks=1) is None
    assert blamed(beat(still=601.0, phase="evaluate", exchange="device"), num_ranks=1) is not None
    # One that exchanges something else is run step by step.
    assert blamed(beat(still=21.0, phase="evaluate", exchange="evaluation"), num_ranks=1) is not None
