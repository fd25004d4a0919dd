"""Running the command line as a user does: processes of their own, with few envs so that they are quick."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, TypeVar

import psutil  # type: ignore[import-untyped]
import pytest

from lockstep.cli.main import main

SMALL = (
    "--num_envs", "16", "--agent.num_steps_per_env", "8", "--agent.num_learning_epochs", "2",
    "--agent.actor_hidden_dims", "16", "--agent.critic_hidden_dims", "16", "--agent.recurrent_hidden_dim", "8",
    "--evaluation.interval", "0", "--logger", "none", "--device", "cpu",
)  # fmt: skip
SMALL_WITHOUT_MEMORY = (*SMALL[:10], *SMALL[12:])
"""For learners that know of no memory, and refuse its width."""
TIMEOUT_S = 180.0
"""For whatever has no bound of its own."""
LOGS = Path("logs")
_ROOT = Path(__file__).parents[2]
OF_TESTS = {"PYTHONPATH": os.pathsep.join((str(_ROOT), str(_ROOT / "src")))}
"""Variables of a process that runs a module of the tests."""
_NUM_JAX_DEVICES = "--xla_force_host_platform_device_count="

T = TypeVar("T")


def own_environment(changes: Mapping[str, str]) -> dict[str, str]:
    """Return this test's environment with changes, without how many devices JAX has in the process of the tests."""
    flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if not flag.startswith(_NUM_JAX_DEVICES)]
    return os.environ | {"XLA_FLAGS": " ".join(flags)} | dict(changes)


def lockstep(*arguments: str, timeout_s: float = 120.0, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``lockstep`` with the arguments to its end."""
    return subprocess.run(
        [sys.executable, "-m", "lockstep", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=own_environment(environment),
        check=False,
    )


class Command:
    """A command at work in the current folder, in a session of its own.

    Args:
        arguments: of the module.
        module: that Python runs.
        stdout: as ``subprocess`` has it.
        stderr: the same.
        environment: what differs from that of the test.
    """

    def __init__(
        self,
        *arguments: str,
        module: str = "lockstep",
        stdout: int | IO[str] = subprocess.PIPE,
        stderr: int | IO[str] = subprocess.PIPE,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdout=stdout,
            stderr=stderr,
            text=True,
            env=own_environment(environment or {}),
            start_new_session=True,
        )

    def wait_for(self, what: Callable[[], T | None]) -> T:
        """Wait for something that happens while the command is at work, and return it."""

        def found_or_ended() -> T | None:
            found = what()
            assert found or self.process.poll() is None, self.end()
            return found

        return wait_for(found_or_ended)

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self) -> tuple[int, str, str]:
        """Wait for the end; return the exit code and what was printed on stdout and stderr."""
        output, errors = self.process.communicate(timeout=TIMEOUT_S)
        return self.process.returncode, output or "", errors or ""

    def kill(self) -> None:
        """End it and all that it has started, whatever state they are in; none of them is left afterwards."""
        if self.process.poll() is None:
            launcher = psutil.Process(self.process.pid)
            processes = [launcher, *launcher.children(recursive=True)]
            for process in processes:
                process.kill()
            psutil.wait_procs(processes[1:], TIMEOUT_S)
        self.process.communicate()


def wait_for(what: Callable[[], T | None], name: str = "it", timeout_s: float = TIMEOUT_S) -> T:
    """Return what a call returns, once that is something.

    Args:
        what: called again and again.
        name: of what is waited for.
        timeout_s: after which the test fails.
    """
    deadline = time.monotonic() + timeout_s
    while not (found := what()):
        assert time.monotonic() < deadline, f"waited in vain for {name}"
        time.sleep(0.02)
    return found


@contextlib.contextmanager
def started_together(
    commands: Sequence[Sequence[str]], environments: Sequence[dict[str, str]]
) -> Iterator["list[subprocess.Popen[str]]"]:
    """Start processes of Python that need one another, each with variables of its own; in the end all go."""
    started = [
        subprocess.Popen(
            [sys.executable, *command],
            env=own_environment(environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for command, environment in zip(commands, environments, strict=True)
    ]
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


def processes_here() -> list[psutil.Process]:
    """Return the processes whose working folder is this test's, but for the test itself."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.cwd() == str(Path.cwd()):
                found.append(process)
        except (psutil.Error, FileNotFoundError):  # which psutil itself lets through where a process has just gone
            continue
    return found


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


# --- runs ----------------------------------------------------------------------------------------------------------


def train_small(task: str, *arguments: str) -> Path:
    """Train in this process with few envs in ``logs``; return the run directory, the only one of its task."""
    assert main(["train", task, *SMALL, *arguments]) == 0
    return only_run(task)


def only_run(task: str, log_root: Path = LOGS) -> Path:
    """Return the one run directory of a task."""
    (run,) = [path for path in (log_root / task).iterdir() if not path.name.startswith(".")]
    return run


def num_recorded(run: Path) -> int:
    """Return of how many iterations there are metrics, also while those of another are being written."""
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def metrics_of(run: Path) -> list[dict[str, Any]]:
    """Return what was recorded of every iteration."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def progress_of(run: Path) -> dict[str, Any]:
    """Return what ``progress.json`` says."""
    found: dict[str, Any] = json.loads((run / "progress.json").read_text())
    return found


def attempts_of(run: Path) -> list[dict[str, Any]]:
    """Return what ``run.json`` says of every attempt."""
    found: list[dict[str, Any]] = json.loads((run / "run.json").read_text())["attempts"]
    return found


def untimed(records: Sequence[dict[str, Any]]) -> list[dict[str, float]]:
    """Return what was recorded but for times, with -1 for what has no value."""
    timed = ("time/", "wall_s", "steps_per_s")
    return [
        {name: -1.0 if value is None else value for name, value in record.items() if not name.startswith(timed)}
        for record in records
    ]


def assert_same_curve(run: Path, expected: Sequence[dict[str, Any]]) -> None:
    """The run has recorded the same iterations, and the same numbers to 1e-6."""
    found = untimed(metrics_of(run))
    assert [record["iteration"] for record in found] == [record["iteration"] for record in expected]
    for one, other in zip(found, untimed(expected), strict=True):
        assert one == pytest.approx(other, rel=1e-6, abs=1e-6)
