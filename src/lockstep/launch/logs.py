"""What ranks print into files: followed line by line for the screen, and its end shown when a hidden rank fails."""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from lockstep.launch.plan import STDERR, STDOUT

Say = Callable[[str, bool], None]
"""Shows a line, on stderr if the second argument is true."""

LOGS_FILE = "logs.json"
"""In which torchrun's agent says where the output of its ranks goes."""

_CHUNK_BYTES = 1 << 16
_TAIL_BYTES = 1 << 16


@dataclass(frozen=True)
class RankFiles:
    """Where the output of one rank of this node goes; None for a stream that goes to the screen."""

    local_rank: int
    rank: int
    stdout: Path | None
    stderr: Path | None


@dataclass(frozen=True)
class AttemptLogs:
    """Where the output of all ranks of this node goes, since the last restart."""

    restart: int = 0
    ranks: tuple[RankFiles, ...] = ()


def read_attempt_logs(attempt_dir: Path) -> AttemptLogs:
    """Return what torchrun's agent has written about the logs; nothing before it started the ranks."""
    try:
        content = json.loads((attempt_dir / LOGS_FILE).read_text())
    except (OSError, ValueError):
        return AttemptLogs()
    return AttemptLogs(
        content["restart"],
        tuple(
            RankFiles(
                entry["local_rank"],
                entry["rank"],
                Path(entry["stdout"]) if entry["stdout"] else None,
                Path(entry["stderr"]) if entry["stderr"] else None,
            )
            for entry in content["ranks"]
        ),
    )


def last_lines(path: Path | None, num_lines: int, tail_bytes: int = _TAIL_BYTES) -> list[str]:
    """Return the end of a text file, as far as it is in its last bytes; nothing if it can't be read."""
    if path is None:
        return []
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - tail_bytes))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return text.rstrip().splitlines()[-num_lines:]


class Follower:
    """Shows the lines of teed ranks as they are written, each whole and with its rank before it.

    Args:
        attempt_dir: where torchrun's agent says in which files they are.
        teed: by local rank, the streams to show.
        say: shows a line.
        has_room: whether the screen takes lines, which may be waited for if the argument is true. As long as it does
            not, they stay in their files.
    """

    def __init__(
        self,
        attempt_dir: Path,
        teed: Sequence[int],
        say: Say,
        has_room: Callable[[bool], bool] = lambda patiently: True,
    ) -> None:
        self._attempt_dir = attempt_dir
        self._teed = teed
        self._say = say
        self._has_room = has_room
        self._restart = -1
        self._streams: list[_Stream] = []

    def follow(self, to_the_end: bool = False) -> None:
        """Show what is new, as far as the screen takes it. ``to_the_end`` also shows a last line that has no end."""
        if not any(self._teed):
            return
        self._look_for_files()
        for stream in self._streams:
            self._show(stream, to_the_end)

    def _show(self, stream: "_Stream", to_the_end: bool) -> None:
        for lines in stream.new_lines(to_the_end, self._has_room):
            for line in lines:
                self._say(f"[rank {stream.rank}] {line}", stream.is_stderr)

    def _look_for_files(self) -> None:
        logs = read_attempt_logs(self._attempt_dir)
        if not logs.ranks or logs.restart == self._restart:
            return
        for stream in self._streams:  # of the attempt before
            self._show(stream, to_the_end=True)
        self._restart = logs.restart
        self._streams = [
            _Stream(path, log.rank, number == STDERR)
            for log in logs.ranks
            for number, path in ((STDOUT, log.stdout), (STDERR, log.stderr))
            if self._teed[log.local_rank] & number and path is not None
        ]


class _Stream:
    """A file that grows."""

    def __init__(self, path: Path, rank: int, is_stderr: bool) -> None:
        self.rank = rank
        self.is_stderr = is_stderr
        self._path = path
        self._file: IO[bytes] | None = None
        self._rest = b""

    def new_lines(self, to_the_end: bool, has_room: Callable[[bool], bool]) -> Iterator[list[str]]:
        """Yield what is new piece by piece, as long as there is room for it."""
        if self._file is None:
            try:
                self._file = self._path.open("rb")
            except OSError:
                return
        while has_room(to_the_end) and (chunk := self._file.read(_CHUNK_BYTES)):
            *lines, self._rest = (self._rest + chunk).split(b"\n")
            if len(self._rest) > _CHUNK_BYTES:  # a line without end must not fill the memory
                lines.append(self._rest)
                self._rest = b""
            yield _decoded(lines)
        if to_the_end:
            if self._rest:
                yield _decoded([self._rest])
            self._file.close()
            self._file, self._rest = None, b""


def _decoded(lines: Iterable[bytes]) -> list[str]:
    return [line.decode(errors="replace").rstrip("\r") for line in lines]
