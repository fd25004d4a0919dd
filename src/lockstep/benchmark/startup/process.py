"""The processes whose start is measured, as each rank starts, watches and ends its own."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from lockstep.benchmark.startup.child import WORDED, Job, ProcessStart
from lockstep.core.errors import RunError, UsageError
from lockstep.core.files import read_json
from lockstep.core.leases import is_old
from lockstep.core.outcome import ATTEMPT_DIR, LAUNCHER_PID
from lockstep.core.process_control import signal_name
from lockstep.distributed import kernel_caches
from lockstep.distributed.topology import ISOLATED, START, identity, is_isolated

CHILD = "lockstep.benchmark.startup.child"
FOLDER_PREFIX = "lockstep-startup-"
"""How the names of folders begin that hold the caches of a benchmark; they go with it."""

_OF_THE_JOB_AROUND = (ATTEMPT_DIR, LAUNCHER_PID, START)
_AGENT_PREFIX = "TORCHELASTIC_"
_COORDINATOR = "JAX_COORDINATOR_ADDRESS"
_JAX_CACHE = "JAX_COMPILATION_CACHE_DIR"
STOPPED_S, IDLE_S = 20.0, 60.0
"""For how long a process may be stopped, or use no processor time, as one does that waits for a stopped rank."""
_NUM_LINES = 4
_LINE_LENGTH = 400


@dataclass(frozen=True)
class Meeting:
    """Where the processes of one start meet, as rank 0 has chosen it."""

    store_port: int
    """On the host of MASTER_ADDR."""
    coordinator_port: int
    """Where JAX's processes meet, if the user has said so."""
    name: str
    """The same for all starts of a benchmark, and of no other."""


def choose_meeting(name: str) -> Meeting:
    """Return a meeting on free ports of this host, which is that of rank 0."""
    with socket.socket() as store, socket.socket() as coordinator:
        for holder in (store, coordinator):
            holder.bind(("", 0))
        return Meeting(store.getsockname()[1], coordinator.getsockname()[1], name)


def new_name() -> str:
    """Return a name for a benchmark that no other has."""
    return f"{FOLDER_PREFIX}{secrets.token_hex(8)}"


def environment_of_start(environment: Mapping[str, str], meeting: Meeting, folder: Path) -> dict[str, str]:
    """Return the variables of a process that is this rank in a job of such processes alone, with caches of its own.

    It has this rank's place, GPU and cores. What Python keeps compiled (``__pycache__``) is as it is.

    Args:
        environment: of this process.
        meeting: where they meet.
        folder: of this process, for caches.
    """
    changed = {
        name: value
        for name, value in environment.items()
        if name not in _OF_THE_JOB_AROUND and not name.startswith(_AGENT_PREFIX)
    }
    if "MASTER_ADDR" in environment:
        changed |= {"MASTER_PORT": str(meeting.store_port), "TORCHELASTIC_USE_AGENT_STORE": "False"}
    if environment.get(_COORDINATOR):
        host = environment[_COORDINATOR].rpartition(":")[0]
        changed[_COORDINATOR] = f"{host}:{meeting.coordinator_port}"
    changed |= kernel_caches.below(folder)
    # The compilers of CUDA and torch, and where JAX keeps programs for a process that is alone.
    changed |= {"CUDA_CACHE_PATH": str(folder / "cuda"), "XDG_CACHE_HOME": str(folder / "user")}
    changed["PYTORCH_KERNEL_CACHE_PATH"] = str(folder / "torch")
    shared = shared_cache(environment, meeting.name)
    if shared is not None:
        changed[_JAX_CACHE] = str(shared)
    if is_isolated(environment):
        changed[ISOLATED] = identity(changed)
    return changed


def shared_cache(environment: Mapping[str, str], name: str) -> Path | None:
    """Return the folder for what JAX compiles that all processes share; None if the user has named none.

    It lies in the user's, which all hosts see.

    Raises:
        UsageError: the user's is no folder of this host.
    """
    chosen = environment.get(_JAX_CACHE)
    if not chosen:
        return None
    if "://" in chosen:
        raise UsageError(f"{_JAX_CACHE} is {chosen}, where no cold start can be made; unset it, or name a folder")
    return Path(chosen).expanduser().absolute() / name


