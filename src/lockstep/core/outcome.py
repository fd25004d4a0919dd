"""How a rank ended, left in a file for the launcher: torchrun only tells 0 from everything else.

The launcher names a folder in LOCKSTEP_ATTEMPT_DIR. There every rank leaves ``rank_<r>.pid`` when it starts,
``rank_<r>.joined`` when it has met the others and ``outcome_<r>.json`` when it ends.
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
