"""How the ranks of this node ended, and which of them decides the exit code."""

import json
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.core.beats import Beat, read_beats
from lockstep.core.blame import Verdict
from lockstep.core.outcome import FOLLOWS, LOST_A_RANK, RankOutcome, read_outcomes, read_run
from lockstep.core.stack_dump import stack_path
from lockstep.launch.logs import AttemptLogs, RankFiles, read_attempt_logs
from lockstep.launch.patience import LOOK_S, answer_within

LOST = (LOST_A_RANK, "onnection closed by peer", "onnection reset by peer")
"""What a rank says, in our words or gloo's, when another has gone."""

_LATER_S = 5.0
"""A rank that is killed this long after the first failure was killed by torchrun, because it did not stop."""


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
    stdout: Path | None = None
    stderr: Path | None = None
    ended_at_s: float | None = None
    """Seconds since 1970; when the agent saw that the process had ended by itself, None if torchrun has ended it."""
    beat: Beat | None = None
    """Its last."""
    verdict: Verdict | None = None
    """Why the launcher has killed it, if it has."""
    run_log: Path | None = None
    """What it printed once the run directory was there, in that directory; None also where that does not answer."""
    stack: Path | None = None
    """Where it wrote down what its threads were at, if it was asked to and could."""

    @property
    def killed_by(self) -> int:
        """The signal that ended the process before it could say anything; 0 for none."""
        said = self.verdict is not None or (self.outcome is not None and self.outcome.exit_code != 0)
        return 0 if said or self.process_code >= 0 else -self.process_code

    @property
    def exit_code(self) -> int:
        """The rank's exit code, as a shell has it: 128 + n for signal n; 1 for one that the launcher had to kill."""
        if self.verdict is not None:
            return 1
        if self.killed_by:
            return 128 + self.killed_by
        if self.outcome is not None and self.outcome.exit_code != 0:
            return self.outcome.exit_code
        return self.process_code

    @property
    def severity(self) -> int:
        """0 is the worst: killed by a signal, failed, refused, interrupted, preempted."""
        if self.killed_by or self.verdict is not None:
            return 0
        return {2: 2, 130: 3, 75: 4}.get(self.exit_code, 1)

    def ended_by_torchrun(self, first_failure_s: float) -> bool:
        """Return whether torchrun ended this rank because another one had failed."""
        if self.verdict is not None:
            return False
        if self.outcome is not None and self.outcome.message.startswith(FOLLOWS):
            return True
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
    agent_signal: int = 0
    """That ended torchrun, as it says itself; 0 for none."""
    agent_trouble: str = ""
    """Why the launcher had to end torchrun, as what follows its name in a sentence; empty if it had not to."""
    have_all_told: bool = False
    """Whether every rank of this node has said how it ended."""
    was_short_of_memory: bool = False
    """Whether the kernel has ended a process here for want of memory meanwhile."""


