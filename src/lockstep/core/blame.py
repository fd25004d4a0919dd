"""Which rank keeps the others of its job from going on, judged by the beats of this host alone.

A rank that waits for others is healthy however long it waits: what is blamed is the rank that they wait for. Never
blamed are a process that a debugger has hold of, one that waits until somebody reads what it prints (a terminal that is
held by Ctrl-S, or a pager), and one that has ended, whose end others see.
"""

import contextlib
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from lockstep.core.beats import DEVICE, Beat, Phase
from lockstep.core.errors import UsageError

HANG_TIMEOUT = "LOCKSTEP_HANG_TIMEOUT_S"
"""Variable with the seconds after which a rank that does not move is stuck; 0 for never."""
DEFAULT_HANG_S = 20.0

_SILENT_S = 10.0
_MIN_SILENT_S = 3.0
"""A rank gives a sign of life every second, if a busy host lets it."""
_SLOW_PHASES: tuple[Phase, ...] = ("compile", "step", "save")
_SLOW_FACTOR = 30.0
"""Compilers and disks take long without a word, and so does an iteration that is one compiled program."""
_LOCK_PHASES: tuple[Phase, ...] = ("compile", "save")
"""Where Python's lock may be held for long, so that no thread gives a sign of life."""
_OUTER_PHASES: tuple[Phase, ...] = ("start", "end")

Kind = Literal["stopped", "silent", "stuck", "parted"]
"""Stopped by a signal; without a sign of life; alive, but its main thread does not move; all ranks wait in vain."""

ProcessState = Literal["running", "stopped", "disk", "screen", "traced", "gone"]
"""``disk`` is a wait that no signal interrupts, for a disk, a network file system or a driver; ``screen`` a wait for
whatever reads what the process prints."""

# The numbers of write and writev (asm/unistd.h) by machine, as /proc/<pid>/syscall has them.
_WRITES = {"x86_64": ("1", "20"), "aarch64": ("64", "66")}.get(os.uname().machine, ())
_SCREEN = ("0x1", "0x2")
_TERMINALS = ("/dev/pts/", "/dev/tty", "/dev/console")


