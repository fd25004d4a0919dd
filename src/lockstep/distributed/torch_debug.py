"""The debug mode: before each operation, do all ranks mean the same one? On with LOCKSTEP_DEBUG_COLLECTIVES=1."""

import contextlib
import json
import os
import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TextIO

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from lockstep.core import beats
from lockstep.core.errors import RunError, UsageError
from lockstep.core.types import Wait
from lockstep.distributed.torch_collectives import Collectives, Work
from lockstep.distributed.wording import name_ranks

VARIABLE = "LOCKSTEP_DEBUG_COLLECTIVES"
TIMEOUT_S = 300.0
"""How long ranks wait for one that does not come."""

_GRACE_S = 5.0  # once two ranks differ: how long to wait for the rest, so that all give the same account
_LONGEST_PAUSE_S = 0.02
_MAX_PENDING_LINES = 1000
_LEAVE = "leave"
_LEAVING = "leaving the group"
# What lies between the caller and us: this folder, torch (hooks) and contextlib (context managers).
_BETWEEN = (
    str(Path(__file__).parent) + os.sep,
    str(Path(torch.__file__).parent) + os.sep,
    str(contextlib.__file__),
)


def is_wanted(environment: Mapping[str, str] = os.environ) -> bool:
    """Tell whether LOCKSTEP_DEBUG_COLLECTIVES asks for the debug mode.

    Raises:
        UsageError: its value is neither 1 nor 0.
    """
    value = environment.get(VARIABLE, "")
    if value not in ("", "0", "1"):
        raise UsageError(f"{VARIABLE} is '{value}'; give 1 to check every collective, 0 not to")
    return value == "1"


@dataclass(frozen=True)
class Operation:
    """What a rank is about to do."""

    sequence: int  # counted from 1
    name: str
    shape: tuple[int, ...]
    dtype: str
    tag: str
    place: str  # file:line of the caller

    def matches(self, other: "Operation") -> bool:
        """Whether both are the same but for the place they are called from."""
        return replace(self, place="") == replace(other, place="")

    def __str__(self) -> str:
        if self.name == _LEAVE:
            return _LEAVING
        return f"{self.name} {self.shape} {self.dtype} '{self.tag}' at {self.place}"

    def encode(self) -> str:
        """Return it as text for the store."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: bytes) -> "Operation":
        """The inverse of ``encode``."""
        fields = json.loads(text)
        return cls(**fields | {"shape": tuple(fields["shape"])})


class CheckedCollectives:
    """``Collectives`` that first agree with all ranks on what comes next, and write it down. Slow: for debugging.

    Every rank publishes its next operation in a store, waits for the others' and compares. In the store, a rank has
    two entries by turns: nobody reaches operation n + 2 before all have read n, so it does not grow.

    Args:
        collectives: that do the work.
        store: of this group alone (prefixed, and never used for another CheckedCollectives before).
        log_path: see ``log_to``; None to keep lines until it is called.
        timeout_s: how long to wait for a rank that does not come.
    """

    def __init__(
        self, collectives: Collectives, store: Store, log_path: Path | None = None, timeout_s: float = TIMEOUT_S
    ) -> None:
        self.rank, self.world_size = collectives.rank, collectives.world_size
        self.device = collectives.device
        self._collectives, self._timeout_s = collectives, timeout_s
        self._board = _Board(store, self.rank, self.world_size)
        self._sequence = 0
        self._last: Operation | None = None  # that all ranks had in common
        self._is_closed = False
        self._log = _Log()
        if log_path is not None:
            self.log_to(log_path)

    def log_to(self, path: Path) -> None:
        """Append every operation to a file from now on, ``collectives_rank_<r>.log`` say, and those so far."""
        self._log.open(path)

    @property
    def num_started(self) -> int:
        """How many operations were started."""
        return self._collectives.num_started

    def all_reduce_(self, tensor: torch.Tensor, tag: str) -> None:
        """Sum a tensor over ranks, in place."""
        self._agree_on("all_reduce", tensor, tag)
        self._collectives.all_reduce_(tensor, tag)

    def start_all_reduce_(self, tensor: torch.Tensor, tag: str) -> Work:
        """Begin to sum a tensor over ranks, in place."""
        self._agree_on("all_reduce", tensor, tag)
        return self._collectives.start_all_reduce_(tensor, tag)

    def broadcast_(self, tensor: torch.Tensor, tag: str) -> None:
        """Overwrite a tensor with rank 0's."""
        self._agree_on("broadcast", tensor, tag)
        self._collectives.broadcast_(tensor, tag)

    def all_gather(self, tensor: torch.Tensor, tag: str) -> torch.Tensor:
        """Return ``(world_size, *tensor.shape)`` on every rank."""
        self._agree_on("all_gather", tensor, tag)
        return self._collectives.all_gather(tensor, tag)

    def gather(self, tensor: torch.Tensor, tag: str) -> torch.Tensor | None:
        """Return ``(world_size, *tensor.shape)`` on rank 0, None on the others."""
        self._agree_on("gather", tensor, tag)
        return self._collectives.gather(tensor, tag)

    def watching(self, tag: str, num_bytes: int) -> contextlib.AbstractContextManager[None]:
        """Pass on to the collectives: of other people's exchanges nothing is known beforehand."""
        return self._collectives.watching(tag, num_bytes)

    def take_waits(self) -> list[Wait]:
        """Return the operations since the last call; the time of agreeing on them does not count."""
        return self._collectives.take_waits()

    def close(self) -> None:
        """Tell ranks that still wait for this one that it has left, and close the log."""
        if self._is_closed:
            return
        self._is_closed = True
        with contextlib.suppress(dist.DistError, RuntimeError):  # rank 0 may have ended, and the store with it
            self._board.publish(self._next(_LEAVE))
        self._log.close()

    def _next(self, name: str, shape: tuple[int, ...] = (), dtype: str = "", tag: str = "") -> Operation:
        self._sequence += 1
        operation = Operation(self._sequence, name, shape, dtype, tag, _place_of_caller())
        self._log.write(f"{operation.sequence} {operation}")
        return operation

    def _agree_on(self, name: str, tensor: torch.Tensor, tag: str) -> None:
        own = self._next(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), tag)
        try:
            self._board.publish(own)
            with beats.exchange(tag):
                met = self._board.meet(own, self._timeout_s)
            silent = [rank for rank in range(self.world_size) if rank not in met]
            past = self._board.read(silent[0], own.sequence - 1) if silent else None
        except (dist.DistError, RuntimeError) as error:
            reason = str(error).partition("\n")[0]
            raise self._stopped(
                f"at collective {own.sequence} rank {self.rank} calls {own} and can't reach the ranks' store any more "
                f"({reason}); rank 0, which keeps it, has ended: look at its log"
            ) from error
        if any(not operation.matches(own) for operation in met.values()):
            # Every rank has then seen all of it, and raises the same line.
            shared = not silent and all(operation.name != _LEAVE for operation in met.values())
            raise self._stopped(self._parting(own.sequence, met, silent), shared)
        if silent:
            raise self._stopped(self._absence(own, silent, past))
        self._last = own

    def _stopped(self, line: str, shared: bool = False) -> RunError:
        self._log.write(line)
        return RunError(line, shared=shared)

    def _parting(self, sequence: int, met: Mapping[int, Operation], silent: list[int]) -> str:
        groups: dict[str, list[int]] = {}
        for rank, operation in met.items():
            groups.setdefault(str(operation), []).append(rank)
        accounts = [_does(ranks, what) for what, ranks in groups.items()]
        if silent:
            accounts.append(f"{name_ranks(silent)} did not come")
        last = "none" if self._last is None else f"collective {self._last.sequence}, {self._last}"
        return (
            f"at collective {sequence} {', '.join(accounts)}, last common: {last}; every rank must start the same "
            "operations in the same order (each rank's are in its collectives_rank_<r>.log)"
        )

    def _absence(self, own: Operation, silent: list[int], past: Operation | None) -> str:
        waiting = [rank for rank in range(self.world_size) if rank not in silent]
        last = "no collective at all" if past is None else f"collective {past.sequence}, {past}"
        return (
            f"{name_ranks(silent)} did not come to collective {own.sequence} within {self._timeout_s:g} s: "
            f"{name_ranks(waiting)} {'waits' if len(waiting) == 1 else 'wait'} in {own}, and the last of "
            f"{name_ranks(silent)} was {last}; find out what kept {'it' if len(silent) == 1 else 'them'} after that"
        )


