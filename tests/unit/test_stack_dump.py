"""Where the main thread of a real process is, written down when another asks."""

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.core import stack_dump
from tests.unit.heartbeat_fixtures import Rank


@pytest.mark.parametrize("how", ["hang_in_c", "hang_with_the_lock"])
def test_a_hanging_rank_says_where_it_is(how: str, start_rank: Callable[..., Rank], tmp_path: Path) -> None:
    rank = start_rank(f"heartbeat.begin()\n{how}()", LOCKSTEP_ATTEMPT_DIR=str(tmp_path))
    assert rank.says() == "hangs"
    path = stack_dump.stack_path(tmp_path, 1)
    stack_dump.ask(rank.pid, path)
    stack = stack_dump.read_main_thread(path)
    assert stack[0].endswith(f"in {how}")
    assert stack[-1].endswith("in <module>")
    assert rank.process.poll() is None


def test_a_stopped_rank_writes_the_stack_of_its_main_thread(start_rank: Callable[..., Rank], tmp_path: Path) -> None:
    script = """
heartbeat.begin()
def work():
    while True:
        time.sleep(0.001)
for _ in range(6):
    threading.Thread(target=work, daemon=True).start()
def stand_still():
    print("ready", flush=True)
    while True:
        time.sleep(0.001)
stand_still()
"""
    rank = start_rank(script, LOCKSTEP_ATTEMPT_DIR=str(tmp_path))
    assert rank.says() == "ready"
    path = stack_dump.stack_path(tmp_path, 1)
    for _ in range(5):
        rank.send(signal.SIGSTOP)
        os.waitpid(rank.pid, os.WUNTRACED)
        stack_dump.ask(rank.pid, path)
        stack = stack_dump.read_main_thread(path)
        assert "in stand_still" in " ".join(stack) and stack[-1].endswith("in <module>")


def test_a_handler_of_the_users_own_is_not_taken_away(start_rank: Callable[..., Rank], tmp_path: Path) -> None:
    script = """
signal.signal(signal.SIGUSR2, lambda *_: print("mine", flush=True))
heartbeat.begin()
print("ready", flush=True)
while True:
    time.sleep(0.01)
"""
    rank = start_rank(script, LOCKSTEP_ATTEMPT_DIR=str(tmp_path))
    assert rank.says() == "ready"
    rank.send(signal.SIGUSR2)
    assert rank.says() == "mine"
    assert stack_dump.read_main_thread(stack_dump.stack_path(tmp_path, 1)) == []


def test_who_does_not_answer_is_not_asked() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        stack_dump.ask(process.pid, Path("nothing"))
        assert process.poll() is None  # of which SIGUSR2 would be the end
        process.kill()
