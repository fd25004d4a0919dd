"""Carrying out a plan on this node: torchrun's agent as a child, signals handed on, and nothing left at the end."""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType

from lockstep.core.blame import process_state
from lockstep.core.errors import UsageError
from lockstep.core.interrupts import EXIT_CODES, StopReason
from lockstep.core.outcome import LAUNCHER_PID, mark_final, read_pid, read_run
from lockstep.core.process_control import adopt_orphans, catches
from lockstep.launch.ends import exit_code, is_meeting, read_end
from lockstep.launch.failures import Restarts, keep_report, mark_run, note_stop, ways_on
from lockstep.launch.logs import Follower, Say, read_attempt_logs
from lockstep.launch.memory import num_oom_kills
from lockstep.launch.patience import WRITE_S
from lockstep.launch.plan import Plan
from lockstep.launch.processes import end_job, reap_orphans, remove_leftovers, send, workers
from lockstep.launch.report import Report, report
from lockstep.launch.screen import Screen
from lockstep.launch.waiting import Waiting
from lockstep.launch.watch import Watch

POLL_S = 0.05
GRACE_S = 10.0
"""How long processes that are left when the job is over may take to end by themselves."""
STRANDED_GRACE_S = 2.0
"""As that, for those of which it is known that they don't."""
KILL_WAIT_S = 5.0
"""How long torchrun's agent may take to be gone when it was killed."""

_CAUGHT = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGTSTP)


def launch(plan: Plan, say: Say) -> int:
    """Start what a plan says, see it through, and return the job's exit code on this node.

    The first SIGINT makes all ranks save and stop, the second ends them at once. SIGTERM, SIGUSR1 and SIGHUP make them
    save and stop as preempted. The ranks of a script get the signals as they are. SIGTSTP stops nothing, since it would
    stop the launcher alone.

    Args:
        plan: of the launch.
        say: shows a line; it is called in a thread of its own, and may hang.

    Raises:
        UsageError: the folder for the logs can't be made.
        OSError: nor that for the launch.
    """
    adopt_orphans()
    remove_leftovers(plan.folder.parent)
    signals: deque[signal.Signals] = deque()
    with contextlib.ExitStack() as catching:
        catching.enter_context(_caught(signals))  # before there is a folder, which has to go again
        plan.folder.mkdir(mode=0o700)
        needs_logs = False
        try:
            plan.attempt_dir.mkdir()
            _make_log_dir(plan.log_dir)
            with Screen(say) as screen:
                job = _Launch(plan, screen.say, screen.has_room, signals)
                code, told = job.run()
                needs_logs = told.needs_logs
                catching.close()
                _tell(plan, code, told, screen.say, job.was_forced)
        finally:
            shutil.rmtree(plan.attempt_dir if needs_logs else plan.folder, ignore_errors=True)
            with contextlib.suppress(OSError):
                plan.folder.rmdir()  # it is empty where the user chose another place for the logs
    return code


def _make_log_dir(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"log_dir {path} can't be made ({error.strerror}); choose another --log_dir") from None


def _tell(plan: Plan, code: int, told: Report, say: Say, was_forced: bool) -> None:
    """Say how the job ended, and leave word of it in the run directory."""
    for line in told.lines:
        say(line, True)
    if was_forced:
        status: StopReason = "interrupted" if code == EXIT_CODES["interrupted"] else "preempted"
        if left := note_stop(plan, status):
            say(f"lockstep: {left}", True)
    elif _note_failure(plan, code, told, say):
        for line in ways_on(plan, code, told):
            say(line, True)


def _note_failure(plan: Plan, code: int, told: Report, say: Say) -> bool:
    """Leave word of a failure in the run directory; say, and return False, if that does not answer."""
    is_noted = keep_report(plan, told)
    if is_noted and code not in (0, 2, *EXIT_CODES.values()):
        is_noted = mark_run(plan, told.reason or f"the job ended with exit code {code}", told.knows_cause)
    if not is_noted:
        run = read_run(plan.attempt_dir)
        say(f"lockstep: warning: {run} did not answer within {WRITE_S:.0f} s; the failure is not noted there", True)
    return is_noted


