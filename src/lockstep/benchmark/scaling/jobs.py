"""The jobs of a sweep as processes of their own: each begins as cold as any other, and leaves nothing behind."""

import contextlib
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

from lockstep.benchmark.bundle import read_bundle
from lockstep.benchmark.schema import Bundle
from lockstep.core.errors import LockstepError, RunError, UsageError
from lockstep.core.files import exists
from lockstep.core.interrupts import EXIT_CODES
from lockstep.core.process_control import end_with_parent, signal_name

POLL_S = 0.1
_LISTENED_TO = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
_ERROR = "lockstep: error: "
_TAIL_BYTES = 2**16
_PROGRAM = (sys.executable, "-m", "lockstep", "benchmark", "training_multigpu")


class SweepInterruptedError(LockstepError):
    """The user has ended the sweep."""

    exit_code = EXIT_CODES["interrupted"]


class SweepPreemptedError(LockstepError):
    """The system has asked the sweep to end."""

    exit_code = EXIT_CODES["preempted"]


class ProcessJobs:
    """Runs ``lockstep benchmark training_multigpu`` with one number of ranks after another.

    Args:
        words: of the command line: task and flags, without ``--num_gpus`` and ``--output``.
        program: that takes them.
    """

    def __init__(self, words: Sequence[str], program: Sequence[str] = _PROGRAM) -> None:
        self._command = (*program, *words)

    def run(self, num_gpus: int, path: Path) -> Bundle:
        """Run one job to its end and return its bundle. What it prints goes into a file beside that.

        The first Ctrl-C asks the job to stop, the second kills it; either ends the sweep, when the job has ended.

        Raises:
            UsageError: the job says that it can't be, or its bundle can't be read.
            RunError: the job failed, or wrote no bundle.
            SweepInterruptedError: by Ctrl-C.
            SweepPreemptedError: by SIGTERM, SIGUSR1 or SIGHUP.
        """
        log = path.with_suffix(".log")
        target = ("--num_gpus", str(num_gpus), "--output", str(path))
        with log.open("wb") as output:
            code, heard = run_process((*self._command, *target), output.fileno())
        if heard is not None:
            is_users = heard == signal.SIGINT
            kind: type[LockstepError] = SweepInterruptedError if is_users else SweepPreemptedError
            raise kind(f"the sweep was {'interrupted' if is_users else 'preempted'} at --num_gpus {num_gpus}")
        if code == 0 and exists(path):
            return read_bundle(path)
        end = f"by {signal_name(-code)}" if code < 0 else f"with exit code {code}"
        failed = UsageError if code == UsageError.exit_code else RunError
        raise failed(f"the job of --num_gpus {num_gpus} ended {end}: {said(log)} (all that it printed is in {log})")


def run_process(command: Sequence[str], output: int) -> tuple[int, signal.Signals | None]:
    """Run a process to its end; return its exit code, and the first signal that this process got meanwhile.

    The process has a session of its own, so that Ctrl-C in the terminal reaches this process alone, which hands it on.
    It ends with this process, however that ends.

    Args:
        command: its words.
        output: file descriptor for what it prints.
    """
    signals: deque[signal.Signals] = deque()
    first = None
    parent = os.getpid()
    with _caught(signals):
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=lambda: end_with_parent(signal.SIGTERM, parent),
        )
        while process.poll() is None:
            while signals:
                number = signals.popleft()
                first = first or number
                process.send_signal(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(POLL_S)
        first = first or (signals.popleft() if signals else None)
    return process.returncode, first


def said(log: Path) -> str:
    """Return what a job printed last of all that is to be read: its error if it names one, else its last line."""
    with contextlib.suppress(OSError), log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
        errors = [line.partition(_ERROR)[2] for line in lines if _ERROR in line]
        if errors or lines:
            return (errors or lines)[-1]
    return "it has printed nothing"


@contextlib.contextmanager
def _caught(signals: deque[signal.Signals]) -> Iterator[None]:
    """Collect signals instead of ending by them."""

    def note(number: int, frame: FrameType | None) -> None:
        signals.append(signal.Signals(number))

    before = {number: signal.signal(number, note) for number in _LISTENED_TO}
    try:
        yield
    finally:
        for number, handler in before.items():
            # None: a handler that was not installed from Python, which Python cannot put back either
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
