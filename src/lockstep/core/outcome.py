"""How a rank ended, left in a file for the launcher: torchrun only tells 0 from everything else.

The launcher names a folder in LOCKSTEP_ATTEMPT_DIR. There every rank leaves ``rank_<r>.pid`` when it starts,
``rank_<r>.joined`` when it has met the others and ``outcome_<r>.json`` when it ends. torchrun's agent leaves
``failed_<restart>`` there when it sees that a rank has failed, and the launcher ``verdict_<restart>_<rank>`` before it
kills one. ``final`` means that nothing is to be started again.
"""

import contextlib
import json
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from lockstep.core.errors import RunError
from lockstep.core.files import write_atomic

ATTEMPT_DIR = "LOCKSTEP_ATTEMPT_DIR"
LAUNCHER_PID = "LOCKSTEP_LAUNCHER_PID"
"""Variable by which torchrun's agent knows the launcher, with which it ends."""
FOLLOWS = "another rank failed"
"""How the message of a rank begins that ended because it was told so."""
LOST_A_RANK = "lost another rank in the exchange of"
"""How the message of a rank begins that ended because an exchange broke off."""

_FINAL, _RUN = "final", "run_path"

Status = Literal["finished", "failed", "refused", "preempted", "interrupted"]
_STATUS: dict[int, Status] = {0: "finished", 2: "refused", 75: "preempted", 130: "interrupted"}


@dataclass(frozen=True)
class RankOutcome:
    """How a rank ended, in its own words."""

    rank: int
    exit_code: int
    message: str = ""
    traceback: str = ""
    """Of an exception that nobody expected; one that is worded for the user has none."""
    restart: int = 0
    """How often torchrun had restarted the ranks by then."""
    time_s: float = field(default_factory=time.time)
    """Seconds since 1970."""

    @property
    def status(self) -> Status:
        """The exit code in a word."""
        return _STATUS.get(self.exit_code, "failed")


def write_pid(folder: Path, rank: int, pid: int) -> None:
    """Note the process of a rank.

    Raises:
        RunError: the folder takes no file.
    """
    write_atomic(folder / f"rank_{rank}.pid", f"{pid}\n", durable=False)


def read_pid(folder: Path, rank: int) -> int | None:
    """Return the process of a rank, None if it has not said so yet."""
    try:
        return int((folder / f"rank_{rank}.pid").read_text())
    except (OSError, ValueError):
        return None


def note_joined(rank: int) -> None:
    """Tell the launcher, if there is one, that a rank has met the others. A full disk keeps it from nothing."""
    folder = os.environ.get(ATTEMPT_DIR)
    if folder:
        with contextlib.suppress(RunError):
            write_atomic(Path(folder) / f"rank_{rank}.joined", "", durable=False)


def has_joined(folder: Path, rank: int) -> bool:
    """Return whether a rank has met the others."""
    return (folder / f"rank_{rank}.joined").exists()


_own_run: Path | None = None


def note_run(path: Path) -> None:
    """Tell the launcher, if there is one, in which directory this job trains. A full disk keeps it from nothing."""
    global _own_run
    _own_run = path.absolute()
    folder = os.environ.get(ATTEMPT_DIR)
    if folder:
        with contextlib.suppress(RunError):
            write_atomic(Path(folder) / _RUN, os.fsencode(path.absolute()), durable=False)


def read_run(folder: Path) -> Path | None:
    """Return the run directory of a job, None before it has one. Another host may not see it."""
    with contextlib.suppress(OSError):
        return Path(os.fsdecode((folder / _RUN).read_bytes()))
    return None


def own_run() -> Path | None:
    """Return the run directory that this process trains in, None before it has one."""
    return _own_run


def note_failure(folder: Path, restart: int) -> None:
    """Note that a rank has failed, so that the others know what the SIGTERM means that they are about to get.

    Args:
        folder: of the attempt.
        restart: how often torchrun had restarted the ranks by then.
    """
    with contextlib.suppress(RunError):
        write_atomic(folder / f"failed_{restart}", "", durable=False)


def has_failed(folder: Path, restart: int) -> bool:
    """Return whether a rank of this start of the ranks has failed."""
    return (folder / f"failed_{restart}").exists()


def note_verdict(folder: Path, restart: int, rank: int, words: str) -> None:
    """Note why the launcher is about to kill a rank, so that torchrun's agent does not take the kill for the reason.

    Args:
        folder: of the attempt.
        restart: how often torchrun had restarted the ranks by then.
        rank: that is to end.
        words: what follows the rank's name in a sentence; empty if it is not to blame.
    """
    with contextlib.suppress(RunError):
        write_atomic(folder / f"verdict_{restart}_{rank}", words, durable=False)


def read_verdicts(folder: Path, restart: int) -> dict[int, str]:
    """Return by rank why the launcher has killed ranks of a start, in the words of ``note_verdict``."""
    found: dict[int, str] = {}
    for path in folder.glob(f"verdict_{restart}_*"):
        with contextlib.suppress(OSError, ValueError):
            found[int(path.name.rpartition("_")[2])] = path.read_text(encoding="utf-8")
    return found


def note_final() -> None:
    """Tell torchrun's agent, if it is ours, that the ranks must not be started again, however they end."""
    folder = os.environ.get(ATTEMPT_DIR)
    if folder:
        mark_final(Path(folder))


def mark_final(folder: Path) -> None:
    """Note in the folder of a launch that its ranks must not be started again. A full disk keeps it from nothing."""
    with contextlib.suppress(RunError):
        write_atomic(folder / _FINAL, "", durable=False)


def is_final(folder: Path) -> bool:
    """Return whether the ranks of a launch must not be started again."""
    return (folder / _FINAL).exists()


def forget_launch(folder: Path) -> None:
    """Remove what another launch has left in a folder: a command that was pasted twice has the same."""
    for name in (_FINAL, _RUN):
        with contextlib.suppress(OSError):
            (folder / name).unlink()


def forget_start(folder: Path, restart: int) -> None:
    """Remove what ranks have left of how they ran and ended, before others take their place under the same number.

    That is so where nodes come or go, which torchrun does not count as a restart.
    """
    of_start = (f"failed_{restart}", f"exits_{restart}.json", f"verdict_{restart}_*")
    for pattern in ("outcome_*.json", "rank_*.pid", "rank_*.joined", "beat_*", *of_start):
        for path in folder.glob(pattern):
            with contextlib.suppress(OSError):
                path.unlink()


def write_outcome(folder: Path, outcome: RankOutcome) -> None:
    """Note how a rank ended.

    Raises:
        RunError: the folder takes no file.
    """
    content = {**asdict(outcome), "status": outcome.status}
    write_atomic(folder / f"outcome_{outcome.rank}.json", json.dumps(content, indent=1), durable=False)


def read_outcomes(folder: Path, restart: int = 0) -> dict[int, RankOutcome]:
    """Return by rank how those of an attempt ended that could still say so; earlier attempts are left out."""
    found: dict[int, RankOutcome] = {}
    for path in folder.glob("outcome_*.json"):
        try:
            content = json.loads(path.read_text())
            content.pop("status", None)
            outcome = RankOutcome(**content)
        except (OSError, ValueError, TypeError, AttributeError):
            continue  # whatever it is, no rank of this version wrote it
        if outcome.restart == restart:
            found[outcome.rank] = outcome
    return found
