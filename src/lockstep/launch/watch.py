"""The launcher's watch over the ranks of this node: one that keeps the others from going on is ended, and why is kept.

Nothing is concluded from one look alone, since a beat may be read while it is written, nor from the time in which the
launcher itself could not look.
"""

import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from lockstep.core import stack_dump
from lockstep.core.beats import Beat, read_beats
from lockstep.core.blame import Kind, ProcessState, Verdict, judge, process_state, seen_since
from lockstep.core.leases import Lease
from lockstep.core.outcome import note_verdict, read_outcomes
from lockstep.core.process_control import environment_of, is_child_with
from lockstep.launch.ends import first_failure_s, is_meeting
from lockstep.launch.kept import Kept
from lockstep.launch.logs import AttemptLogs, RankFiles, Say, read_attempt_logs
from lockstep.launch.plan import JOB, Plan
from lockstep.launch.processes import send, workers

LOOK_S = 1.0
LATE_S = 3.0
"""If the launcher comes this late to a look, everything may have been late."""
SETTLE_S = 10.0
"""How long torchrun's agent gets to end when all its ranks have, and a rank that was killed to be gone."""
ENDING_S = 60.0
"""How long a rank that has said why it failed gets to be gone: libraries may take long to be unloaded."""
MEET_S = 30.0
"""How long it gets to come so far as to meet the others again: a network may be away for a moment."""


