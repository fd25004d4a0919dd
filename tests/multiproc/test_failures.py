"""A rank of a training dies, hangs, is stopped or learns nonsense: the job ends soon, and says which rank and where."""

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.multiproc.commands import SMALL, Command, wait_for

TASK = "cartpole_classic"
BOUND_S = 30.0

pytestmark = pytest.mark.usefixtures("nothing_is_left")

# As sitecustomize.py it is imported by every process first, and does its work when the ranks have come to iteration 4.
PLANT = """
import importlib.util, os, sys
from importlib.abc import MetaPathFinder

def spin_forever():
    while True:
        pass

def faulty(collect):
    calls = []
    def collect_and_fail(*arguments):
        result = collect(*arguments)
        calls.append(result)
        if len(calls) == 4:
            if os.environ["FAULT"] == "exception":
                raise LookupError("planted")
            if os.environ["FAULT"] == "hang":
                spin_forever()
            if os.environ["FAULT"] == "not a number":
                arguments[4].rewards[0] = float("nan")  # of the rollout
        return result
    return collect_and_fail

class Plant(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != "lockstep.learn.torch.training":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module
        def execute_and_plant(module):
            execute(module)
            module.collect = faulty(module.collect)
        spec.loader.exec_module = execute_and_plant
        return spec

if os.environ.get("RANK") == os.environ.get("FAULTY_RANK", "none"):
    sys.meta_path.insert(0, Plant())
"""


class Job(Command):
    """A training of two ranks under the launcher."""

    def __init__(self, *arguments: str, fault: str = "", rank: int | None = None) -> None:
        Path("modules").mkdir()
        Path("modules/sitecustomize.py").write_text(PLANT)
        Path("tmp").mkdir()
        planted = {} if rank is None else {"FAULT": fault, "FAULTY_RANK": str(rank)}
        super().__init__(
            *("train_multigpu", TASK, *SMALL, "--num_gpus", "2", *arguments),
            stdout=subprocess.DEVNULL,
            environment={"PYTHONPATH": str(Path("modules").absolute()), "TMPDIR": str(Path("tmp").absolute())}
            | {"XDG_CACHE_HOME": str(Path("cache").absolute()), "COLUMNS": "120"}
            | planted,
        )

    def send_to(self, rank: int, number: signal.Signals) -> None:
        """Send a signal to a rank that trains, when the kernels, if there are any, have been compiled."""
        wait_for(lambda: len(self.lines_of("metrics.jsonl")) >= 3)
        os.kill(json.loads("".join(self.lines_of("run.json")))["ranks"][rank]["pid"], number)

    def lines_of(self, name: str) -> list[str]:
        """Return the lines of a file in the run directory; none if it is not there yet."""
        files = list(Path("logs", TASK).glob(f"2*/{name}"))
        return files[0].read_text().splitlines() if files else []

    def progress(self) -> dict[str, Any]:
        """Return what progress.json says."""
        found: dict[str, Any] = json.loads("".join(self.lines_of("progress.json")))
        return found

    def end_in_block(self) -> tuple[int, str, list[str]]:
        """Return the exit code, all that was said, and the launcher's block: its last first line and what follows."""
        code, _, said = self.end()
        lines = said.splitlines()
        first = max(
            (number for number, line in enumerate(lines) if line.startswith("lockstep: error: rank ")), default=0
        )
        return code, said, lines[first:]


