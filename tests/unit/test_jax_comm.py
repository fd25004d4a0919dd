"""What processes of JAX say to one another: three threads here, with one store between them."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from lockstep.core.errors import RunError, UsageError
from lockstep.core.outcome import LOST_A_RANK
from lockstep.distributed import jax_programs
from lockstep.distributed.jax_comm import JaxComm, OwnStore, lost_processes_in_words

NUM_PROCESSES = 3


class SharedStore:
    """A store that refuses to overwrite, as JAX's does, and notes how many keys it had at most."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self.most = 0
        self._changed = threading.Condition()

    def set(self, key: str, text: str) -> None:
        with self._changed:
            assert key not in self.texts
            self.texts[key] = text
            self.most = max(self.most, len(self.texts))
            self._changed.notify_all()

    def get(self, key: str, timeout_s: float) -> str | None:
        with self._changed:
            self._changed.wait_for(lambda: key in self.texts, timeout_s)
            return self.texts.get(key)

    def delete(self, key: str) -> None:
        with self._changed:
            self.texts.pop(key, None)


def on_all(work: Callable[[JaxComm], Any], store: SharedStore | None = None) -> list[Any]:
    """Return what the work returns in each process."""
    store = store or SharedStore()
    comms = [JaxComm(rank, NUM_PROCESSES, 4 * NUM_PROCESSES, store) for rank in range(NUM_PROCESSES)]
    with ThreadPoolExecutor(NUM_PROCESSES) as threads:
        return [future.result() for future in [threads.submit(work, comm) for comm in comms]]


def test_texts_arrive_everywhere_in_the_order_of_processes_and_are_not_kept() -> None:
    store = SharedStore()

    def talk(comm: JaxComm) -> list[list[str]]:
        return [comm.gather_text(f"{comm.rank} says é{number}", "test") for number in range(20)]

    expected = [[f"{rank} says é{number}" for rank in range(NUM_PROCESSES)] for number in range(20)]
    assert on_all(talk, store) == [expected] * NUM_PROCESSES
    assert store.most <= 3 * NUM_PROCESSES


def test_process_0_works_for_all_and_its_errors_are_everyones() -> None:
    ran: list[int] = []

    def work(comm: JaxComm) -> tuple[str, str, bool]:
        text = comm.on_main(lambda: ran.append(comm.rank) or "done", "test")  # type: ignore[func-returns-value]

        def refuse() -> str:
            raise UsageError("not so")

        with pytest.raises(UsageError) as caught:
            comm.on_main(refuse, "test")
        return text, str(caught.value), caught.value.shared

    assert on_all(work) == [("done", "not so", True)] * NUM_PROCESSES
    assert ran == [0]


def test_what_nobody_expected_is_told_to_the_others() -> None:
    def work(comm: JaxComm) -> str:
        def fail() -> str:
            raise LookupError("first line\nsecond line")

        with pytest.raises((LookupError, RunError)) as caught:
            comm.on_main(fail, "test")
        return f"{type(caught.value).__name__}: {caught.value}".partition("\n")[0]

    told = "RunError: rank 0 failed: LookupError: first line"
    assert on_all(work) == ["LookupError: first line", told, told]


def test_who_waits_in_vain_is_told_for_whom() -> None:
    comm = JaxComm(0, 2, 2, SharedStore(), timeout_s=0.1)
    with pytest.raises(RunError, match=f"^{LOST_A_RANK} placement: rank 1 has not come for 0 s"):
        comm.gather_text("here", "placement")
    (wait,) = comm.take_waits()
    assert (wait.tag, wait.num_bytes, wait.seconds > 0.1) == ("placement", len("here"), True)
    assert comm.take_waits() == []


def test_a_process_alone_gets_its_own_back() -> None:
    comm = JaxComm(0, 1, 4, OwnStore())
    assert (comm.num_ranks, comm.gather_text("a", "t"), comm.on_main(lambda: "b", "t")) == (4, ["a"], "b")
    kept = {"a": [np.arange(3, dtype=np.int8), {"b": None, "c": "text"}], "d": 1.5}
    found = comm.broadcast(kept, "t")
    assert found["a"][0].tolist() == [0, 1, 2] and found["a"][0].dtype == np.int8
    assert (found["a"][1], found["d"]) == ({"b": None, "c": "text"}, 1.5)


@pytest.mark.parametrize("kind", [jax.errors.JaxRuntimeError, ValueError])  # as it computes, or as an array is read
@pytest.mark.parametrize(
    "words",
    ["UNKNOWN: Gloo all-reduce failed: Connection closed by peer [10.0.0.2]", "UNAVAILABLE: Socket closed\nmore"],
)
def test_what_jax_says_of_a_lost_process_is_one_line(words: str, kind: type[Exception]) -> None:
    with pytest.raises(RunError) as caught, lost_processes_in_words("an iteration"):
        raise kind(words)
    assert str(caught.value).startswith(f"{LOST_A_RANK} an iteration ({words.splitlines()[0]}); it has ended")
    assert "\n" not in str(caught.value)
    with pytest.raises(kind), lost_processes_in_words("an iteration"):
        raise kind("INTERNAL: something else")


ABORTING = """
import os, sys, time
from lockstep.distributed import jax_abort

def ask():
    if sys.argv[1] == "failed":
        raise RuntimeError("UNAVAILABLE: gone\\nmore")
    if sys.argv[1] == "silent":
        time.sleep(100)

jax_abort.explain(ask)
os.abort()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only there several processes train together")
@pytest.mark.parametrize(
    ("how", "code", "said"),
    [
        ("failed", 1, f"lockstep: error: rank 1 {LOST_A_RANK} JAX's service (UNAVAILABLE: gone);"),
        ("silent", 1, f"lockstep: error: rank 1 {LOST_A_RANK} JAX's service (it does not answer);"),
        ("well", -6, ""),  # whatever it is that aborts, it is no affair of other ranks
    ],
)
def test_an_abort_by_the_service_is_told_as_what_it_is(how: str, code: int, said: str) -> None:
    ranks = {"RANK": "1", "WORLD_SIZE": "2", "LOCKSTEP_DEVICE": "cpu", "XDG_CACHE_HOME": str(Path.cwd())}
    command = [sys.executable, "-c", ABORTING, how]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | ranks, timeout=60, check=False)
    assert done.returncode == code
    assert done.stderr.startswith(said)


def test_programs_that_are_kept_do_not_fill_the_disk(tmp_path: Path) -> None:
    for age, name in enumerate(("new", "middle", "old")):
        (tmp_path / name).write_bytes(bytes(100))
        os.utime(tmp_path / name, (1e9 - age, 1e9 - age))
    jax_programs.remove_oldest(tmp_path, 250)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["middle", "new"]
