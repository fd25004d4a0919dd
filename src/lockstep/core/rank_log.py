"""``ranks/rank_<r>.log``: a copy of everything that a process prints."""

import contextlib
import io
import os
import socket
import sys
import traceback
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import TextIO, cast


class TolerantStream(io.TextIOBase):
    """A text stream to somewhere that may go away: a closed pipe or a full disk is no reason to stop a training.

    Once ``stream`` refuses, what is written here is dropped.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Pass text on; characters that the stream's encoding lacks become question marks."""
        with self._giving_up():
            if self._stream is not None:
                try:
                    self._stream.write(text)
                except UnicodeEncodeError:
                    encoding = self.encoding
                    self._stream.write(text.encode(encoding, "replace").decode(encoding))
        return len(text)

    def flush(self) -> None:
        """Flush the stream behind."""
        with self._giving_up():
            if self._stream is not None:
                self._stream.flush()

    def isatty(self) -> bool:
        """Tell whether a terminal is behind."""
        return self._stream is not None and self._stream.isatty()

    def fileno(self) -> int:
        """Return the descriptor of the stream behind; raises ``OSError`` when there is none."""
        if self._stream is None:
            raise io.UnsupportedOperation("fileno")
        return self._stream.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The encoding of the stream behind."""
        return getattr(self._stream, "encoding", None) or "utf-8"

    @contextlib.contextmanager
    def _giving_up(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError):  # ValueError: the stream was closed
            stream, self._stream = self._stream, None
            # What the stream still buffers would raise again when the interpreter flushes it at exit.
            if stream is not None:
                with contextlib.suppress(OSError, ValueError), Path(os.devnull).open("wb") as nowhere:
                    os.dup2(nowhere.fileno(), stream.fileno())


class Tee(TolerantStream):
    """A stream whose text also goes to ``copy``."""

    def __init__(self, stream: TextIO | None, copy: TextIO) -> None:
        super().__init__(stream)
        self._copy = copy

    @property
    def behind(self) -> TextIO | None:
        """The stream without the copy."""
        return self._stream

    def write(self, text: str) -> int:
        """Write to both."""
        self._copy.write(text)
        return super().write(text)


class RankLog:
    """A context in which what Python prints to stdout and stderr is also appended to a file.

    Output of C libraries goes to the terminal only. That keeps a crash readable: whoever copied it in this process
    would have died with it. An exception that ends the context is noted with its traceback. With ``path`` None
    nothing is copied.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._file: TextIO | None = None
        self._copy = cast(TextIO, TolerantStream(None))
        self._streams: tuple[TextIO, TextIO] | None = None

    def __enter__(self) -> "RankLog":
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._file = self._path.open("a", buffering=1, encoding="utf-8", errors="backslashreplace")
                self._copy = cast(TextIO, TolerantStream(self._file))
            now = datetime.now().astimezone().isoformat(timespec="seconds")
            self.write_line(f"--- {now} {socket.gethostname()} pid {os.getpid()}: {' '.join(sys.argv)}")
            self._streams = sys.stdout, sys.stderr
            sys.stdout, sys.stderr = (self.copy_of(stream) for stream in self._streams)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception):  # whoever prints it does so after this, and perhaps only its one line
            self.write_line("".join(traceback.format_exception(error)).rstrip())
        if self._streams is not None:
            sys.stdout, sys.stderr = self._streams
            self._streams = None
        if self._file is not None:
            self._copy.flush()
            self._file.close()

    def write_line(self, line: str) -> None:
        """Append a line to the file alone."""
        self._copy.write(f"{line}\n")

    def copy_of(self, stream: TextIO) -> TextIO:
        """Return a stream that writes to ``stream`` and to the file."""
        return cast(TextIO, Tee(stream, self._copy))

    def behind(self, stream: TextIO | None) -> TextIO | None:
        """Return the stream that ``stream`` writes to besides the file, or itself if it is none of ours."""
        return stream.behind if isinstance(stream, Tee) else stream
