"""Ranks for tests: real processes in one long-lived gloo group, which run functions by name."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]

START_TIMEOUT_S = 60.0
GRACE_S = 3.0
"""How long the other ranks may still take once one has failed: they may be waiting for it for ever."""
_STACK_SIGNAL = signal.SIGUSR2
_STACK_S = 0.5


@dataclass(frozen=True)
class PerRank:
    """An argument that is another one on each rank."""

    values: Sequence[Any]


class RankError(AssertionError):
    """Some ranks raised, died or hung.

    Args:
        function: that they ran.
        world_size: of the pool.
        failures: one line for each rank that failed.
        details: tracebacks and what all ranks printed.
    """

    def __init__(self, function: str, world_size: int, failures: dict[int, str], details: str) -> None:
        lines = [f"rank {rank} of {world_size} {what}" for rank, what in failures.items()]
        super().__init__(f"{function}: {'; '.join(lines)}\n{details}")
        self.failures = failures


class RankServer:
    """The process that ranks are forked from; started when first needed, ended by ``close`` or with this process."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def start(self, world_size: int, folder: Path) -> list[int]:
        """Fork ranks that report at ``folder/socket``; return their process ids."""
        return list(self._ask({"start": world_size, "folder": str(folder)})["pids"])

    def end(self, pids: Sequence[int]) -> list[int]:
        """Kill ranks; return exit codes, minus the signal for those that a signal ended."""
        return list(self._ask({"end": list(pids)})["codes"])

    def close(self) -> None:
        """End the server and all its ranks."""
        if self._process is not None:
            self._process.communicate(timeout=START_TIMEOUT_S)
            self._process = None

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.rank_server"],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                # Libraries that start threads when they are loaded must not: ranks are forked.
                env=os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
                start_new_session=True,  # Ctrl-C is for the tests
            )
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            code, self._process = self._process.wait(), None
            raise RuntimeError(f"the process that forks ranks ended with code {code}; what it said is on stderr")
        answer: dict[str, Any] = json.loads(line)
        return answer


class RankPool:
    """A group of ranks that live from test to test, until one fails: then all are killed and made anew when needed."""

    def __init__(self, server: RankServer, world_size: int) -> None:
        self.world_size = world_size
        self.pids: list[int] = []
        self._server = server
        self._connections: list[Connection[bytes, bytes]] = []
        self._folder = Path()

    def run(self, function: str, *arguments: Any, timeout_s: float = 60.0) -> list[Any]:
        """Call ``function`` (``"tests.multiproc.jobs:name"``) as ``name(comm, *arguments)`` on every rank.

        It runs in this process's working folder and environment, the variables of the launcher apart.

        Args:
            function: module and name.
            arguments: what can be pickled; a ``PerRank`` is replaced by the rank's own value.
            timeout_s: for all ranks to return.

        Returns:
            What each rank returned.

        Raises:
            RankError: a rank raised, died or did not return in time; the pool is ended.
        """
        try:
            if not self.pids:
                self._start()
            for rank, connection in enumerate(self._connections):
                os.truncate(self._output(rank), 0)
                own = [each.values[rank] if isinstance(each, PerRank) else each for each in arguments]
                connection.send_bytes(pickle.dumps((dict(os.environ), str(Path.cwd()), function, pickle.dumps(own))))
            answers = self._collect(timeout_s)
            failed = [rank for rank in range(self.world_size) if answers.get(rank, ("",))[0] != "returned"]
            if failed:
                raise self._error(function, answers, timeout_s)
        except BaseException:
            self.close()
            raise
        print(self._all_printed(), end="")
        return [answers[rank][1] for rank in range(self.world_size)]

    def close(self) -> None:
        """Kill the ranks; the next ``run`` makes new ones."""
        pids, self.pids = self.pids, []
        for connection in self._connections:
            connection.close()
        self._connections = []
        if pids:
            self._server.end(pids)
            shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="ranks_"))
        address = self._folder / "socket"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(address))
            listener.listen(self.world_size)
            listener.settimeout(START_TIMEOUT_S)
            self.pids = self._server.start(self.world_size, self._folder)
            try:
                self._connections = self._accept(listener)
            except (TimeoutError, EOFError) as error:
                raise RuntimeError(f"not all of {self.world_size} ranks started\n{self._all_printed()}") from error
        answers = self._collect(START_TIMEOUT_S)
        if any(answers.get(rank) != "ready" for rank in range(self.world_size)):
            raise RuntimeError(f"the group of {self.world_size} ranks did not form: {answers}\n{self._all_printed()}")

    def _accept(self, listener: socket.socket) -> list[Connection[bytes, bytes]]:
        """Return a connection to each rank, in their order."""
        by_rank: dict[int, Connection[bytes, bytes]] = {}
        while len(by_rank) < self.world_size:
            accepted, _ = listener.accept()
            accepted.setblocking(True)
            connection: Connection[bytes, bytes] = Connection(accepted.detach())
            by_rank[pickle.loads(connection.recv_bytes())] = connection
        return [by_rank[rank] for rank in range(self.world_size)]

    def _collect(self, timeout_s: float) -> dict[int, Any]:
        """Return the answers of the ranks that gave one; ``("died",)`` for one that can't any more."""
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + timeout_s
        while len(answers) < self.world_size:
            open_ones = {each: rank for rank, each in enumerate(self._connections) if rank not in answers}
            ready = wait(list(open_ones), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                try:
                    answer = pickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionError):
                    answer = ("died",)
                answers[open_ones[connection]] = answer
                if answer[0] in ("raised", "died"):
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        return answers

    def _error(self, function: str, answers: dict[int, Any], timeout_s: float) -> RankError:
        hung = [rank for rank in range(self.world_size) if rank not in answers]
        for rank in hung:
            os.kill(self.pids[rank], _STACK_SIGNAL)
        if hung:
            time.sleep(_STACK_S)
        pids, self.pids = self.pids, []
        codes = self._server.end(pids)
        first_failed = any(answer[0] != "returned" for answer in answers.values())
        late = (
            f"did not return within {GRACE_S:g} s of that" if first_failed else f"did not return within {timeout_s:g} s"
        )
        failures, details = {}, ""
        for rank in sorted(range(self.world_size), key=lambda rank: rank not in answers):
            kind, *rest = answers.get(rank, ("hung",))
            if kind == "raised":
                failures[rank] = f"raised {rest[0]}"
                details += f"--- rank {rank}: traceback ---\n{rest[1]}"
            elif kind != "returned":
                failures[rank] = late if kind == "hung" else f"died ({_fate(codes[rank])})"
            details += self._printed(rank)
        shutil.rmtree(self._folder, ignore_errors=True)
        return RankError(function, self.world_size, failures, details)

    def _all_printed(self) -> str:
        return "".join(self._printed(rank) for rank in range(self.world_size))

    def _printed(self, rank: int) -> str:
        text = self._output(rank).read_text(errors="replace") if self._output(rank).exists() else ""
        return f"--- rank {rank}: output ---\n{text.rstrip()}\n" if text else ""

    def _output(self, rank: int) -> Path:
        return self._folder / f"rank_{rank}.txt"


def _fate(code: int) -> str:
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name
