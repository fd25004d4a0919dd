"""The processes of a JAX job as the session sees them: texts between processes, outside of any compiled program.

Numbers travel in compiled programs, over the mesh. What is left are a few texts before, between and after: they go
through the key-value store of JAX's coordination service, and a checkpoint's content through one broadcast. A process
that is alone has a real object too, with a store of its own.
"""

import itertools
import json
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
from jax.experimental import multihost_utils

from lockstep.core import beats
from lockstep.core.errors import RunError
from lockstep.core.outcome import LOST_A_RANK
from lockstep.core.types import Wait
from lockstep.distributed.main_process import run_on_main

CHUNK_BYTES = 1 << 26
"""A broadcast travels in pieces of so many bytes at most, each of which is in memory twice."""

_ARRAY = "array"
_MAX_WAITS = 4096  # where nobody asks for them the oldest are forgotten
_SLICE_S = 1.0
"""A wait is cut into pieces, between which Python can run a signal's handler."""


class Store(Protocol):
    """Texts by key, seen by all processes."""

    def set(self, key: str, text: str) -> None:
        """Put a text where there is none."""

    def get(self, key: str, timeout_s: float) -> str | None:
        """Return a text, waiting for it for so long; None if it has not come."""

    def delete(self, key: str) -> None:
        """Forget a text."""


class OwnStore:
    """The store of a process that is alone."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}

    def set(self, key: str, text: str) -> None:
        """Put a text where there is none."""
        self._texts[key] = text

    def get(self, key: str, timeout_s: float) -> str | None:
        """Return a text; None if it is not there, since nobody else can put it there."""
        return self._texts.get(key)

    def delete(self, key: str) -> None:
        """Forget a text."""
        self._texts.pop(key, None)


class JaxComm:
    """The ``Peers`` of a JAX job. All processes make the same calls in the same order.

    Args:
        rank: of this process among processes.
        world_size: how many processes there are.
        num_ranks: how many devices, over all processes, train together.
        store: for texts; ``prefix`` is what no other object's keys in it begin with.
        timeout_s: how long a process may wait for another one.
        leave: called by ``close``.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        num_ranks: int,
        store: Store,
        *,
        prefix: str = "lockstep",
        timeout_s: float = 600.0,
        leave: Callable[[], None] = lambda: None,
    ) -> None:
        self.rank, self.world_size, self.num_ranks = rank, world_size, num_ranks
        self._store, self._prefix, self._timeout_s, self._leave = store, prefix, timeout_s, leave
        self._numbers = itertools.count()
        self._waits: deque[Wait] = deque(maxlen=_MAX_WAITS)

    def gather_text(self, text: str, tag: str) -> list[str]:
        """Return every process's text, in the order of processes, on every process.

        Args:
            text: this process's.
            tag: what the exchange is for, in messages.

        Raises:
            RunError: a process has ended, or has not come for so long.
        """
        number = next(self._numbers)
        with self._waiting(tag, len(text.encode())):
            self._store.set(self._key(number, self.rank), text)
            texts = [self._text_of(number, rank, tag) for rank in range(self.world_size)]
            # Whoever is in this exchange has read all texts of the one before.
            self._store.delete(self._key(number - 1, self.rank))
        return texts

    def on_main(self, work: Callable[[], str], tag: str) -> str:
        """Run ``work`` on process 0 and share its outcome, an error included.

        Raises:
            LockstepError: what ``work`` raised, marked as ``shared``: process 0 says it for all.
        """
        return run_on_main(work, self.rank, lambda text: self.gather_text(text, tag))

    def broadcast(self, value: Any, tag: str) -> Any:
        """Return process 0's value on every process.

        Args:
            value: a nest of dicts (with texts as keys), lists and tuples of numpy arrays, numbers, texts and None;
                what the other processes give does not count. Tuples become lists.
            tag: what the exchange is for, in messages.

        Raises:
            RunError: a process has ended, or has not come for so long.
        """
        arrays: list[np.ndarray] = []
        skeleton = json.dumps(_take_out(value, arrays)) if self.rank == 0 else ""
        told = json.loads(self.gather_text(skeleton, tag)[0])
        if self.world_size == 1:
            return _put_back(told, arrays)
        shapes: list[tuple[np.dtype[Any], tuple[int, ...]]] = []
        _find_arrays(told, shapes)
        content = b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)
        with self._waiting(tag, len(content)), lost_processes_in_words(tag):
            size = sum(dtype.itemsize * int(np.prod(shape)) for dtype, shape in shapes)
            received = memoryview(_broadcast_bytes(content, size))
        place, found = 0, []
        for dtype, shape in shapes:
            end = place + dtype.itemsize * int(np.prod(shape))
            found.append(np.frombuffer(received[place:end], dtype).reshape(shape).copy())
            place = end
        return _put_back(told, found)

    def log_to(self, folder: Path) -> None:
        """There is no debug mode that would log anything: JAX compiles what travels, and checks it then."""

    def take_waits(self) -> list[Wait]:
        """Return these exchanges since the last call; those inside compiled programs are not among them."""
        taken = list(self._waits)
        self._waits.clear()
        return taken

    def close(self) -> None:
        """Leave the job."""
        self._leave()

    def _key(self, number: int, rank: int) -> str:
        return f"{self._prefix}/{number}/{rank}"

    def _text_of(self, number: int, rank: int, tag: str) -> str:
        deadline = time.monotonic() + self._timeout_s
        while (text := self._store.get(self._key(number, rank), _SLICE_S)) is None:
            if time.monotonic() > deadline:
                raise RunError(
                    f"{LOST_A_RANK} {tag}: rank {rank} has not come for {self._timeout_s:.0f} s; see its log, "
                    "or raise LOCKSTEP_TIMEOUT_S if it is only slow"
                )
        return text

    @contextmanager
    def _waiting(self, tag: str, num_bytes: int) -> Iterator[None]:
        began = time.perf_counter()
        try:
            with beats.exchange(tag), lost_processes_in_words(tag):
                yield
        finally:
            self._waits.append(Wait(tag, time.perf_counter() - began, num_bytes))


