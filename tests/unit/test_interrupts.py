"""Signals, sent to real processes."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from lockstep.core.interrupts import watch

# Says "ready", works until it is asked to stop, says what it was asked, and ends with the exit code.
TRAINING = """
import sys, time
from lockstep.core.interrupts import watch
with watch() as request:
    print("ready", flush=True)
    while request.status is None:
        time.sleep(0.01)
    print(request.status, flush=True)
    if "slow" in sys.argv:
        time.sleep(60)
sys.exit(request.exit_code)
"""


@pytest.fixture
def training(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    arguments = [sys.executable, "-c", TRAINING, *getattr(request, "param", [])]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
        assert read(process) == "ready"
        yield process
        process.kill()


def read(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.parametrize(
    ("number", "status", "code"),
    [
        (signal.SIGINT, "interrupted", 130),
        (signal.SIGTERM, "preempted", 75),
        (signal.SIGUSR1, "preempted", 75),
    ],
)
def test_a_signal_lets_the_training_end_by_itself(
    training: subprocess.Popen[str], number: signal.Signals, status: str, code: int
) -> None:
    training.send_signal(number)
    assert read(training) == status
    assert training.wait(10) == code


@pytest.mark.parametrize("training", [["slow"]], indirect=True)
def test_a_second_ctrl_c_kills_at_once(training: subprocess.Popen[str]) -> None:
    training.send_signal(signal.SIGINT)
    assert read(training) == "interrupted"
    training.send_signal(signal.SIGINT)
    assert training.wait(10) == -signal.SIGINT


@pytest.mark.parametrize("training", [["slow"]], indirect=True)
def test_a_second_termination_request_does_not_kill(training: subprocess.Popen[str]) -> None:
    training.send_signal(signal.SIGTERM)
    assert read(training) == "preempted"
    training.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        training.wait(0.3)


def test_the_first_request_stays() -> None:
    with watch() as request:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert request.status == "preempted"


def test_handlers_of_before_are_put_back() -> None:
    calls = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: calls.append(number))
    interrupt = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(ZeroDivisionError), watch():
            os.kill(os.getpid(), signal.SIGUSR1)
            raise ZeroDivisionError
        assert calls == []
        os.kill(os.getpid(), signal.SIGUSR1)
        assert calls == [signal.SIGUSR1]
        assert signal.getsignal(signal.SIGINT) is interrupt
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_outside_the_main_thread_handlers_are_left_alone() -> None:
    seen = []

    def work() -> None:
        before = signal.getsignal(signal.SIGTERM)
        with watch() as request:
            seen.append((request.status, request.exit_code, signal.getsignal(signal.SIGTERM) is before))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(None, 0, True)]
