"""kill -9 at random instants: whatever is visible on the disk afterwards is a run that resumes."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

from tests.multiproc.commands import SMALL

NUM_KILLS = 30

# Importing torch takes seconds, so one process imports once and forks an attempt for each line it reads: the
# attempts then differ only in when they are killed.
FORKING_PARENT = """
import os, sys
import torch
import lockstep.learn.torch.loop, lockstep.sim.mujoco_c, lockstep.sim.analytic, lockstep.session.play
from lockstep.cli.main import main
torch.set_num_threads(1)
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            sys.stdout = sys.stderr = open("output.txt", "a")
            code = main(line.split())
        finally:
            sys.stdout.flush()
            os._exit(code)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Attempts:
    """Attempts at a command, each in a forked process that may be killed."""

    def __init__(self) -> None:
        self._parent = subprocess.Popen(
            [sys.executable, "-c", FORKING_PARENT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        assert self.run("tasks") == 0  # from here on the imports are done

    def run(self, *arguments: str, kill_after_s: float | None = None) -> int:
        """Run the command, perhaps killing it; return its exit code, -9 if it was killed."""
        assert self._parent.stdin and self._parent.stdout
        self._parent.stdin.write(" ".join(arguments) + "\n")
        self._parent.stdin.flush()
        child = int(self._parent.stdout.readline())
        if kill_after_s is not None:
            time.sleep(kill_after_s)
            os.kill(child, signal.SIGKILL)
        return int(self._parent.stdout.readline())

    def close(self) -> None:
        os.killpg(self._parent.pid, signal.SIGKILL)  # and with it a training that may still be under way
        self._parent.communicate()


def test_a_kill_at_any_instant_leaves_a_run_that_resumes() -> None:
    options = (*SMALL, "--checkpoints.interval", "1", "--checkpoints.keep", "2")
    randomness = random.Random(1)
    attempts = Attempts()
    root = Path("logs/cartpole_swingup")
    try:
        begun = time.monotonic()
        assert attempts.run("train", "cartpole_swingup", *options, "--max_iterations", "1") == 0
        window_s = 2.0 * (time.monotonic() - begun)
        last = 1
        (run,) = root.iterdir()
        num_advanced = 0
        for _ in range(NUM_KILLS):
            # From before anything is opened to deep into training.
            instant = randomness.uniform(0.0, window_s)
            code = attempts.run("train", "--resume", str(run), "--max_iterations", "100000", kill_after_s=instant)
            assert code == -signal.SIGKILL, Path("output.txt").read_text()[-2000:]
            saved = torch.load(run / "checkpoints" / "latest", weights_only=True)["iteration"]
            assert saved >= last, "the newest checkpoint is older than before"
            num_advanced += saved > last
            window_s *= 0.97 if saved > last else 1.05  # whatever else the machine has to do, both must happen
            last = saved
            json.loads((run / "progress.json").read_text())
            json.loads((run / "run.json").read_text())
        assert num_advanced >= NUM_KILLS // 5, "the kills came too early to test anything"
        # Two more: a kill between a checkpoint and the link to it leaves one newer than that, with which a run goes on.
        assert attempts.run("train", "--resume", str(run), "--max_iterations", str(last + 2)) == 0
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        assert [line["iteration"] for line in lines] == list(range(1, last + 3))
        assert not list(run.rglob(".tmp-*"))
        assert len(list((run / "checkpoints").glob("model_*"))) == 2
    finally:
        attempts.close()


def test_a_kill_while_a_run_is_made_leaves_a_whole_run_or_none() -> None:
    randomness = random.Random(2)
    attempts = Attempts()
    root = Path("logs/cartpole_classic")
    try:
        begun = time.monotonic()
        assert attempts.run("train", "cartpole_classic", *SMALL, "--max_iterations", "1") == 0
        start_s = time.monotonic() - begun
        for _ in range(NUM_KILLS // 2):
            instant = randomness.uniform(0.0, start_s)
            attempts.run("train", "cartpole_classic", *SMALL, "--max_iterations", "100000", kill_after_s=instant)
        visible = [path for path in root.iterdir() if not path.name.startswith(".")]
        assert visible
        for run in visible:
            assert json.loads((run / "run.json").read_text())["attempts"]
            assert (run / "config.yaml").is_file()
        # One that was killed before its first checkpoint starts again from its config.
        begun_only = [run for run in visible if not any((run / "checkpoints").glob("model_*"))]
        for run in (begun_only or visible)[:2]:
            assert attempts.run("train", "--resume", str(run), "--max_iterations", "2") == 0
    finally:
        attempts.close()
