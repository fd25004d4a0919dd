"""Starts that take no time: a process that does as it is told, and ranks that are threads of the test."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from lockstep.benchmark.startup import process as startup_process
from lockstep.benchmark.startup import starts as startup
from lockstep.core.blame import process_state
from lockstep.core.types import Peers
from lockstep.learn.config import TrainConfig
from lockstep.recipes.catalog import recipe_of
from tests.multiproc.commands import wait_for

FAKE_CHILD = """
import json, os, signal, subprocess, sys, time
from pathlib import Path

job = json.loads(Path(sys.argv[1]).read_text())
number = int(job["result"].rpartition("_")[2])
told = json.loads(job["config"]["run_name"])
Path(job["note"]).write_text("imports")
cache = Path(os.environ["WARP_CACHE_PATH"])
seen = sorted(each.name for each in cache.iterdir()) if cache.is_dir() else []
with open(told["log"], "a") as log:
    log.write(json.dumps({"pid": os.getpid(), "folder": str(cache.parent), "seen": seen}) + chr(10))
cache.mkdir(parents=True, exist_ok=True)
(cache / f"kernel_{number}").touch()
if number == told.get("fails_at"):
    if told["how"] == "hangs":
        sleeper = subprocess.Popen(["sleep", "60"])
        with open(told["log"], "a") as log:
            log.write(json.dumps({"pid": sleeper.pid}) + chr(10))
        time.sleep(60)
    print(told.get("words", ""), file=sys.stderr, flush=True)
    if told["how"] == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(told["how"])
total = told["total_s"][number]
seconds = {"interpreter": 0.5, "first_iteration": total - 0.5, "total": total}
functions = [{"phase": "imports", "function": "torch", "calls": 1, "own_s": 1.0, "total_s": 2.0}]
figures = {"ranks": told["ranks"], "places": [{"rank": rank} for rank in told["ranks"]], "seconds": seconds}
figures |= {"cpu_s": total / 2, "memory_bytes": 1000 + number, "functions": functions if job["profiles"] else []}
Path(job["result"]).write_text(json.dumps(figures))
"""


@pytest.fixture
def fake_starts(monkeypatch: pytest.MonkeyPatch, temporary: Path) -> None:
    """Have starts made by ``FAKE_CHILD``, which does what the config's ``run_name`` says."""
    Path("fake_child.py").write_text(FAKE_CHILD)
    monkeypatch.setattr(startup_process, "CHILD", "fake_child")
    monkeypatch.setattr(startup, "_ROUND_S", 0.02)


def told(**what: Any) -> TrainConfig:
    """Return a config that tells the fake process what to do."""
    told = {"log": "log.jsonl", "ranks": [0], "total_s": [4.0, 2.0, 3.0, 9.0]} | what
    return recipe_of("cartpole_classic").model_copy(update={"run_name": json.dumps(told)})


def logged(name: str = "log.jsonl") -> list[dict[str, Any]]:
    """Return what the fake processes have noted, one entry of each process."""
    return [json.loads(line) for line in Path(name).read_text().splitlines()]


def all_gone(name: str = "log.jsonl") -> bool:
    """Wait until the fake processes, and what they have started, are gone."""
    return wait_for(lambda: all(process_state(each["pid"]) == "gone" for each in logged(name)), "their ends")


class Threads:
    """Ranks that are threads."""

    def __init__(self, num_ranks: int) -> None:
        self.barrier = threading.Barrier(num_ranks)
        self.texts = [""] * num_ranks

    def run(self, work: Callable[[Peers], object]) -> list[Any]:
        """Return what ``work`` returned, or raised, on each rank."""
        outcomes: list[Any] = [None] * len(self.texts)

        def one(rank: int) -> None:
            try:
                outcomes[rank] = work(cast(Peers, Peer(self, rank)))
            except BaseException as error:
                outcomes[rank] = error

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(len(self.texts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return outcomes


class Peer:
    """One of ``Threads``, or all there is."""

    def __init__(self, threads: Threads, rank: int) -> None:
        self._threads, self.rank = threads, rank

    def gather_text(self, text: str, tag: str) -> list[str]:
        self._threads.texts[self.rank] = text
        self._threads.barrier.wait()
        texts = list(self._threads.texts)
        self._threads.barrier.wait()
        return texts

    def on_main(self, work: Callable[[], str], tag: str) -> str:
        return self.gather_text("" if self.rank else work(), tag)[0]
