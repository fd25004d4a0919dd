"""What outlives a failed job in its run directory, and what is said when torchrun starts the ranks again."""

import contextlib
import os
import shlex
import socket
from datetime import datetime
from pathlib import Path

from lockstep.core.interrupts import EXIT_CODES, StopReason
from lockstep.core.outcome import FOLLOWS, LOST_A_RANK, read_run
from lockstep.launch.ends import read_end
from lockstep.launch.logs import AttemptLogs, Say, read_attempt_logs
from lockstep.launch.patience import LOOK_S, WRITE_S, answer_within
from lockstep.launch.plan import Plan
from lockstep.launch.report import Report, report
from lockstep.launch.watch import Watch

FILE = "failure.txt"
"""In the run directory: what launchers said of failures, the latest at the end."""


_RUN_KEY = "LOCKSTEP_RUN_KEY"
"""Variable by which a job of SLURM's finds its run again: nobody has to name it."""


def keep_report(plan: Plan, told: Report, restart: int | None = None) -> bool:
    """Copy what is said of a failure into the run directory, if there is one that this host sees.

    The launchers of several nodes may do so at the same time. A disk that takes nothing is no further failure.

    Args:
        plan: of the launch.
        told: what is said.
        restart: how often the ranks had been started again; None for the last start.

    Returns:
        False if the file system of the run directory does not answer.
    """
    run = read_run(plan.attempt_dir)
    if run is None or not (told.lines or told.more):
        return True
    when = datetime.now().astimezone().isoformat(timespec="seconds")
    number = read_attempt_logs(plan.attempt_dir).restart if restart is None else restart
    which = f", restart {number} of {plan.max_restarts}" if number else ", first start" if plan.max_restarts else ""
    text = "\n".join([f"{when} on {socket.gethostname()}{which}", *told.lines, *told.more, "", ""])
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
    if run is None or not _has_main(plan):
        return True
    return answer_within(WRITE_S, lambda: _mark(run, reason, (FOLLOWS, LOST_A_RANK) if is_cause else ()), False)


def _has_main(plan: Plan) -> bool:
    return any(log.rank == 0 for log in read_attempt_logs(plan.attempt_dir).ranks)


def _mark(run: Path, reason: str, consequences: tuple[str, ...]) -> bool:
    # The import takes a moment that no good end needs, and lockstep may be on the file system that does not answer.
    from lockstep.core.run_directory import mark_failed

    mark_failed(run, reason, consequences)
    return True


def note_stop(plan: Plan, status: StopReason) -> str:
    """Say in the run's ``progress.json`` that it was ended before it could save, if its rank 0 was on this node.

    Args:
        plan: of the launch.
        status: as the exit code has it.

    Returns:
        What of the run is on the disk, in words; empty before it has a directory.
    """
    run = read_run(plan.attempt_dir)
    if run is None:
        return ""
    has_main = _has_main(plan)
    return answer_within(WRITE_S, lambda: _note_stop(run, status, has_main), f"{run} does not answer")


def _note_stop(run: Path, status: StopReason, has_main: bool) -> str:
    from lockstep.core.checkpoint_files import newest_checkpoint
    from lockstep.core.run_directory import mark_failed
    from lockstep.core.runs import newest_iteration

    newest = newest_checkpoint(run)
    if has_main:
        since = f"nothing saved since iteration {newest_iteration(run)}" if newest else "before the first checkpoint"
        mark_failed(run, f"{status}, {since}", (FOLLOWS, LOST_A_RANK), status)
    return f"the newest checkpoint is {newest}" if newest else f"there is no checkpoint in {run}"


def ways_on(plan: Plan, code: int, told: Report) -> list[str]:
    """Return what is to be said below a block: how the run goes on, and where all blocks are.

    Args:
        plan: of the launch.
        code: with which the job ends.
        told: the block.
    """
    run = read_run(plan.attempt_dir)
    if run is None or not told.lines or code in (0, 2, *EXIT_CODES.values()):
        return []
    blocks = f"  all blocks: {run / FILE}"
    iteration = answer_within(LOOK_S, lambda: _newest(run), None)
    if iteration is None or os.environ.get(_RUN_KEY):
        return [blocks]
    if plan.rendezvous.num_nodes > 1:
        command = f"the same command and --resume {shlex.quote(str(run))} on every node"
    else:
        ranks = f" --num_gpus {plan.num_ranks}" if plan.places[0].entry is None else ""
        command = f"lockstep train_multigpu{ranks} --resume {shlex.quote(str(run))}"
    return [f"  continue with {command} (from iteration {iteration})", blocks]


def _newest(run: Path) -> int | None:
    """Return the iteration of the newest checkpoint, None if there is none."""
    from lockstep.core.checkpoint_files import newest_checkpoint
    from lockstep.core.runs import newest_iteration

    return newest_iteration(run) if newest_checkpoint(run) else None


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
        if not logs.ranks:
            return  # nothing has started yet, or somebody has tidied up
        before, self._logs = self._logs, logs
        if not before.ranks or logs.restart == before.restart:
            return
        end = read_end(self._plan.attempt_dir, 1, self._watch.verdicts(before.restart), before)
        told = report(end, self._plan) if end.ranks else Report()
        lines = [line.replace("lockstep: error: ", "lockstep: warning: ", 1) for line in told.lines]
        for line in [*lines, f"lockstep: the ranks start again: restart {logs.restart} of {self._plan.max_restarts}"]:
            self._say(line, True)
        keep_report(self._plan, told, before.restart)