def test_a_rank_that_hangs_is_ended_and_shown_with_its_stack() -> None:
    job = Job("--max_iterations", "100000", "--hang_timeout", "4", fault="hang", rank=1)
    code, said, block = job.end_in_block()
    assert code == 1, said
    pattern = (
        r"lockstep: error: rank 1 \(local rank 1 on [^,]+, cpu, pid \d+\) is stuck: its main thread has not moved for "
        r"\d+ s, in iteration 4, phase rollout; it was killed, so that the job ends"
    )
    assert re.fullmatch(pattern, block[0]), said
    calls = block[block.index("  where it was, the innermost call first:") + 1 :]
    assert calls[0].endswith("in spin_forever")
    assert any("iteration" in line and "3/100000" in line for line in calls)  # the last that it printed
    (log,) = [line for line in block if line.startswith("  its full log: ")]
    assert Path(log.removeprefix("  its full log: ")).is_file()
    assert block[-1].startswith("  all blocks: ")
    assert block[0] in Path(block[-1].removeprefix("  all blocks: ")).read_text().splitlines()
    assert block[0] in job.lines_of("failure.txt")
    kept = job.lines_of("failure.txt")
    assert calls[0] in kept
    assert not any("heartbeat.py" in line for line in kept)  # stacks of threads that run can't be read safely
    assert job.progress()["status"] == "failed"
    assert job.progress()["reason"].startswith("rank 1 (local rank 1 on ")
    assert list(Path("tmp").glob("lockstep-*")) == []


def test_a_rank_that_is_stopped_is_ended_and_not_the_one_that_waits() -> None:
    job = Job("--max_iterations", "100000", "--hang_timeout", "4")
    job.send_to(0, signal.SIGSTOP)
    began = time.monotonic()
    code, said, block = job.end_in_block()
    assert time.monotonic() - began < BOUND_S
    assert code == 1, said
    assert block[0].startswith("lockstep: error: rank 0 (local rank 0 on ")
    assert re.search(r"was stopped by a signal .* for \d+ s, (in|after) iteration \d+, phase \w+", block[0]), said
    assert any("/lockstep/learn/torch/" in line for line in block), said  # where it was
    assert job.progress()["status"] == "failed"
    assert job.progress()["reason"].startswith("rank 0 (local rank 0 on ")


def test_a_rank_0_that_is_killed_leaves_its_last_word_to_the_launcher() -> None:
    job = Job("--max_iterations", "100000", "--checkpoints.interval", "2")
    job.send_to(0, signal.SIGKILL)
    began = time.monotonic()
    code, said, block = job.end_in_block()
    assert time.monotonic() - began < BOUND_S
    assert code == 128 + signal.SIGKILL, said
    pattern = r"lockstep: error: (rank 0 \(.*, cpu, pid \d+\) was killed by SIGKILL (in|after) iteration \d+, phase .*)"
    match = re.fullmatch(pattern, block[0])
    assert match, said
    progress = job.progress()
    assert (progress["status"], progress["reason"]) == ("failed", match[1])
    assert progress["iteration"] >= 2 and progress["max_iterations"] == 100000
    assert block[0] in job.lines_of("failure.txt")


def test_an_exception_is_shown_with_its_traceback_and_what_was_printed_before() -> None:
    job = Job("--max_iterations", "100000", fault="exception", rank=1)
    code, said, block = job.end_in_block()
    assert code == 1, said
    pattern = r"lockstep: error: rank 1 \(.*, pid \d+\) failed in iteration 4, phase rollout: LookupError: planted"
    assert re.fullmatch(pattern, block[0]), said
    assert block[1] == "  Traceback (most recent call last):"
    end = block.index("  LookupError: planted")
    assert block[end + 1] == "  the last it printed:"
    assert any("iteration" in line and "3/100000" in line for line in block[end + 1 :])
    assert job.progress()["reason"].startswith("rank 1 (")


def test_nonsense_on_one_rank_is_said_once_for_all() -> None:
    job = Job("--max_iterations", "100000", fault="not a number", rank=1)
    code, said, _ = job.end_in_block()
    assert code == 1, said
    errors = [line for line in said.splitlines() if line.startswith("lockstep: error: ")]
    assert len(errors) == 1, said
    assert errors[0].startswith("lockstep: error: not finite in iteration 4: rewards at index (0, 0)")
    assert " on rank 1;" in errors[0]
    assert job.progress()["reason"] in errors[0]
    assert job.progress()["reason"] in "".join(job.lines_of("failure.txt"))
