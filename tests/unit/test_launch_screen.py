"""A screen that is not read, or read slowly: the launcher does not wait for it, and shows all that it takes."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.launch import screen
from lockstep.launch.logs import Follower
from lockstep.launch.screen import MAX_LINES, Screen, shows_on
from tests.unit.launch_fixtures import leave

pytestmark = pytest.mark.timeout(60)

# Ends although neither of its streams is read, which the test sees to.
UNREAD = """
import sys
from lockstep.launch.screen import Screen, shows_on
with Screen(shows_on(sys.stdout, sys.stderr)) as screen:
    for number in range(5000):
        screen.say("x" * 100, number % 2 == 0)
sys.exit(7)
"""


class Held:
    """A terminal that somebody holds."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.is_free = threading.Event()
        self.pause_s = 0.0

    def show(self, line: str, to_stderr: bool) -> None:
        self.is_free.wait()
        time.sleep(self.pause_s)
        self.lines.append(line)


@pytest.fixture
def held() -> Iterator[Held]:
    terminal = Held()
    yield terminal
    terminal.is_free.set()


def test_lines_are_shown_in_order_on_both_streams(tmp_path: Path) -> None:
    with (
        (tmp_path / "out").open("w", encoding="ascii") as stdout,
        (tmp_path / "err").open("w") as stderr,
        Screen(shows_on(stdout, stderr)) as shown,
    ):
        for number in range(3):
            shown.say(f"{number} ü", number == 1)
    assert (tmp_path / "out").read_text() == "0 ?\n2 ?\n"
    assert (tmp_path / "err").read_text() == "1 ü\n"


def test_who_speaks_to_a_screen_that_is_held_does_not_wait(held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screen, "END_WAIT_S", 0.2)
    began_s = time.monotonic()
    with Screen(held.show) as shown:
        for number in range(2 * MAX_LINES):
            shown.say(str(number), True)
        assert not shown.has_room()
    assert time.monotonic() - began_s < 10.0
    assert held.lines == []


def test_a_slow_screen_gets_all_of_it_at_the_end(held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screen, "END_WAIT_S", 1.0)
    held.pause_s = 0.05
    held.is_free.set()
    with Screen(held.show) as shown:
        for number in range(40):  # 2 s
            shown.say(str(number), True)
    assert held.lines == [str(number) for number in range(40)]


def test_logs_are_read_no_further_than_the_screen_takes_them(
    held: Held, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(screen, "END_WAIT_S", 0.5)
    leave(tmp_path)
    lines = [f"{number:06}" + "x" * 90 for number in range(20 * MAX_LINES)]
    (tmp_path / "1.log").write_text("\n".join(lines) + "\n")
    with Screen(held.show) as shown:
        follower = Follower(tmp_path, (0, 2), shown.say, shown.has_room)
        for _ in range(20):
            follower.follow()
        assert len(shown._waiting) < 3 * MAX_LINES
        held.is_free.set()
        follower.follow(to_the_end=True)
    assert held.lines == [f"[rank 3] {line}" for line in lines]


def test_a_process_ends_although_nobody_reads_what_it_says() -> None:
    reading, writing = os.pipe()
    try:
        ended = subprocess.run([sys.executable, "-c", UNREAD], stdout=writing, stderr=writing, timeout=50, check=False)
        assert ended.returncode == 7
    finally:
        os.close(writing)
        os.close(reading)


def test_a_screen_that_goes_away_is_no_failure() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as stream, Screen(shows_on(stream, None)) as shown:
        for _ in range(3):
            shown.say("words", False)
            shown.say("words", True)


def test_a_pipe_that_does_not_block_gets_all_of_it() -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    text = "x" * (1 << 20)
    found: list[int] = []

    def read() -> None:
        time.sleep(0.3)
        with os.fdopen(reading, "rb") as stream:
            found.append(len(stream.read()))

    reader = threading.Thread(target=read)
    reader.start()
    with os.fdopen(writing, "w") as stream:
        shows_on(stream, None)(text, False)
    reader.join()
    assert found == [len(text) + 1]