class _Board:
    """Where ranks put up what they are about to do."""

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size

    def publish(self, operation: Operation) -> None:
        self._store.set(self._key(self._rank, operation.sequence), operation.encode())

    def meet(self, own: Operation, timeout_s: float) -> dict[int, Operation]:
        """Return operation number ``own.sequence`` of every rank that came, in the order of ranks."""
        met = {self._rank: own}
        deadline = time.monotonic() + timeout_s
        pause_s = 1e-4
        while True:
            for rank in range(self._world_size):
                found = None if rank in met else self.read(rank, own.sequence)
                if found is not None:
                    met[rank] = found
                    if not found.matches(own):
                        deadline = min(deadline, time.monotonic() + _GRACE_S)
            if len(met) == self._world_size or time.monotonic() > deadline:
                return dict(sorted(met.items()))
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def read(self, rank: int, sequence: int) -> Operation | None:
        """Return operation number ``sequence`` of a rank if it has come to it and not yet past the next one."""
        key = self._key(rank, sequence)
        if not self._store.check([key]):
            return None
        found = Operation.decode(self._store.get(key))
        return found if found.sequence == sequence else None

    def _key(self, rank: int, sequence: int) -> str:
        return f"{rank}/{sequence % 2}"


class _Log:
    """A file of one line per operation; until it is opened, lines are kept."""

    def __init__(self) -> None:
        self._file: TextIO | None = None
        self._pending: deque[str] = deque(maxlen=_MAX_PENDING_LINES)

    def open(self, path: Path) -> None:
        self.close()
        with contextlib.suppress(OSError):  # a full disk must not hide what ranks have to say
            # Each line goes to the disk at once: it is what is left of a rank that hangs or is killed.
            self._file = path.open("a", buffering=1, encoding="utf-8")
            self._file.writelines(self._pending)
            self._pending.clear()

    def write(self, line: str) -> None:
        stamped = f"{datetime.now().astimezone().isoformat(timespec='milliseconds')} {line}\n"
        if self._file is None:
            self._pending.append(stamped)
            return
        with contextlib.suppress(OSError):
            self._file.write(stamped)

    def close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None


def _does(ranks: list[int], what: str) -> str:
    if what == _LEAVING:
        return f"{name_ranks(ranks)} left the group"
    return f"{name_ranks(ranks)} {'calls' if len(ranks) == 1 else 'call'} {what}"


def _place_of_caller() -> str:
    """Return ``folder/file.py:line`` of the code that asked for the exchange."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_BETWEEN):
        frame = frame.f_back
    path = Path(frame.f_code.co_filename)
    return f"{path.parent.name}/{path.name}:{frame.f_lineno}"
