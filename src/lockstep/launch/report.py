"""What is said of the end of a job: one block that names the rank, its place, and what it left."""

import re
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lockstep.core.blame import where
from lockstep.core.interrupts import EXIT_CODES
from lockstep.core.process_control import signal_name
from lockstep.core.stack_dump import read_main_thread
from lockstep.launch.ends import LOST, JobEnd, RankEnd, deciding, ended_early
from lockstep.launch.logs import last_lines
from lockstep.launch.patience import LOOK_S, answer_within
from lockstep.launch.plan import STDERR, Plan

_MAX_LINES = 40
_FEW_LINES = 10
_LOOK_BACK_BYTES = 1 << 20
_TRACEBACK = "Traceback (most recent call last):"
_ELSEWHERE = "the cause is on another node"
_SHOWN = ", as said above"
_OF_PYTHON = "<frozen runpy>"
_BEGIN = re.compile(r"--- \d{4}-\d\d-\d\dT\S+ \S+ pid (\d+): ")
"""How the line begins that a process puts into its log in the run directory first."""
_EARLY = "ended early with exit code 0 while the others went on"


@dataclass(frozen=True)
class Report:
    """What the user is told of the end."""

    lines: tuple[str, ...] = ()
    needs_logs: bool = False
    """A line sends the user to a file of the logs, which must then be kept."""
    more: tuple[str, ...] = ()
    """What only the copy in the run directory has."""
    said: str = ""
    """What the rank that decides has said itself, where that is on the screen already."""

    @property
    def reason(self) -> str:
        """The first line, without the words before it, and what the screen has shown before."""
        first = self.lines[0].removeprefix("lockstep: error: ").removesuffix(_SHOWN) if self.lines else ""
        return ": ".join(filter(None, (first, self.said)))

    @property
    def knows_cause(self) -> bool:
        """Whether the reason is more than that a rank of another node has gone."""
        return not self.reason.startswith(_ELSEWHERE)


def report(end: JobEnd, plan: Plan) -> Report:
    """Return what tells the user of a failure which nothing on the screen has told yet."""
    decider = deciding(end.ranks, plan.work.is_script)
    if decider is None:
        return _report_of_agent(end, plan)
    if decider.exit_code in EXIT_CODES.values():
        if end.agent_code >= 0 and not end.agent_trouble:
            return Report()
        return Report((f"lockstep: warning: {_of_agent(end)}; the ranks saved and stopped",))
    early = ended_early(end.ranks)
    cause = next((one for one in early if _is_cause(one, end.ranks, plan)), None)
    if decider.killed_by in (0, signal.SIGABRT) and decider.verdict is None and cause is not None:
        return _report_of_rank(cause, plan, f"{_EARLY}{_where(cause, plan)}")
    own = _report_of_decider(decider, end, plan)
    # A rank of a training that has said how it ended is through with it.
    notes = [f"lockstep: warning: {_place(one, plan)} {_EARLY}" for one in early if one.outcome is None]
    return replace(own, lines=(*own.lines, *notes))


def _report_of_decider(decider: RankEnd, end: JobEnd, plan: Plan) -> Report:
    if decider.verdict is not None:
        return _report_of_verdict(decider, plan)
    message = decider.outcome.message if decider.outcome else ""
    if plan.rendezvous.num_nodes > 1 and not decider.killed_by and any(words in message for words in LOST):
        told = f"{_place(decider, plan)} lost a rank there{_where(decider, plan)}"
        words = _SHOWN if _was_shown(decider, end.ranks, plan) else f": {message}"
        return Report((f"lockstep: error: {_ELSEWHERE}, see what its launcher says: {told}{words}",))
    if _was_shown(decider, end.ranks, plan):
        return _place_of_shown(decider, end.ranks, plan)
    if decider.exit_code == 2 and message:
        return Report((f"lockstep: error: rank {decider.rank}: {message}",))
    return _report_of_rank(decider, plan, _what_happened(decider, end, plan))


