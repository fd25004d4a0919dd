"""How the ranks of this node ended, which of them decides the exit code, and what is said about it."""

import json
import signal
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.core.interrupts import EXIT_CODES
from lockstep.core.outcome import RankOutcome, read_outcomes
from lockstep.launch.logs import AttemptLogs, last_lines, read_attempt_logs
from lockstep.launch.plan import STDERR, Plan

_LATER_S = 5.0
"""A rank that is killed this long after the first failure was killed by torchrun, because it did not stop."""
_MAX_LINES = 40
_EARLY = "ended early with exit code 0 while the others went on"
_LOST = ("lost another rank in the exchange of", "onnection closed by peer", "onnection reset by peer")
"""What a rank says, in our words or gloo's, when another has gone."""


@dataclass(frozen=True)
class RankEnd:
    """How one rank ended: what its process returned, and what it said itself."""

    rank: int
    local_rank: int
    process_code: int = 0
    """As ``subprocess`` has it: negative for a signal."""
    outcome: RankOutcome | None = None
    pid: int | None = None
    failed_at_s: float = 0.0
    """Seconds since 1970; when torchrun noticed."""
    order: int = 0
    """In which torchrun noticed."""
    stderr: Path | None = None
    ended_at_s: float | None = None
    """Seconds since 1970; when the agent saw that the process had ended by itself, None if torchrun has ended it."""

    @property
    def killed_by(self) -> int:
        """The signal that ended the process before it could say anything; 0 for none."""
        said = self.outcome is not None and self.outcome.exit_code != 0
        return 0 if said or self.process_code >= 0 else -self.process_code

    @property
    def exit_code(self) -> int:
        """The rank's exit code, as a shell has it: 128 + n for signal n."""
        if self.killed_by:
            return 128 + self.killed_by
        if self.outcome is not None and self.outcome.exit_code != 0:
            return self.outcome.exit_code
        return self.process_code

    @property
    def severity(self) -> int:
        """0 is the worst: killed by a signal, failed, refused, interrupted, preempted."""
        if self.killed_by:
            return 0
        return {2: 2, 130: 3, 75: 4}.get(self.exit_code, 1)

    def ended_by_torchrun(self, first_failure_s: float) -> bool:
        """Return whether torchrun ended this rank because another one had failed."""
        late = self.failed_at_s - first_failure_s >= _LATER_S
        return self.killed_by == signal.SIGTERM or (self.killed_by == signal.SIGKILL and late)


@dataclass(frozen=True)
class JobEnd:
    """How the ranks of this node and torchrun's agent ended."""

    ranks: tuple[RankEnd, ...] = ()
    """Those that failed, left word or were seen to end."""
    agent_code: int = 0
    agent_error: str = ""
    """Of torchrun itself, such as a rendezvous that did not come about."""


def read_end(attempt_dir: Path, agent_code: int) -> JobEnd:
    """Return what agent and ranks left in the attempt folder; ``agent_code`` is negative for a signal."""
    logs = read_attempt_logs(attempt_dir)
    try:
        report: dict[str, Any] = json.loads((attempt_dir / "agent.json").read_text())
    except (OSError, ValueError):
        report = {}
    outcomes = read_outcomes(attempt_dir, logs.restart)
    failures = {failure["rank"]: (order, failure) for order, failure in enumerate(report.get("failures", []))}
    exits = {seen["rank"]: seen for seen in report.get("exits", [])}
    ranks = [
        _rank_end(rank, *failures.get(rank, (len(failures), {})), outcomes.get(rank), logs, exits.get(rank, {}))
        for rank in sorted({*failures, *outcomes, *exits})
    ]
    return JobEnd(tuple(ranks), agent_code, report.get("error", ""))


def deciding(ranks: Sequence[RankEnd], is_script: bool) -> RankEnd | None:
    """Return the rank whose exit code is that of the job; None if all ended well.

    A rank that torchrun ended because another had failed decides nothing. Of the others, the worst decides and, of
    several that are as bad, the one that failed first. Ranks of a script have no exit codes that we could compare:
    there it is the first.
    """
    failed = [end for end in ranks if end.exit_code != 0]
    if not failed:
        return None
    first_failure_s = min((end.failed_at_s for end in failed if end.process_code != 0), default=0.0)
    own = [end for end in failed if not end.ended_by_torchrun(first_failure_s)] or failed
    if is_script:
        return min(own, key=lambda end: (end.order, end.rank))
    return min(own, key=_badness)


def exit_code(end: JobEnd, is_script: bool) -> int:
    """Return the exit code of the job on this node."""
    decider = deciding(end.ranks, is_script)
    if decider is not None:
        return decider.exit_code
    if end.agent_code < 0:
        return 128 - end.agent_code
    return end.agent_code


def ended_early(ranks: Sequence[RankEnd]) -> list[RankEnd]:
    """Return the ranks that ended well, and by themselves, while or before others failed."""
    if all(end.exit_code == 0 for end in ranks):
        return []
    return [end for end in ranks if end.exit_code == 0 and end.ended_at_s is not None]


@dataclass(frozen=True)
class Report:
    """What the user is told of the end."""

    lines: tuple[str, ...] = ()
    needs_logs: bool = False
    """A line sends the user to a file of the logs, which must then be kept."""


