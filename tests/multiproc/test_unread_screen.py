"""A launch whose output goes into a pipe that is full and that nobody reads."""

import fcntl
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.multiproc.commands import Command, wait_for

# Each rank fills the screen, and goes on; its words go into a file that the launcher reads.
SCRIPT = """
import os, time
from pathlib import Path
for number in range(3000):
    print("x" * 200, flush=True)
Path(f"ready_{os.environ['RANK']}").write_text(str(os.getpid()))
time.sleep(600)
"""

pytestmark = pytest.mark.usefixtures("nothing_is_left")


@pytest.fixture
def unread() -> Iterator[int]:
    """Return the end of a pipe that takes nothing."""
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    yield writing
    os.close(writing)
    os.close(reading)


@pytest.mark.parametrize(("to_rank", "code"), [(True, 137), (False, 143)], ids=["a rank is killed", "SIGTERM"])
def test_a_screen_that_is_not_read_keeps_the_launcher_from_nothing(unread: int, to_rank: bool, code: int) -> None:
    Path("script.py").write_text(SCRIPT)
    Path("tmp").mkdir()
    launch = Command(
        *("train_multigpu", "--device", "cpu", "--num_gpus", "2", "--log_all_ranks", "--script", "script.py"),
        stdout=unread,
        stderr=unread,
        environment={"TMPDIR": str(Path("tmp").absolute())},
    )
    try:
        wait_for(lambda: all(Path(f"ready_{rank}").exists() for rank in (0, 1)), timeout_s=60.0)
        if to_rank:
            os.kill(int(Path("ready_1").read_text()), signal.SIGKILL)
        else:
            launch.send(signal.SIGTERM)
        assert launch.process.wait(timeout=60.0) == code
    finally:
        launch.kill()