@dataclass(frozen=True)
class Limits:
    """How long a rank may show nothing, in seconds."""

    hang_s: float = DEFAULT_HANG_S
    """For the main thread of a rank; 0 for no limit at all."""
    outer_s: float = math.inf
    """As that, before the training begins and after its end, where a script of the user's may do what it likes."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "Limits":
        """Return the limits that the variable LOCKSTEP_HANG_TIMEOUT_S sets.

        Raises:
            UsageError: it is no number of seconds.
        """
        value = environment.get(HANG_TIMEOUT, "")
        return cls(hang_timeout(value, HANG_TIMEOUT)) if value else cls()

    @property
    def is_off(self) -> bool:
        """Whether nobody is ever blamed."""
        return self.hang_s == 0

    @property
    def silent_s(self) -> float:
        """How long a process may give no sign of life, unless it may be slow."""
        return min(_SILENT_S, max(_MIN_SILENT_S, self.hang_s))

    def for_training(self) -> "Limits":
        """Return limits that also hold before the training begins and after its end."""
        return Limits(self.hang_s, self.hang_s * _SLOW_FACTOR)

    def stuck_s(self, phase: Phase) -> float:
        """Return how long the main thread may stand still in a phase."""
        if phase in _OUTER_PHASES:
            return self.outer_s
        return self.hang_s * (_SLOW_FACTOR if phase in _SLOW_PHASES else 1.0)


@dataclass(frozen=True)
class Verdict:
    """The rank that keeps the others from going on."""

    rank: int
    pid: int
    kind: Kind
    seconds: float
    """Since its last sign of life or, where it gives some, since its main thread moved."""
    beat: Beat
    """Its last."""
    in_disk: bool = False
    """Whether it waits for a disk or a driver."""
    others: str = ""
    """Of ranks that all wait: what the others wait in, if that is something else."""
    is_guilty: bool = True
    """False if all wait in the same exchange: one of them is named, and none is the cause."""

    def in_words(self) -> str:
        """Return what is wrong with the rank, as what follows its name in a sentence."""
        for_s = f"for {self.seconds:.0f} s"
        disk = ", waiting for a disk or a driver" if self.in_disk else ""
        if self.kind == "stopped":
            return f"was stopped by a signal (SIGSTOP or the like) and gave no sign of life {for_s}"
        if self.kind == "silent":
            return f"gave no sign of life {for_s}{disk}"
        if self.kind == "stuck":
            return f"is stuck: its main thread has not moved {for_s}{disk}"
        if not self.is_guilty and self.beat.exchange == DEVICE:
            return f"waits for its device, as all ranks do, and nothing has come of it {for_s}"
        if not self.is_guilty:
            return (
                f"waits, as all ranks do, in the exchange of {self.beat.exchange}, and nothing has arrived {for_s}: "
                "the network or the backend hangs"
            )
        if self.others == self.beat.exchange:
            return f"waits in an earlier exchange of {self.others} than the others, and nobody has moved {for_s}"
        return (
            f"waits in the exchange of {self.beat.exchange} while others wait in that of {self.others}, and nobody has "
            f"moved {for_s}"
        )

    @property
    def where(self) -> str:
        """Where the rank is, without the exchange if ``in_words`` names that."""
        return where(replace(self.beat, exchange="") if self.kind == "parted" else self.beat)


def hang_timeout(value: str, name: str) -> float:
    """Return the seconds in the words of a user.

    Args:
        value: what was given.
        name: of the flag or variable.

    Raises:
        UsageError: no number, or none that a limit can be.
    """
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not (seconds == 0 or 1 <= seconds < math.inf):
        raise UsageError(f"{name} {value!r} must be a number of seconds, at least 1, or 0 for no watch over the ranks")
    return seconds


def where(beat: Beat) -> str:
    """Return where a rank was: iteration, phase, and the exchange it waited in."""
    if beat.phase in _OUTER_PHASES:
        place = f"in phase {beat.phase}"
    elif beat.phase in ("evaluate", "save"):
        place = f"after iteration {beat.iteration}, phase {beat.phase}"
    else:
        place = f"in iteration {beat.iteration + 1}, phase {beat.phase}"
    if beat.exchange == DEVICE:
        return f"{place}, waiting for its device"
    return place + (f", in the exchange of {beat.exchange}" if beat.exchange else "")


def seen_since(beat: Beat, since_s: float) -> Beat:
    """Return a beat as if its rank had moved when the watch over it woke: what slept with it has not been idle."""
    return replace(beat, alive_s=max(beat.alive_s, since_s), moved_s=max(beat.moved_s, since_s))


def process_state(pid: int) -> ProcessState:
    """Return what the kernel says of a process; ``running`` also while it sleeps, ``traced`` under a debugger."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    except OSError:
        return "gone"
    fields = {name: value.split() for name, _, value in (line.partition(":") for line in lines)}
    # proc(5): R running, S sleeping, D uninterruptible, T stopped, t stopped by a tracer, Z and X ended
    letter = (fields.get("State") or ["R"])[0]
    if letter in "ZXx":
        return "gone"
    if letter == "t" or (fields.get("TracerPid") or ["0"])[0] != "0":
        return "traced"
    if letter in "TD":
        return "stopped" if letter == "T" else "disk"
    return "screen" if _waits_for_screen(pid) else "running"


def _waits_for_screen(pid: int) -> bool:
    """Return whether a thread waits in writing to stdout or stderr; False where the kernel does not say.

    Where only a process that may be debugged tells its system call (Yama's ptrace_scope 1: to its ancestors), what its
    threads sleep in is taken for it: a pipe that is full, if stdout or stderr is a pipe, or a terminal, if one of them
    is. The wait for a terminal has the same name as one for the network, so there only the main thread counts.
    """
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                try:
                    call = _system_call(task)
                except PermissionError:
                    if _sleeps_in_writing(task, is_main=task.name == str(pid)):
                        return True
                    continue
                if len(call) > 1 and call[0] in _WRITES and call[1] in _SCREEN:
                    return True
    return False


def _system_call(task: Path) -> list[str]:
    """Return the number and the arguments of the system call that a thread is in."""
    return (task / "syscall").read_text().split()


def _sleeps_in_writing(task: Path, is_main: bool) -> bool:
    function = (task / "wchan").read_text().strip()  # of the kernel, in which the thread sleeps
    outputs = [str((task / "fd" / number).readlink()) for number in ("1", "2")]
    if function.endswith("pipe_write"):  # Linux 6.15 has renamed it to anon_pipe_write
        return any(output.startswith("pipe:") for output in outputs)
    is_for_terminal = function == "n_tty_write" or (function == "wait_woken" and is_main)
    return is_for_terminal and any(output.startswith(_TERMINALS) for output in outputs)


