"""Ranks under a bare torchrun, with no launcher of ours: who hangs is found, named and ended by the others."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lockstep.core.beats import read_beats
from lockstep.distributed.heartbeat import FOLDER_PREFIX
from tests.multiproc.commands import SMALL, Command, wait_for

TRAINING = ("train", "cartpole_classic", *SMALL, "--max_iterations", "1000000")

# The command line, but that rank 1 hangs in the middle of the third iteration's rollout.
HANGING = """
import ctypes, os, sys, time
from pathlib import Path
from lockstep.cli.main import main
from lockstep.envs.torch_env import TorchEnv

step = TorchEnv.step

def hang(env, action):
    if os.environ["RANK"] == "1" and env.num_steps == 20:
        Path("hangs.tmp").write_text(str(os.getpid()))
        Path("hangs.tmp").rename("hangs")
        {how}
    return step(env, action)

TorchEnv.step = hang
sys.exit(main(sys.argv[1:]))
"""
# The second lock of a mutex never returns, and no signal interrupts it.
IN_C = "mutex = ctypes.create_string_buffer(64); [ctypes.CDLL(None).pthread_mutex_lock(mutex) for _ in range(2)]"
IN_PYTHON = "time.sleep(1e6)"


class Job(Command):
    """Two ranks that torchrun has started."""

    def __init__(self, *command: str, **environment: str) -> None:
        Path("tmp").mkdir()
        super().__init__(
            *("--standalone", "--nproc_per_node", "2", *command),
            module="torch.distributed.run",
            stderr=subprocess.STDOUT,
            environment={"TMPDIR": str(Path("tmp").absolute())} | environment,
        )

    def folders(self) -> list[Path]:
        return list(Path("tmp").glob(f"{FOLDER_PREFIX}*"))

    def end_in_lines(self) -> tuple[int, list[str]]:
        """Return the exit code and the lines of lockstep's errors and of stacks."""
        code, output, _ = self.end()
        return code, [line for line in output.splitlines() if re.match("lockstep:|    File", line)]


@pytest.fixture
def start() -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def start_one(*command: str, **environment: str) -> Job:
        jobs.append(Job(*command, **environment))
        return jobs[-1]

    yield start_one
    for job in jobs:
        job.kill()


def hanging_job(start: Callable[..., Job], how: str, **environment: str) -> tuple[Job, int]:
    """Return a job whose rank 1 hangs, and the process of that rank."""
    Path("hanging.py").write_text(HANGING.format(how=how))
    job = start("hanging.py", *TRAINING, **environment)
    wait_for(lambda: Path("hangs").exists() or job.process.poll() is not None)
    return job, int(Path("hangs").read_text())


def test_a_stopped_rank_ends_the_job_and_is_named(start: Callable[..., Job]) -> None:
    job = start("-m", "lockstep", *TRAINING)

    def pids() -> list[int]:
        """Return the processes of the ranks once both have trained for a while."""
        found = [beat for folder in job.folders() for _, beat in sorted(read_beats(folder).items())]
        return [beat.pid for beat in found if beat.iteration >= 3]

    wait_for(lambda: len(pids()) == 2)
    stopped = pids()[1]
    os.kill(stopped, signal.SIGSTOP)
    began = time.monotonic()
    code, lines = job.end_in_lines()
    assert time.monotonic() - began < 30
    assert code == 1
    first = next(line for line in lines if "ends it" in line)
    assert re.fullmatch(
        rf"lockstep: error: rank 1 \(on \S+, pid {stopped}\) was stopped by a signal \(.*\) and gave no sign of life "
        r"for \d+ s, (in|after) iteration \d+, phase \w+(, in the exchange of [^;]+)?; rank 0 ends it, and with it the "
        "job",
        first,
    )
    others = [line for line in lines if line.startswith("lockstep:") and line != first]
    assert all("lost another rank" in line for line in others)
    assert job.folders() == []


def test_a_rank_that_hangs_in_python_ends_the_job_and_is_named(start: Callable[..., Job]) -> None:
    job, pid = hanging_job(start, IN_PYTHON, LOCKSTEP_HANG_TIMEOUT_S="8")
    code, lines = job.end_in_lines()
    assert code == 1
    at = next(number for number, line in enumerate(lines) if "ends it" in line)
    assert f"pid {pid}) is stuck: its main thread has not moved for " in lines[at]
    assert lines[at].endswith("s, in iteration 3, phase rollout; rank 0 ends it, and with it the job")
    assert re.fullmatch(r'    File ".*/hanging.py", line \d+ in hang', lines[at + 1])
    assert any("in collect" in line for line in lines)


def test_sigterm_ends_a_rank_that_hangs_in_c(start: Callable[..., Job]) -> None:
    job, pid = hanging_job(start, IN_C, LOCKSTEP_HANG_TIMEOUT_S="0", LOCKSTEP_TERM_TIMEOUT_S="2")
    os.kill(pid, signal.SIGTERM)
    code, lines = job.end_in_lines()
    assert code == 1
    said = [line for line in lines if "was asked to stop by SIGTERM" in line]
    assert len(said) == 1
    assert said[0].startswith("lockstep: error: rank 1 ")
    assert ", in iteration 3, phase rollout; " in said[0]
    assert job.folders() == []
