"""The end of a process that may be one rank of many: what it says, what it leaves behind, and its exit code."""

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from traceback import format_exception
from types import TracebackType

from lockstep.core.errors import LockstepError, UsageError
from lockstep.core.interrupts import EXIT_CODES
from lockstep.core.outcome import ATTEMPT_DIR, RankOutcome, read_outcomes, write_outcome, write_pid
from lockstep.core.process_control import end_with_parent
from lockstep.distributed import heartbeat
from lockstep.distributed.topology import Topology, from_environment

_GROUPS = ("lockstep.distributed.torch_group", "lockstep.distributed.jax_group")


def end_at_once_on_failure(is_joined: Callable[[], bool]) -> None:
    """End the process right after it has shown an exception that nobody caught, if it is in a group by then.

    The other ranks learn of it only when it is gone, and an ordinary end could wait for them in turn.
    """
    show = sys.excepthook

    def show_and_end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        show(kind, error, trace)
        if is_joined():
            sys.stdout.flush()
            sys.stderr.flush()
            RankExit().leave_word(error)
            heartbeat.note_own_failure()
            heartbeat.end()
            os._exit(1)

    sys.excepthook = show_and_end


class RankExit:
    """Announces a rank's process to the launcher and reports how it ended; without a launcher it does nothing.

    torchrun restarts, or calls a failure, whatever does not end with 0. So a rank that stopped because it was asked to
    ends with 0, and the launcher learns the rest from a file. Under a bare torchrun nobody reads such a file: there
    preemption is 0 too, or torchrun would start the ranks again, and an interruption stays 130.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        try:
            self._topology = from_environment(environment)
        except UsageError:  # the command says so in its own time
            self._topology = Topology()
        attempt_dir = environment.get(ATTEMPT_DIR)
        self._folder = Path(attempt_dir) if attempt_dir else None
        self._under_torchrun = "TORCHELASTIC_RUN_ID" in environment
        self._restart = heartbeat.restart_count(environment)

    @property
    def prefix(self) -> str:
        """What a rank other than 0 puts before its messages, so that it is seen which rank has the trouble."""
        return f"rank {self._topology.rank}: " if self._topology.rank > 0 else ""

    def speaks_of(self, error: LockstepError) -> bool:
        """Return whether this rank shows an error: what all ranks raised alike, rank 0 shows for all."""
        return not (error.shared and self._topology.rank > 0)

    def begin(self) -> None:
        """Tell the launcher which process this rank is, and have the kernel end it if torchrun's agent dies."""
        if self._folder is None:
            return
        end_with_parent(signal.SIGTERM, os.getppid())
        with contextlib.suppress(LockstepError):
            write_pid(self._folder, self._topology.rank, os.getpid())

    def end(self, exit_code: int, message: str = "", traceback: str = "") -> int:
        """Report how this rank ended; return the exit code for the process.

        A rank that fails inside a group does not return from here: it ends at once, since an ordinary end could wait
        for ranks that wait for it.
        """
        code = self._report(exit_code, message, traceback)
        if code not in (0, EXIT_CODES["interrupted"]):
            heartbeat.note_own_failure()
        if code and not traceback and self._is_in_a_group():
            sys.stdout.flush()
            sys.stderr.flush()
            heartbeat.end()
            os._exit(code)
        return code

    def leave_word(self, error: BaseException) -> None:
        """Tell the launcher of an exception that nobody caught, unless this rank has told it how it ended."""
        if self._folder is None or self._topology.rank in read_outcomes(self._folder, self._restart):
            return
        words = str(error) if isinstance(error, LockstepError) else f"{type(error).__name__}: {error}"
        self._report(1, " ".join(words.split()), "".join(format_exception(error)))

    def abort(self, message: str, is_said: bool) -> None:
        """End this process at once, from a thread of its own, with exit code 1.

        Args:
            message: why; what the main thread may have reported already counts for more.
            is_said: to the user too.
        """
        if self._folder is not None and self._topology.rank not in read_outcomes(self._folder, self._restart):
            self._report(1, message, "")
        if is_said:
            heartbeat.say(f"lockstep: error: rank {self._topology.rank} {message}")
        heartbeat.end()
        os._exit(1)

    @staticmethod
    def _is_in_a_group() -> bool:
        return any(name in sys.modules and sys.modules[name].is_joined() for name in _GROUPS)

    def _report(self, exit_code: int, message: str, traceback: str) -> int:
        if self._folder is not None:
            outcome = RankOutcome(self._topology.rank, exit_code, message, traceback, self._restart)
            with contextlib.suppress(LockstepError):
                write_outcome(self._folder, outcome)
                return 0 if exit_code in EXIT_CODES.values() else exit_code
        elif self._under_torchrun and exit_code == EXIT_CODES["preempted"]:
            return 0
        return exit_code
