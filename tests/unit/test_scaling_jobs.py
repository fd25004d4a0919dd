"""The jobs of a sweep as processes: their ends, what they say, and signals that are handed on."""

import os
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from lockstep.benchmark.bundle import write_bundle
from lockstep.benchmark.scaling.jobs import ProcessJobs, SweepInterruptedError, SweepPreemptedError
from lockstep.core.errors import RunError, UsageError
from tests.unit.bundle_fixtures import make_bundle

Program = Callable[[str], list[str]]


@pytest.fixture
def program(tmp_path: Path) -> Program:
    """Return what makes a program of a few lines, which stands for the benchmark of one job."""

    def make(lines: str) -> list[str]:
        path = tmp_path / "program.py"
        path.write_text(textwrap.dedent(lines))
        return [sys.executable, str(path)]

    return make


@pytest.fixture
def sent_when_begun(tmp_path: Path) -> Iterator[Callable[[int], None]]:
    """Return what sends this process a signal as soon as the program has made the file 'begun'."""
    threads = []

    def send(number: int) -> None:
        def wait_and_send() -> None:
            while not (tmp_path / "begun").exists():
                time.sleep(0.01)
            os.kill(os.getpid(), number)

        threads.append(threading.Thread(target=wait_and_send, daemon=True))
        threads[-1].start()

    yield send
    for thread in threads:
        thread.join(10)


def test_a_job_is_told_how_many_ranks_and_where_its_bundle_goes(program: Program, tmp_path: Path) -> None:
    bundle = make_bundle("training")
    write_bundle(bundle, tmp_path / "ready.json")
    copies = program(
        f"""
        import shutil, sys
        print(sys.argv[1:])
        shutil.copy({str(tmp_path / "ready.json")!r}, sys.argv[-1])
        """
    )
    path = tmp_path / "gpus_2_round_1.json"
    assert ProcessJobs(["cartpole", "--seed", "3"], copies).run(2, path) == bundle
    printed = path.with_suffix(".log").read_text()
    assert printed.strip() == str(["cartpole", "--seed", "3", "--num_gpus", "2", "--output", str(path)])


def test_a_job_that_fails_is_quoted_with_its_exit_code(program: Program, tmp_path: Path) -> None:
    fails = program("import sys; sys.stderr.write('lockstep: error: rank 1 is out of memory\\nbye\\n'); sys.exit(1)")
    with pytest.raises(RunError, match=r"--num_gpus 4 ended with exit code 1: rank 1 is out of memory \(all that"):
        ProcessJobs([], fails).run(4, tmp_path / "job.json")


def test_a_job_that_is_used_wrongly_says_so(program: Program, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="exit code 2: no such task"):
        ProcessJobs([], program("import sys; print('no such task'); sys.exit(2)")).run(1, tmp_path / "job.json")


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("import os; os.kill(os.getpid(), 9)", "ended by SIGKILL: it has printed nothing"),
        ("print('done')", "ended with exit code 0: done"),
    ],
)
def test_a_job_without_a_bundle_has_failed(lines: str, words: str, program: Program, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=words):
        ProcessJobs([], program(lines)).run(1, tmp_path / "job.json")


@pytest.mark.parametrize(
    ("sent", "handed_on", "error"),
    [
        (signal.SIGINT, signal.SIGINT, SweepInterruptedError),
        (signal.SIGTERM, signal.SIGTERM, SweepPreemptedError),
        (signal.SIGHUP, signal.SIGTERM, SweepPreemptedError),
    ],
)
def test_a_signal_ends_the_job_and_then_the_sweep(
    sent: int,
    handed_on: int,
    error: type[Exception],
    program: Program,
    tmp_path: Path,
    sent_when_begun: Callable[[int], None],
) -> None:
    waits = program(
        f"""
        import pathlib, signal, sys, time
        def stop(number, frame):
            print(int(number), flush=True)
            sys.exit(130)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, stop)
        pathlib.Path({str(tmp_path / "begun")!r}).touch()
        time.sleep(60)
        """
    )
    before, others = signal.getsignal(sent), set(psutil.Process().children(recursive=True))
    sent_when_begun(sent)
    with pytest.raises(error, match="at --num_gpus 2"):
        ProcessJobs([], waits).run(2, tmp_path / "job.json")
    assert (tmp_path / "job.log").read_text().strip() == str(int(handed_on))
    assert signal.getsignal(sent) == before
    assert set(psutil.Process().children(recursive=True)) <= others


def test_a_second_ctrl_c_is_handed_on_too(
    program: Program, tmp_path: Path, sent_when_begun: Callable[[int], None]
) -> None:
    needs_two = program(
        f"""
        import os, pathlib, signal, sys, time
        heard = []
        def stop(number, frame):
            heard.append(number)
            os.kill(os.getppid(), signal.SIGINT) if len(heard) == 1 else sys.exit(1)
        signal.signal(signal.SIGINT, stop)
        pathlib.Path({str(tmp_path / "begun")!r}).touch()
        time.sleep(60)
        """
    )
    sent_when_begun(signal.SIGINT)
    with pytest.raises(SweepInterruptedError):
        ProcessJobs([], needs_two).run(2, tmp_path / "job.json")


def test_a_job_ends_with_a_sweep_that_is_killed(program: Program, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    job = f"import os, pathlib, time; pathlib.Path({str(begun)!r}).write_text(str(os.getpid())); time.sleep(60)"
    sweep = program(
        f"""
        import sys
        from lockstep.benchmark.scaling.jobs import run_process
        run_process([sys.executable, "-c", {job!r}], 1)
        """
    )
    killed = psutil.Popen(sweep)
    try:
        while not (begun.exists() and begun.read_text()):
            assert killed.poll() is None
            time.sleep(0.01)
    finally:
        killed.kill()
        killed.wait()
    with_it = [psutil.Process(pid) for pid in [int(begun.read_text())] if psutil.pid_exists(pid)]
    assert psutil.wait_procs(with_it, timeout=30)[1] == []