def report(end: JobEnd, plan: Plan) -> Report:
    """Return what tells the user of a failure which nothing on the screen has told yet."""
    decider = deciding(end.ranks, plan.work.is_script)
    if decider is None:
        return _report_of_agent(end, plan)
    if decider.exit_code in EXIT_CODES.values():
        if end.agent_code >= 0:
            return Report()
        return Report((f"lockstep: warning: {_of_agent(end)}; the ranks saved and stopped",))
    early = ended_early(end.ranks)
    cause = next((one for one in early if _is_cause(one, end.ranks, plan)), None)
    if decider.killed_by in (0, signal.SIGABRT) and cause is not None:
        return _report_of_rank(cause, plan, _EARLY)
    own = _report_of_decider(decider, end.ranks, plan)
    # A rank of a training that has said how it ended is through with it.
    notes = [f"lockstep: warning: {_place(one)} {_EARLY}" for one in early if one.outcome is None]
    return Report((*own.lines, *notes), own.needs_logs)


def _report_of_decider(decider: RankEnd, ranks: Sequence[RankEnd], plan: Plan) -> Report:
    if _was_shown(decider, ranks, plan):
        return Report()
    message = decider.outcome.message if decider.outcome else ""
    if decider.exit_code == 2 and message:
        return Report((f"lockstep: error: rank {decider.rank}: {message}",))
    return _report_of_rank(decider, plan, _what_happened(decider))


def _report_of_rank(end: RankEnd, plan: Plan, what: str) -> Report:
    lines = [f"lockstep: error: {_place(end)} {what}"]
    if plan.streams_on_screen(end.local_rank) & STDERR:
        return Report(tuple(lines))
    lines += [f"  {line}" for line in _last_words(end)]
    if end.stderr is None:
        return Report(tuple(lines))
    return Report((*lines, f"  its full log: {end.stderr.parent}"), needs_logs=True)


def _place(end: RankEnd) -> str:
    process = "" if end.pid is None else f", pid {end.pid}"
    return f"rank {end.rank} (local rank {end.local_rank} on {socket.gethostname()}{process})"


def _is_cause(early: RankEnd, ranks: Sequence[RankEnd], plan: Plan) -> bool:
    """Return whether the others failed because a rank had ended well.

    They say so, or it is one of a training that ended without a word. The ranks of a script may be through at any time.
    """
    if not plan.work.is_script and early.outcome is None:
        return True
    said = [
        text
        for end in ranks
        if end.exit_code != 0
        for text in ([end.outcome.message] if end.outcome else last_lines(end.stderr, _MAX_LINES))
    ]
    return any(words in text for text in said for words in _LOST)


def _rank_end(
    rank: int, order: int, failure: dict[str, Any], outcome: RankOutcome | None, logs: AttemptLogs, seen: dict[str, Any]
) -> RankEnd:
    log = next((log for log in logs.ranks if log.rank == rank), None)
    return RankEnd(
        rank=rank,
        local_rank=failure.get("local_rank", seen.get("local_rank", log.local_rank if log else 0)),
        process_code=failure.get("exit_code", 0),
        outcome=outcome,
        pid=failure.get("pid", seen.get("pid")),
        failed_at_s=failure.get("time_s", outcome.time_s if outcome else 0.0),
        order=order,
        stderr=log.stderr if log else None,
        ended_at_s=seen.get("time_s"),
    )


def _badness(end: RankEnd) -> tuple[int, float, int, int]:
    # The rank's own clock tells the cause from what follows: a rank has noted its failure before its peers notice.
    when_s = end.outcome.time_s if end.outcome and not end.killed_by else end.failed_at_s
    return end.severity, when_s, end.order, end.rank


def _was_shown(decider: RankEnd, ranks: Sequence[RankEnd], plan: Plan) -> bool:
    """Return whether a rank whose stderr is on the screen has said it."""
    for end in ranks:
        if not plan.streams_on_screen(end.local_rank) & STDERR or end.killed_by:
            continue
        if end is decider and (end.local_rank == 0 or end.exit_code == 2):
            return True  # other ranks on the screen are among many: a last line says which it was
        same = (
            end.outcome is not None and decider.outcome is not None and end.outcome.message == decider.outcome.message
        )
        if same and end.exit_code == decider.exit_code:
            return True
    return False


def _what_happened(end: RankEnd) -> str:
    if end.killed_by:
        return f"was killed by {_name(end.killed_by)}"
    if end.outcome is not None and end.outcome.message and not end.outcome.traceback:
        return f"failed: {end.outcome.message}"
    return f"ended with exit code {end.exit_code}"


def _of_agent(end: JobEnd) -> str:
    return f"torchrun's agent was killed by {_name(-end.agent_code)}"


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _last_words(end: RankEnd) -> list[str]:
    if end.outcome is not None and end.outcome.traceback and not end.killed_by:
        return end.outcome.traceback.rstrip().splitlines()[-_MAX_LINES:]
    if end.outcome is not None and end.outcome.message and not end.killed_by:
        return []
    return last_lines(end.stderr, _MAX_LINES)


def _report_of_agent(end: JobEnd, plan: Plan) -> Report:
    if end.agent_code == 0:
        return Report()
    if end.agent_code < 0:
        return Report((f"lockstep: error: {_of_agent(end)}; the ranks were ended with it",))
    log = plan.log_dir / "agent.log"
    reason = end.agent_error or "torchrun's agent failed"
    return Report((f"lockstep: error: {reason}; see {log}",), needs_logs=True)