def read_end(
    attempt_dir: Path,
    agent_code: int,
    verdicts: Mapping[int, Verdict] | None = None,
    logs: AttemptLogs | None = None,
    was_short_of_memory: bool = False,
) -> JobEnd:
    """Return what agent and ranks left in the attempt folder.

    Args:
        attempt_dir: the folder.
        agent_code: what the agent returned, negative for a signal.
        verdicts: why the launcher has killed ranks, by rank.
        logs: of the start of the ranks that is meant; None for the last.
        was_short_of_memory: whether the kernel has ended a process for want of memory.
    """
    is_last = logs is None
    logs = logs or read_attempt_logs(attempt_dir)
    report: dict[str, Any] = (_read(attempt_dir / "agent.json") if is_last else None) or {}
    # The agent may have been killed before it could tell of all.
    seen_to_end = report.get("exits") or _read(_exits_path(attempt_dir, logs.restart)) or []
    failures = {failure["rank"]: (order, failure) for order, failure in enumerate(report.get("failures", []))}
    exits = {seen["rank"]: seen for seen in seen_to_end}
    outcomes = read_outcomes(attempt_dir, logs.restart)
    beats = {rank: beat for rank, beat in read_beats(attempt_dir).items() if beat.restart == logs.restart}
    verdicts = verdicts or {}
    known = sorted({*failures, *outcomes, *exits, *verdicts})
    run_logs = _run_logs(attempt_dir, known)
    ranks = []
    for rank in known:
        order, failure = failures.get(rank, (len(failures), {}))
        verdict, seen, outcome = verdicts.get(rank), exits.get(rank, {}), outcomes.get(rank)
        log = next((log for log in logs.ranks if log.rank == rank), RankFiles(0, rank, None, None))
        stack = stack_path(attempt_dir, rank)
        ranks.append(
            RankEnd(
                rank=rank,
                local_rank=failure.get("local_rank", seen.get("local_rank", log.local_rank)),
                process_code=failure.get("exit_code", seen.get("exit_code", 0)),
                outcome=outcome,
                pid=failure.get("pid", seen.get("pid", verdict.pid if verdict else None)),
                failed_at_s=failure.get("time_s", seen.get("time_s", outcome.time_s if outcome else 0.0)),
                order=order,
                stdout=log.stdout,
                stderr=log.stderr,
                ended_at_s=seen.get("time_s"),
                beat=verdict.beat if verdict else beats.get(rank),
                verdict=verdict,
                run_log=run_logs.get(rank),
                stack=stack if verdict and stack.exists() else None,
            )
        )
    return JobEnd(
        tuple(ranks),
        agent_code,
        report.get("error", ""),
        report.get("signal", 0),
        have_all_told=bool(logs.ranks) and {log.rank for log in logs.ranks} <= outcomes.keys(),
        was_short_of_memory=was_short_of_memory,
    )


def first_failure_s(attempt_dir: Path, restart: int) -> float | None:
    """Return when the first rank of this node failed, in seconds since 1970; None if none is known to have.

    Args:
        attempt_dir: where ranks and agent leave word.
        restart: how often the ranks had been started again.
    """
    said = [one.time_s for one in read_outcomes(attempt_dir, restart).values() if one.status in ("failed", "refused")]
    seen = [one["time_s"] for one in _read(_exits_path(attempt_dir, restart)) or [] if one["exit_code"]]
    return min([*said, *seen], default=None)


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
        return min(own, key=lambda end: (end.order, end.failed_at_s, end.rank))
    return min(own, key=_badness)


def exit_code(end: JobEnd, is_script: bool) -> int:
    """Return the exit code of the job on this node."""
    decider = deciding(end.ranks, is_script)
    if decider is not None:
        return decider.exit_code
    if end.agent_trouble and end.have_all_told:
        return 0
    if end.agent_code < 0:
        return 128 - end.agent_code
    return end.agent_code


def ended_early(ranks: Sequence[RankEnd]) -> list[RankEnd]:
    """Return the ranks that ended well, and by themselves, while or before others failed."""
    if all(end.exit_code == 0 for end in ranks):
        return []
    return [end for end in ranks if end.exit_code == 0 and end.ended_at_s is not None]


def is_meeting(attempt_dir: Path, restart: int) -> bool:
    """Return whether torchrun's agent has come so far as to meet the others again after a start of the ranks.

    Args:
        attempt_dir: where the agent leaves word.
        restart: how often the ranks had been started again by then.
    """
    return (attempt_dir / f"meeting_{restart}").exists()


def _run_logs(attempt_dir: Path, ranks: Sequence[int]) -> dict[int, Path]:
    """Return the logs in the run directory, by rank; none if the file system that it is on does not answer."""
    run = read_run(attempt_dir)
    if run is None:
        return {}
    logs = {rank: run / "ranks" / f"rank_{rank}.log" for rank in ranks}
    return answer_within(LOOK_S, lambda: {rank: log for rank, log in logs.items() if log.is_file()}, {})


def _exits_path(attempt_dir: Path, restart: int) -> Path:
    return attempt_dir / f"exits_{restart}.json"


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def _badness(end: RankEnd) -> tuple[int, bool, float, int, int]:
    # The rank's own clock tells the cause from what follows: a rank has noted its failure before its peers notice.
    when_s = end.outcome.time_s if end.outcome and not end.killed_by else end.failed_at_s
    follows = end.severity > 0 and end.outcome is not None and any(words in end.outcome.message for words in LOST)
    # A rank that is refused leaves the others, who follow: nothing has failed then.
    severity = max(end.severity, 2) if follows else end.severity
    return severity, follows, when_s, end.order, end.rank