class _Launch:
    """One launch, from the start of the agent to the end of every process of the job."""

    def __init__(
        self,
        plan: Plan,
        say: Say,
        has_room: Callable[[bool], bool] = lambda patiently: True,
        signals: deque[signal.Signals] | None = None,
    ) -> None:
        self._plan = plan
        self._say = say
        self._follower = Follower(plan.attempt_dir, plan.teed, say, has_room)
        self._signals = deque[signal.Signals]() if signals is None else signals
        self._taken: set[int] = set()
        self._in_haste = False
        self._trained: int | None = None
        """The process of local rank 0 once it could be asked to stop."""
        self._forced_code: int | None = None
        """What the launcher returns if it has ended the job itself."""
        self._num_oom_kills = num_oom_kills()

    @property
    def was_forced(self) -> bool:
        """Whether the launcher has ended the job itself, because it was told to and no rank could do so."""
        return self._forced_code is not None

    def run(self) -> tuple[int, Report]:
        """Return the exit code and what is to be said about it."""
        plan = self._plan
        environment = {name: value for name, value in os.environ.items() if name not in plan.removed}
        environment |= {**plan.added, LAUNCHER_PID: str(os.getpid())}
        # In a session of its own, so that Ctrl-C in the terminal reaches the launcher alone.
        agent = subprocess.Popen(plan.command, env=environment, start_new_session=True)
        watch = Watch(plan, agent.pid, say=self._say)
        try:
            self._announce()
            waiting = Waiting(plan, self._say)
            restarts = Restarts(plan, self._say, watch)
            while agent.poll() is None and self._forced_code is None and not watch.is_stranded:
                self._follower.follow()
                self._note_progress()
                waiting.look()
                restarts.look()
                watch.look()
                reap_orphans(agent.pid)
                while self._signals and self._forced_code is None:
                    self._take(self._signals.popleft(), agent.pid)
                time.sleep(POLL_S)
        finally:
            is_lost = watch.is_stranded and not watch.agent_is_stopped  # ranks that have lost their agent save
            grace_s = STRANDED_GRACE_S if is_lost else GRACE_S
            left = self._end_all(agent, grace_s, agent_hears=not watch.agent_is_stopped)
        self._follower.follow(to_the_end=True)
        agent_code = -signal.SIGKILL if agent.returncode is None else agent.returncode
        code, told = self._verdict(agent_code, watch)
        if left:
            warning = f"lockstep: warning: these processes can't be ended: {', '.join(map(str, left))}"
            told = replace(told, lines=(*told.lines, warning))
        return code, told

    def _verdict(self, agent_code: int, watch: Watch) -> tuple[int, Report]:
        if self._forced_code is not None:
            return self._forced_code, Report()
        folder = self._plan.attempt_dir
        verdicts = watch.verdicts(read_attempt_logs(folder).restart)
        was_short = (num_oom_kills() or 0) > (self._num_oom_kills or 0)
        end = read_end(folder, agent_code, verdicts, was_short_of_memory=was_short)
        end = replace(end, agent_trouble=watch.agent_trouble)
        code = exit_code(end, self._plan.work.is_script)
        asked_for = code - 128 in self._taken  # it ended by the very signal that it was sent
        return code, Report() if asked_for else report(end, self._plan)

    def _announce(self) -> None:
        rendezvous = self._plan.rendezvous
        if rendezvous.num_nodes > 1:
            which = "this node" if rendezvous.node_rank is None else f"node {rendezvous.node_rank}"
            where = f"{rendezvous.count} meet {rendezvous.description}"
            self._say(f"lockstep: {where}; {which} waits for the others", True)

    def _first_worker(self) -> int | None:
        """Return the process of local rank 0, None before it has told which one it is."""
        logs = read_attempt_logs(self._plan.attempt_dir)
        rank = next((log.rank for log in logs.ranks if log.local_rank == 0), None)
        return None if rank is None else read_pid(self._plan.attempt_dir, rank)

    def _note_progress(self) -> None:
        if self._plan.work.is_script or (self._trained is not None and self._plan.max_restarts == 0):
            return
        pid = self._first_worker()
        if pid is not None and pid != self._trained and catches(pid, signal.SIGUSR1):
            self._trained = pid

    def _take(self, number: signal.Signals, agent_pid: int) -> None:
        """Do what a signal to the launcher asks for."""
        if number == signal.SIGTSTP:
            means = "ends it" if self._plan.work.is_script else "makes it save and stop"
            self._say(f"lockstep: Ctrl-Z does not stop a job of several processes; Ctrl-C {means}", True)
        elif self._is_enough(number):
            self._forced_code = EXIT_CODES["interrupted"]
            self._say("lockstep: killed", True)
        elif self._plan.work.is_script:
            self._hand_on(number, agent_pid)
        else:
            self._ask_to_stop(number, agent_pid)

    def _is_enough(self, number: signal.Signals) -> bool:
        """Note a signal, and return whether the user has lost patience: a second Ctrl-C."""
        self._in_haste |= number == signal.SIGINT and number in self._taken
        self._taken.add(number)
        return self._in_haste

    def _hand_on(self, number: signal.Signals, agent_pid: int) -> None:
        mark_final(self._plan.attempt_dir)  # ranks that end by it are not to be started again
        ranks = workers(agent_pid, self._plan.job)
        if not ranks:
            self._forced_code = EXIT_CODES["interrupted" if number == signal.SIGINT else "preempted"]
            self._say("lockstep: stopped before the script began", True)
        for pid in ranks.values():
            send(pid, number, group=True)

    def _ask_to_stop(self, number: signal.Signals, agent_pid: int) -> None:
        """Ask one rank to stop, which asks the others. One that is not training yet has nothing to save."""
        mark_final(self._plan.attempt_dir)  # a rank that fails on the way out is no reason to start them all again
        logs, started = read_attempt_logs(self._plan.attempt_dir), workers(agent_pid, self._plan.job).get(0)
        pid = self._first_worker() or started
        is_gone = pid is not None and process_state(pid) == "gone"
        if is_gone and (started is not None or is_meeting(self._plan.attempt_dir, logs.restart)):
            pid = started  # one that has failed is not on its way out, as one that is through: another takes its place
        if pid is not None and catches(pid, signal.SIGUSR1):
            send(pid, signal.SIGINT if number == signal.SIGINT else signal.SIGUSR1)
            if number == signal.SIGINT:
                self._say("lockstep: stopping after this iteration; Ctrl-C again ends it now", True)
        elif pid is None or pid != self._trained:  # else it is through, and on its way out
            self._forced_code = EXIT_CODES["interrupted" if number == signal.SIGINT else "preempted"]
            run = read_run(self._plan.attempt_dir)
            if not self._plan.work.saves:
                self._say("lockstep: stopped; nothing is left of it", True)
                return
            when = "before training began; nothing was saved" if run is None else f"between two starts of {run}"
            self._say(f"lockstep: stopped {when}", True)

    def _end_all(self, agent: subprocess.Popen[bytes], grace_s: float, agent_hears: bool = True) -> list[int]:
        """End every process of the job; return those that can't be ended. An agent that hears nothing is killed."""
        deadline = time.monotonic() + grace_s

        def is_late() -> bool:
            while self._signals:
                self._is_enough(self._signals.popleft())
            return self._in_haste or time.monotonic() > deadline

        if agent.poll() is None:
            agent.terminate()
            while agent_hears and agent.poll() is None and not is_late():
                time.sleep(POLL_S)
            agent.kill()  # nothing happens to one that has ended
        with contextlib.suppress(subprocess.TimeoutExpired):  # one that waits for a disk ends when that answers
            agent.wait(KILL_WAIT_S)
        return end_job(self._plan.job, is_late)


@contextlib.contextmanager
def _caught(signals: deque[signal.Signals]) -> Iterator[None]:
    """Put signals into a queue instead of dying of them. A hang-up that is ignored, as under nohup, stays ignored."""

    def note(number: int, frame: FrameType | None) -> None:
        signals.append(signal.Signals(number))

    caught = [number for number in _CAUGHT if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, note) for number in caught}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
