"""What ranks and torchrun's agent have left in a launch's folder, kept in mind: systems tidy up temporary files."""

import contextlib
import os
from pathlib import Path

from lockstep.core.errors import RunError
from lockstep.core.files import write_atomic
from lockstep.launch.logs import LOGS_FILE, Say

_PATTERNS = (LOGS_FILE, "run_path", "final", "rank_*.pid", "rank_*.joined")


class Kept:
    """Puts back what told of the running start of the ranks, if it has gone.

    The ranks' beats can't be put back: each rank goes on beating into a file that nobody finds any more.

    Args:
        folder: of the attempt.
        say: shows a line.
    """

    def __init__(self, folder: Path, say: Say) -> None:
        self._folder = folder
        self._say = say
        self._files: dict[str, bytes] = {}
        self._has_warned = False

    def look(self) -> None:
        """Note what is there, or put it back; called now and then."""
        if (self._folder / LOGS_FILE).exists():
            self._files = self._read()
        elif self._files:  # once it is there nothing else removes it
            if not self._has_warned:
                self._has_warned = True
                self._say(
                    f"lockstep: warning: somebody has tidied up {self._folder}, which this job uses; until its ranks "
                    "start again, only those that end or are stopped are noticed",
                    True,
                )
            self._put_back()

    def _read(self) -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        for path in (path for pattern in _PATTERNS for path in self._folder.glob(pattern)):
            with contextlib.suppress(OSError):
                found[path.name] = path.read_bytes()
        return found

    def _put_back(self) -> None:
        with contextlib.suppress(OSError, RunError):
            for folder in (self._folder.parent, self._folder):
                folder.mkdir(mode=0o700, exist_ok=True)
                if folder.lstat().st_uid != os.getuid():
                    return  # others may make folders among the temporary files too
            for name, content in self._files.items():
                write_atomic(self._folder / name, content, durable=False)