def _report_of_verdict(end: RankEnd, plan: Plan) -> Report:
    assert end.verdict is not None
    told = f"{end.verdict.in_words()}{_where(end, plan, ', ')}"
    subject = _place(end, plan)
    first = f"lockstep: error: {subject} {told}; it was killed, so that the job ends"
    stack = _text_of(end.stack)
    lines, more = [first], tuple[str, ...]()
    if stack and end.stack is not None:
        calls = _own_calls(read_main_thread(end.stack))[:_MAX_LINES]
        lines += ["  where it was, the innermost call first:", *(f"    {line}" for line in calls)]
        if calls != _own_calls(stack.splitlines()[1:]):  # after a head line
            more = (f"the whole stack of rank {end.rank}:", *stack.splitlines())
    words, needs_logs = _with_log(end, plan, _printed(end, _FEW_LINES))
    return Report((*lines, *words), needs_logs, more)


def _own_calls(lines: Sequence[str]) -> list[str]:
    """Return the lines of a stack but for those of Python's own way to run a module."""
    return [line.strip() for line in lines if _OF_PYTHON not in line]


def _report_of_rank(end: RankEnd, plan: Plan, what: str) -> Report:
    words, needs_logs = _with_log(end, plan, _last_words(end))
    return Report((f"lockstep: error: {_place(end, plan)} {what}", *words), needs_logs)


def _with_log(end: RankEnd, plan: Plan, words: Sequence[str]) -> tuple[list[str], bool]:
    """Return the last words of a rank and where all of them are, nothing if it is on the screen.

    Also return whether that is in files that are gone otherwise. Those of a training need not have anything in them
    that its log in the run directory has not.
    """
    if plan.streams_on_screen(end.local_rank) & STDERR:
        return [], False
    files = end.stderr if end.run_log is None or last_lines(end.stderr, 1) else None
    places = [f"its full log: {end.run_log}"] if end.run_log is not None else []
    places += [f"logs in {files.parent}"] if files is not None else []
    told = [f"  {', '.join(places)}"] if places else []
    return [*(f"  {line}" for line in words), *told], files is not None


def _printed(end: RankEnd, num_lines: int) -> list[str]:
    """Return the last lines that a rank printed."""
    lines = last_lines(end.stderr, num_lines)
    if not lines and end.run_log is not None:
        lines = _of_this_start(end.run_log, end.pid)[-num_lines:]
    return lines or last_lines(end.stdout, num_lines)


def _of_this_start(path: Path, pid: int | None) -> list[str]:
    """Return the last lines of a log in a run directory since its process began, which has a line of its own there.

    One that has ended before it had a log has none: the last such line is that of an earlier start.
    """
    nothing: list[str] = []
    lines = answer_within(LOOK_S, lambda: last_lines(path, sys.maxsize, _LOOK_BACK_BYTES), nothing)
    begins = [(number, match) for number, line in enumerate(lines) if (match := _BEGIN.match(line))]
    if not begins:
        return lines
    number, match = begins[-1]
    return lines[number + 1 :] if pid is None or int(match[1]) == pid else []


def _place_of_shown(decider: RankEnd, ranks: Sequence[RankEnd], plan: Plan) -> Report:
    """Return where a rank failed whose words are on the screen; nothing if others failed alike, or it is not known."""
    if decider.exit_code == 2:
        return Report()
    said = decider.outcome
    message = said.message if said else ""
    is_shared = any(end is not decider and _message(end) == _message(decider) for end in ranks)
    who = "the job ended:" if is_shared else f"rank {decider.rank} said:"
    words = () if said is None else (f"{who} {message}", *said.traceback.splitlines())
    place = _where(decider, plan)
    if not place or is_shared:
        return Report(more=words, said=message)
    return Report((f"lockstep: error: {_place(decider, plan)} failed{place}{_SHOWN}",), more=words, said=message)


def _place(end: RankEnd, plan: Plan) -> str:
    process = "" if end.pid is None else f", pid {end.pid}"
    entry = plan.places[end.local_rank].entry if end.local_rank < len(plan.places) else None
    device = "cpu" if entry is None else f"GPU {entry}"
    return f"rank {end.rank} (local rank {end.local_rank} on {socket.gethostname()}, {device}{process})"