@contextmanager
def lost_processes_in_words(tag: str) -> Iterator[None]:
    """Turn what JAX raises where another process has ended into one line.

    Raises:
        RunError: instead of JAX's error.
    """
    try:
        yield
    except (jax.errors.JaxRuntimeError, ValueError) as error:  # the latter where an array is read on the host
        reason = str(error).strip().partition("\n")[0]
        if not any(sign in reason for sign in _SIGNS_OF_LOSS):
            raise
        raise RunError(
            f"{LOST_A_RANK} {tag} ({reason[:200]}); it has ended or can't be reached: see what it says, and its log"
        ) from error


# Of gloo, and of the coordination service, whose errors have the names of gRPC's codes.
_SIGNS_OF_LOSS = (
    "Gloo", "onnection closed by peer", "onnection reset by peer", "NCCL",
    "UNAVAILABLE", "DEADLINE_EXCEEDED", "ABORTED", "CANCELLED",
)  # fmt: skip


def _broadcast_bytes(content: bytes, size: int) -> bytes:
    """Return process 0's ``content`` of ``size`` bytes on every process."""
    step = min(CHUNK_BYTES, 1 << max(0, size - 1).bit_length())  # few lengths, since each is compiled anew
    received = bytearray()
    for start in range(0, size, step):
        piece = np.zeros(step, np.uint8)
        own = np.frombuffer(content[start : start + step], np.uint8)
        piece[: own.size] = own
        received += np.asarray(multihost_utils.broadcast_one_to_all(piece)).tobytes()
    return bytes(received[:size])


def _take_out(value: Any, arrays: list[np.ndarray]) -> Any:
    """Return a nest that JSON can hold, with a note in the place of each array, which is added to ``arrays``."""
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        array = np.asarray(value)
        arrays.append(array)
        return {_ARRAY: [array.dtype.name, list(array.shape)]}
    if isinstance(value, dict):
        return {"dict": {name: _take_out(inner, arrays) for name, inner in value.items()}}
    if isinstance(value, list | tuple):
        return {"list": [_take_out(inner, arrays) for inner in value]}
    return {"plain": value}


def _find_arrays(told: Any, shapes: list[tuple[np.dtype[Any], tuple[int, ...]]]) -> None:
    ((kind, value),) = told.items()
    if kind == _ARRAY:
        shapes.append((np.dtype(value[0]), tuple(value[1])))
    elif kind in ("dict", "list"):
        for inner in value.values() if kind == "dict" else value:
            _find_arrays(inner, shapes)


def _put_back(told: Any, arrays: list[np.ndarray]) -> Any:
    """Return the nest again, with the arrays taken from the front of ``arrays``."""
    ((kind, value),) = told.items()
    if kind == _ARRAY:
        return arrays.pop(0)
    if kind == "dict":
        return {name: _put_back(inner, arrays) for name, inner in value.items()}
    if kind == "list":
        return [_put_back(inner, arrays) for inner in value]
    return value