@contextlib.contextmanager
def folder_for_caches(shared: Path | None) -> Iterator[Path]:
    """Yield an empty folder of this process; whatever happens, it and ``shared`` are gone afterwards.

    Raises:
        RunError: no folder can be made.
    """
    _remove_leftovers(Path(tempfile.gettempdir()))
    try:
        folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))
    except OSError as error:
        raise RunError(f"no folder for caches in {tempfile.gettempdir()}: {error.strerror}; set TMPDIR") from None
    try:
        yield folder
    finally:
        for each in (folder, shared):
            if each is not None:
                shutil.rmtree(each, ignore_errors=True)


class Child:
    """A process that goes through one start.

    Args:
        folder: of this process, for files and caches.
        number: of the start, which no other has.
        config: of the training, as plain values.
        environment: of the process.
        profiles: whether it looks at functions.
    """

    def __init__(
        self, folder: Path, number: int, config: dict[str, Any], environment: Mapping[str, str], profiles: bool
    ) -> None:
        self._note, self._result, self._output = (folder / f"{name}_{number}" for name in ("phase", "result", "output"))
        job = Job(os.getpid(), config, profiles, str(self._note), str(self._result))
        path = folder / f"job_{number}.json"
        path.write_text(json.dumps(vars(job)))
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", CHILD, str(path), repr(time.monotonic())],
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                # Of its own, so that Ctrl-C is this process's to deal with, and all that it starts ends with it.
                start_new_session=True,
            )
        self._began_s = self._moved_s = time.monotonic()
        self._cpu_s = 0.0

    @property
    def exit_code(self) -> int | None:
        """Its exit code, minus the signal that ended it, or None while it runs; before ``end``."""
        # It is left where it is, so that nobody else gets its number, which is also that of its group.
        ended = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    @property
    def is_done(self) -> bool:
        """Whether it has come to the end of its first iteration, and ended."""
        return self.exit_code == 0 and self._result.exists()

    def problem(self, timeout_s: float) -> str:
        """Return why nothing will come of it, as what follows its name in a sentence; empty if all is well.

        Args:
            timeout_s: how long it may take.
        """
        code = self.exit_code
        if code is None:
            if stuck := self._stuck():
                return f"{stuck}, in phase {self._phase()}{self._last_words()}"
            if time.monotonic() - self._began_s < timeout_s:
                return ""
            return f"did not come to its end in {timeout_s:.0f} s, in phase {self._phase()}{self._last_words()}"
        if self.is_done:
            return ""
        how = f"was ended by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        return f"{how} in phase {self._phase()}{self._last_words()}"

    def figures(self) -> ProcessStart:
        """Return what it has measured, once it is done."""
        return ProcessStart(**read_json(self._result))

    def end(self) -> None:
        """End it and what it has started, in whatever state they are."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _stuck(self) -> str:
        """Return that it is stopped, or idle, for too long; empty if it is not."""
        is_stopped, cpu_s = False, self._cpu_s
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(self._process.pid)
            is_stopped = process.status() == psutil.STATUS_STOPPED
            cpu_s = sum(process.cpu_times()[:4])
        if cpu_s > self._cpu_s:
            self._cpu_s, self._moved_s = cpu_s, time.monotonic()
        still_s = time.monotonic() - self._moved_s
        if is_stopped and still_s > STOPPED_S:
            return f"is stopped (SIGSTOP) for {still_s:.0f} s"
        return f"has used no processor time for {still_s:.0f} s" if still_s > IDLE_S else ""

    def _phase(self) -> str:
        with contextlib.suppress(OSError):
            return self._note.read_text()
        return "interpreter"

    def _last_words(self) -> str:
        with contextlib.suppress(OSError):
            lines = [line.strip() for line in self._output.read_text(errors="replace").splitlines()]
            last = [line[:_LINE_LENGTH] for line in lines if line][-_NUM_LINES:]
            if last and last[-1].startswith(WORDED):
                return f": {last[-1].removeprefix(WORDED)}"
            return f": {' | '.join(last)}" if last else ""
        return ""


def _remove_leftovers(root: Path) -> None:
    """Remove this user's folders of benchmarks that were killed, once they are a day old."""
    with contextlib.suppress(OSError):
        for folder in root.glob(f"{FOLDER_PREFIX}*"):
            status = folder.lstat()
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and is_old(status.st_mtime):
                shutil.rmtree(folder, ignore_errors=True)
