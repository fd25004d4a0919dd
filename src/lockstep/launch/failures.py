"""What outlives a failed job in its run directory, and what is said when torchrun starts the ranks again."""

import contextlib
import os
import socket
from datetime import datetime
from pathlib import Path

from lockstep.core.outcome import FOLLOWS, LOST_A_RANK, read_run
from lockstep.launch.ends import read_end
from lockstep.launch.logs import AttemptLogs, Say, read_attempt_logs
from lockstep.launch.patience import WRITE_S, answer_within
from lockstep.launch.plan import Plan
from lockstep.launch.report import Report, report
from lockstep.launch.watch import Watch

FILE = "failure.txt"
"""In the run directory: what launchers said of failures, the latest at the end."""


def keep_report(plan: Plan, told: Report) -> bool:
    """Copy what is said of a failure into the run directory, if there is one that this host sees.

    The launchers of several nodes may do so at the same time. A disk that takes nothing is no further failure.

    Returns:
        False if the file system of the run directory does not answer.
    """
    run = read_run(plan.attempt_dir)
    if run is None or not (told.lines or told.more):
        return True
    when = datetime.now().astimezone().isoformat(timespec="seconds")
    text = "\n".join([f"{when} on {socket.gethostname()}", *told.lines, *told.more, "", ""])
    return answer_within(WRITE_S, lambda: _append(run / FILE, text), False)


def _append(path: Path, text: str) -> bool:
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(descriptor, text.encode(errors="replace"))  # in one piece, whoever else writes
        finally:
            os.close(descriptor)
    return True


def mark_run(plan: Plan, reason: str, is_cause: bool = True) -> bool:
    """Say in the run's ``progress.json`` that it has failed, if its rank 0 was on this node and could not.

    Args:
        plan: of the launch.
        reason: in one line.
        is_cause: whether it says more than rank 0 that only lost another rank.

    Returns:
        False if the file system of the run directory does not answer.
    """
    run = read_run(plan.attempt_dir)
    has_main = any(log.rank == 0 for log in read_attempt_logs(plan.attempt_dir).ranks)
    if run is None or not has_main:
        return True
    return answer_within(WRITE_S, lambda: _mark(run, reason, (FOLLOWS, LOST_A_RANK) if is_cause else ()), False)


def _mark(run: Path, reason: str, consequences: tuple[str, ...]) -> bool:
    # The import takes a moment that no good end needs, and lockstep may be on the file system that does not answer.
    from lockstep.core.run_directory import mark_failed

    mark_failed(run, reason, consequences)
    return True


class Restarts:
    """Says why ranks that are started again had failed: their successors leave nothing of it.

    Args:
        plan: of the launch.
        say: shows a line.
        watch: knows which ranks it has ended.
    """

    def __init__(self, plan: Plan, say: Say, watch: Watch) -> None:
        self._plan = plan
        self._say = say
        self._watch = watch
        self._logs = AttemptLogs()

    def look(self) -> None:
        """Say what is to be said if the ranks were started again since the last look."""
        if self._plan.max_restarts == 0:
            return
        logs = read_attempt_logs(self._plan.attempt_dir)
        before, self._logs = self._logs, logs
        if not before.ranks or logs.restart == before.restart:
            return
        end = read_end(self._plan.attempt_dir, 1, self._watch.verdicts(before.restart), before)
        told = report(end, self._plan) if end.ranks else Report()
        lines = [line.replace("lockstep: error: ", "lockstep: warning: ", 1) for line in told.lines]
        for line in [*lines, f"lockstep: the ranks start again: restart {logs.restart} of {self._plan.max_restarts}"]:
            self._say(line, True)
        keep_report(self._plan, told)
