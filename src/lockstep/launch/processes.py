"""The processes of a job: finding every one of them, and ending what is left."""

import contextlib
import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from lockstep.core.leases import is_old
from lockstep.core.process_control import environment_of
from lockstep.launch.plan import ATTEMPT, FOLDER_PREFIX, JOB

_POLL_S = 0.1
_KILL_WAIT_S = 5.0
_MAX_ROUNDS = 5
_FOLDER = re.compile(re.escape(FOLDER_PREFIX) + "([0-9a-f]{32})")


def of_job(job: str) -> list[psutil.Process]:
    """Return the processes of a job but for this one: by their environment, and whatever descends from this process.

    A process may have dropped its environment, or lost its parent. Since the launcher adopts orphans, it can't have
    done both and be missed.
    """
    this = psutil.Process()
    found = {process.pid: process for process in this.children(recursive=True)}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or int(entry.name) in found or int(entry.name) == this.pid:
            continue
        if environment_of(int(entry.name)).get(JOB) == job:
            with contextlib.suppress(psutil.Error):
                found[int(entry.name)] = psutil.Process(int(entry.name))
    return list(found.values())


def end_job(job: str, is_late: Callable[[], bool]) -> list[int]:
    """End every process of a job, first by SIGTERM, once it is late by SIGKILL; return those that stay."""
    for _ in range(_MAX_ROUNDS):  # one that starts others while it is ended needs another round
        left = of_job(job)
        if not left:
            return []
        if not is_late():
            _signal(left, signal.SIGTERM)
        while left and not is_late():
            _, left = psutil.wait_procs(left, timeout=_POLL_S)
        _signal(left, signal.SIGKILL)
        psutil.wait_procs(left, timeout=_KILL_WAIT_S)
    return [process.pid for process in of_job(job)]


def remove_leftovers(where: Path) -> None:
    """Remove what this user's launchers left in a folder when they were killed.

    That is what is a day old and of whose job no process is left here. A launcher that lives, on this host or another,
    touches its folder. Logs that the user was sent to stay: their launch has taken its attempt folder away.
    """
    old: dict[str, Path] = {}
    with contextlib.suppress(OSError):
        for path in where.glob(f"{FOLDER_PREFIX}*"):
            match = _FOLDER.fullmatch(path.name)
            if match and not path.is_symlink() and _is_old(path):
                old[match[1]] = path
    if not old:
        return
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
    alive = {environment_of(pid).get(JOB) for pid in pids}
    for job, path in old.items():
        if job not in alive:
            shutil.rmtree(path, ignore_errors=True)


def _is_old(path: Path) -> bool:
    """Return whether a folder is this user's and nothing was put into it, or its attempt, for a day."""
    with contextlib.suppress(OSError):
        status = path.stat()
        touched_s = max(status.st_mtime, (path / ATTEMPT).stat().st_mtime)
        return status.st_uid == os.getuid() and is_old(touched_s)
    return False


def reap_orphans(agent_pid: int) -> None:
    """Let go of adopted processes that have ended; the agent's end is left for whoever waits for it."""
    with contextlib.suppress(ChildProcessError):
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if ended.si_pid == agent_pid:
                return
            os.waitpid(ended.si_pid, 0)


def workers(agent_pid: int, job: str) -> dict[int, int]:
    """Return the processes of this node's ranks that the agent has started so far, by local rank."""
    found: dict[int, int] = {}
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(agent_pid).children():
            environment = environment_of(child.pid)
            if environment.get(JOB) == job and environment.get("LOCAL_RANK", "").isdecimal():
                found[int(environment["LOCAL_RANK"])] = child.pid
    return found


def send(pid: int, number: signal.Signals, group: bool = False) -> None:
    """Send a signal to a process, or to its whole group if it leads one, as a terminal would."""
    with contextlib.suppress(OSError):
        if group and os.getpgid(pid) == pid:
            os.killpg(pid, number)
        else:
            os.kill(pid, number)


def _signal(processes: list[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(number)