class Watch:
    """Looks at the beats of the ranks of this node.

    Args:
        plan: of the launch.
        agent_pid: the process of torchrun's agent.
        clock: ``time.monotonic``, by which ranks beat.
        state_of: what the kernel says of a process.
        say: shows a line.
    """

    def __init__(
        self,
        plan: Plan,
        agent_pid: int,
        clock: Callable[[], float] = time.monotonic,
        state_of: Callable[[int], ProcessState] = process_state,
        say: Say = lambda line, to_stderr: None,
    ) -> None:
        self._plan = plan
        self._agent_pid = agent_pid
        self._clock = clock
        self._state_of = state_of
        self._looked_s = self._awake_since_s = clock()
        self._suspect: tuple[int, Kind] | None = None
        self._stopped_since_s: dict[int, float] = {}
        self._judged: dict[tuple[int, int], Verdict] = {}
        self._followers: set[tuple[int, int]] = set()
        self._killed_s: dict[int, float] = {}
        self._let_alone: set[int] = set()
        self._failed_since_s: dict[tuple[int, int], float] = {}
        self._lease = Lease(plan.attempt_dir)
        self._kept = Kept(plan.attempt_dir, say)
        self._idle_since_s: float | None = None
        self._agent_stopped_since_s: float | None = None
        self.agent_trouble = ""
        """Why the agent must be ended, as what follows its name in a sentence; empty if it need not."""
        self.agent_is_stopped = False
        """Whether it is that: it hears nothing, and its ranks may be well."""
        self.is_stranded = False
        """Whether the job can't end by itself: the agent outstays its ranks, or a rank that was killed does not go."""

    def verdicts(self, restart: int) -> dict[int, Verdict]:
        """Return by rank why ranks were ended, of those that started after so many restarts.

        Left out are those that had first moved on when another rank had failed: they only did not end as they should.
        """
        return {
            rank: verdict
            for (of_restart, rank), verdict in self._judged.items()
            if of_restart == restart and (of_restart, rank) not in self._followers
        }

    def look(self) -> None:
        """End the rank that keeps the others from going on, if it is time to look and there is one."""
        now_s = self._clock()
        if now_s - self._looked_s < LOOK_S:
            return
        if now_s - self._looked_s > LATE_S:
            self._awake_since_s = now_s
            self._stopped_since_s.clear()
            self._suspect = None
        self._looked_s = now_s
        self._lease.renew(now_s)
        self._kept.look()
        logs = read_attempt_logs(self._plan.attempt_dir)
        self._look_at_agent(logs, now_s)
        self._look_at_killed(now_s)
        if self._plan.limits.is_off or not logs.ranks:
            return
        outcomes = read_outcomes(self._plan.attempt_dir, logs.restart)
        failed = {rank for rank, outcome in outcomes.items() if outcome.status in ("failed", "refused")}
        verdict = self._judge(logs, failed, now_s)
        suspect = None if verdict is None else (verdict.pid, verdict.kind)
        if verdict is not None and suspect == self._suspect:
            failed_s = first_failure_s(self._plan.attempt_dir, logs.restart)
            follows = failed_s is not None and verdict.seconds < time.time() - failed_s
            if self._end(verdict.pid, verdict.rank, logs.restart, "" if follows else verdict.in_words()):
                self._judged[logs.restart, verdict.rank] = verdict
                if follows:
                    self._followers.add((logs.restart, verdict.rank))
            # What the others do in the meantime has not been looked at.
            self._looked_s = self._clock()
        self._suspect = suspect

    def _judge(self, logs: AttemptLogs, failed: Collection[int], now_s: float) -> Verdict | None:
        """Return the rank that is to blame; one that has said why it failed is on its way out, and never is."""
        here = {log.rank for log in logs.ranks}
        beats = {
            rank: seen_since(beat, self._awake_since_s)
            for rank, beat in read_beats(self._plan.attempt_dir).items()
            if beat.restart == logs.restart and rank in here
        }
        self._end_those_that_stay({rank: beats[rank] for rank in failed if rank in beats}, logs.restart, now_s)
        judged = {verdict.pid for verdict in self._judged.values()} | self._let_alone
        beats |= self._of_the_speechless([log for log in logs.ranks if log.rank not in beats], logs.restart, now_s)
        beats = {rank: beat for rank, beat in beats.items() if beat.pid not in judged and rank not in failed}
        return judge(beats, now_s, self._plan.limits, _world_size(beats), self._state_of)

    def _of_the_speechless(self, speechless: Sequence[RankFiles], restart: int, now_s: float) -> dict[int, Beat]:
        """Return beats of stopped ranks as they would have given them, had they come so far as to give any."""
        found: dict[int, Beat] = {}
        running = workers(self._agent_pid, self._plan.job) if speechless else {}
        stopped = {pid for pid in running.values() if self._state_of(pid) == "stopped"}
        self._stopped_since_s = {pid: self._stopped_since_s.get(pid, now_s) for pid in stopped}
        for log in speechless:
            pid = running.get(log.local_rank)
            if pid in stopped:
                since_s = self._stopped_since_s[pid]
                found[log.rank] = Beat(log.rank, restart, pid, since_s, since_s, 0, 0, "start", "")
        return found

    def _end_those_that_stay(self, failed: Mapping[int, Beat], restart: int, now_s: float) -> None:
        """Kill ranks that have said why they failed and are not gone long after."""
        for rank, beat in failed.items():
            since_s = max(self._failed_since_s.setdefault((restart, rank), now_s), self._awake_since_s)
            if now_s - since_s < ENDING_S or beat.pid in self._let_alone:
                continue
            if self._state_of(beat.pid) not in ("gone", "traced") and self._end(beat.pid, rank, restart, ""):
                self._let_alone.add(beat.pid)

    def _end(self, pid: int, rank: int, restart: int, words: str) -> bool:
        """Have a rank write down where it is, and kill it; return False if the process is not that rank's."""
        if not is_child_with(pid, self._agent_pid, JOB, self._plan.job):
            self._let_alone.add(pid)  # the rank has ended, and its number is another process's by now
            return False
        stack_dump.ask(pid, stack_dump.stack_path(self._plan.attempt_dir, rank))
        note_verdict(self._plan.attempt_dir, restart, rank, words)
        send(pid, signal.SIGKILL)
        self._killed_s[pid] = self._clock()
        return True

    def _look_at_agent(self, logs: AttemptLogs, now_s: float) -> None:
        """Note since when the agent has had nothing to do but to end, or has been stopped.

        After ranks that failed it may hang in a store whose host is gone. After ranks that ended well it rightly waits
        for those of other nodes, and before a restart for other nodes to come, once it has said that it does.
        """
        self._look_whether_it_is_stopped(now_s)
        restarts = logs.restart < self._plan.max_restarts
        is_idle = (
            bool(logs.ranks)
            and not (restarts and is_meeting(self._plan.attempt_dir, logs.restart))
            and (first_failure_s(self._plan.attempt_dir, logs.restart) is not None or self._all_have_told(logs))
            and not workers(self._agent_pid, self._plan.job)
        )
        # What slept while the launcher could not look either has not been waited for.
        self._idle_since_s = max(self._idle_since_s or now_s, self._awake_since_s) if is_idle else None
        grace_s = MEET_S if restarts else SETTLE_S
        if self._idle_since_s is not None and now_s - self._idle_since_s >= grace_s:
            self.is_stranded = True
            self.agent_trouble = self.agent_trouble or "did not end with its ranks"

    def _look_whether_it_is_stopped(self, now_s: float) -> None:
        is_stopped = not self._plan.limits.is_off and self._state_of(self._agent_pid) == "stopped"
        since_s = max(self._agent_stopped_since_s or now_s, self._awake_since_s) if is_stopped else None
        self._agent_stopped_since_s = since_s
        if since_s is not None and now_s - since_s >= SETTLE_S:
            self.is_stranded = self.agent_is_stopped = True
            self.agent_trouble = "was stopped by a signal (SIGSTOP or the like)"

    def _all_have_told(self, logs: AttemptLogs) -> bool:
        """Return whether all ranks of a job that is on this node alone have said how they ended."""
        if self._plan.rendezvous.num_nodes > 1:
            return False
        return {log.rank for log in logs.ranks} <= read_outcomes(self._plan.attempt_dir, logs.restart).keys()

    def _look_at_killed(self, now_s: float) -> None:
        self._killed_s = {pid: when_s for pid, when_s in self._killed_s.items() if self._state_of(pid) != "gone"}
        self.is_stranded |= any(now_s - when_s >= SETTLE_S for when_s in self._killed_s.values())


def _world_size(beats: Mapping[int, Beat]) -> int | None:
    """Return how many ranks the job has, as torchrun has told them: nodes may come and go."""
    for beat in beats.values():
        size = environment_of(beat.pid).get("WORLD_SIZE", "")
        if size.isdecimal():
            return int(size)
    return None