def _where(end: RankEnd, plan: Plan, before: str = " ") -> str:
    """Return where in its work a rank was, after ``before``; nothing if that is not known, or the script's own."""
    if end.beat is None:
        return ""
    if not plan.work.has_phases and end.beat.phase in ("start", "end"):
        return f"{before}in the exchange of {end.beat.exchange}" if end.beat.exchange and end.verdict is None else ""
    return before + (end.verdict.where if end.verdict else where(end.beat))


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
    return any(words in text for text in said for words in LOST)


def _was_shown(decider: RankEnd, ranks: Sequence[RankEnd], plan: Plan) -> bool:
    """Return whether a rank whose stderr is on the screen has said it."""
    for end in ranks:
        if not plan.streams_on_screen(end.local_rank) & STDERR or end.killed_by:
            continue
        if end is decider and (end.local_rank == 0 or end.exit_code == 2):
            return True  # other ranks on the screen are among many: a last line says which it was
        same = end.outcome is not None and decider.outcome is not None and _message(end) == _message(decider)
        if same and end.exit_code == decider.exit_code:
            return True
    return False


def _message(end: RankEnd) -> str | None:
    return end.outcome.message if end.outcome else None


def _what_happened(end: RankEnd, job: JobEnd, plan: Plan) -> str:
    place = _where(end, plan)
    if end.killed_by:
        short = end.killed_by == signal.SIGKILL and job.was_short_of_memory
        memory = " (out of memory: the kernel ended a process of this job's control group for want of it)"
        return f"was killed by {signal_name(end.killed_by)}{memory if short else ''}{place}"
    if end.outcome is not None and end.outcome.message:
        return f"failed{place}: {end.outcome.message}"
    return f"ended with exit code {end.exit_code}{place}"


def _of_agent(end: JobEnd) -> str:
    if end.agent_trouble:
        return f"torchrun's agent {end.agent_trouble}, and was killed"
    return f"torchrun's agent was killed by {signal_name(-end.agent_code)}"


def _last_words(end: RankEnd) -> list[str]:
    if end.outcome is not None and end.outcome.traceback and not end.killed_by:
        log = _of_this_start(end.run_log, end.pid) if end.run_log else last_lines(end.stdout, sys.maxsize)
        printed = _before_traceback(log)
        before = ["the last it printed:", *(f"  {line}" for line in printed)] if printed else []
        return [*end.outcome.traceback.rstrip().splitlines()[-_MAX_LINES:], *before]
    if end.outcome is not None and end.outcome.message and not end.killed_by:
        return []
    return _printed(end, _MAX_LINES if last_lines(end.stderr, 1) else _FEW_LINES)


def _before_traceback(lines: list[str]) -> list[str]:
    """Return the last lines that were printed before a traceback, which may be printed several times."""
    first = next((number for number, line in enumerate(lines) if _TRACEBACK in line), len(lines))
    return lines[max(0, first - _FEW_LINES) : first]


def _text_of(path: Path | None) -> str:
    try:
        return "" if path is None else path.read_text(errors="replace")
    except OSError:
        return ""


def _report_of_agent(end: JobEnd, plan: Plan) -> Report:
    if end.agent_code == 0:
        return Report()
    if end.agent_trouble and end.have_all_told:
        return Report((f"lockstep: warning: {_of_agent(end)}; the ranks had ended well",))
    if end.agent_code < 0 or end.agent_trouble:
        return Report((f"lockstep: error: {_of_agent(end)}; the ranks were ended with it",))
    if end.agent_signal and not end.agent_error:
        name = signal_name(end.agent_signal)
        return Report((f"lockstep: error: torchrun's agent was ended by {name}; the ranks were ended with it",))
    log = plan.log_dir / "agent.log"
    reason = end.agent_error or "torchrun's agent failed"
    return Report((f"lockstep: error: {reason}; see {log}",), needs_logs=True)