def judge(
    beats: Mapping[int, Beat],
    now_s: float,
    limits: Limits,
    num_ranks: int | None = None,
    state_of: Callable[[int], ProcessState] = process_state,
) -> Verdict | None:
    """Return the rank that the others wait for; None if none is to blame.

    Args:
        beats: the last of each rank of this host, by rank, all of one attempt. Who looks at them must have been awake
            all the while: after a sleep of its own, every rank seems to be late.
        now_s: by ``time.monotonic``.
        limits: for how long nothing is no reason for blame.
        num_ranks: of the whole job, None if it is not known. Ranks that all wait can be judged together only if all of
            them are on this host.
        state_of: what the kernel says of a process.
    """
    if limits.is_off or not beats:
        return None
    # A GPU takes only so many orders ahead: who can give no more of them waits for whoever compiles or saves, perhaps
    # on another host, whose beats are not seen here.
    slow = {rank for rank, beat in beats.items() if beat.phase in _SLOW_PHASES and not beat.exchange}
    is_whole = num_ranks == len(beats)
    found = [
        _judge_one(beat, now_s, limits, state_of, bool(slow - {rank}) or (beat.is_behind_others and not is_whole))
        for rank, beat in beats.items()
    ]
    verdicts = [verdict for verdict in found if verdict is not None]
    if verdicts:
        order: tuple[Kind, ...] = ("stopped", "silent", "stuck")
        return min(verdicts, key=lambda verdict: (order.index(verdict.kind), -verdict.seconds, verdict.rank))
    if is_whole:
        return _judge_all(beats.values(), now_s, limits, state_of)
    return None


def _judge_one(
    beat: Beat, now_s: float, limits: Limits, state_of: Callable[[int], ProcessState], another_may_be_slow: bool
) -> Verdict | None:
    """Return a rank that is to blame whatever the others do."""
    silent_s, still_s = now_s - beat.alive_s, now_s - beat.moved_s
    stuck_after_s = max(limits.stuck_s(beat.phase), limits.hang_s * _SLOW_FACTOR if another_may_be_slow else 0.0)
    is_silent = silent_s >= limits.silent_s
    is_stuck = not beat.exchange and still_s >= stuck_after_s
    if not is_silent and not is_stuck:
        return None
    state = state_of(beat.pid)
    if state in ("gone", "traced", "screen"):
        return None
    if is_silent and state == "stopped":
        return Verdict(beat.rank, beat.pid, "stopped", silent_s, beat)
    # An import or a compiler may keep every other thread of its process from running.
    may_be_slow = beat.phase in (*_LOCK_PHASES, *_OUTER_PHASES)
    if is_silent and silent_s >= (limits.hang_s * _SLOW_FACTOR if may_be_slow else 0.0):
        return Verdict(beat.rank, beat.pid, "silent", silent_s, beat, in_disk=state == "disk")
    # A network file system may be away for minutes. It comes back, and until then no signal would end the process.
    if is_stuck and (state != "disk" or still_s >= limits.hang_s * _SLOW_FACTOR):
        return Verdict(beat.rank, beat.pid, "stuck", still_s, beat, in_disk=state == "disk")
    return None


def _device_s(beat: Beat, limits: Limits) -> float:
    """Return how long a rank may wait where all do; an evaluation on a device is one compiled program, as a step is."""
    is_compiled = beat.phase == "evaluate" and beat.exchange == DEVICE
    return limits.stuck_s("step" if is_compiled else beat.phase)


def _judge_all(
    beats: Iterable[Beat], now_s: float, limits: Limits, state_of: Callable[[int], ProcessState]
) -> Verdict | None:
    """Return the odd one out if all ranks of a job wait for others, and none has moved for long."""
    ranks = sorted(beats, key=lambda beat: beat.rank)
    still_s = min(now_s - beat.moved_s for beat in ranks)
    if not all(beat.exchange for beat in ranks) or still_s < max(_device_s(beat, limits) for beat in ranks):
        return None
    if any(state_of(beat.pid) in ("gone", "traced", "stopped", "screen") for beat in ranks):
        return None
    fewest = min(ranks, key=lambda beat: beat.num_exchanges)
    ahead = [beat for beat in ranks if beat.num_exchanges > fewest.num_exchanges]
    if ahead:
        return Verdict(fewest.rank, fewest.pid, "parted", still_s, fewest, others=ahead[0].exchange)
    usual, _ = Counter(beat.exchange for beat in ranks).most_common(1)[0]
    odd = next((beat for beat in ranks if beat.exchange != usual), None)
    if odd is not None:
        return Verdict(odd.rank, odd.pid, "parted", still_s, odd, others=usual)
    return Verdict(ranks[0].rank, ranks[0].pid, "parted", still_s, ranks[0], is_guilty=False)
