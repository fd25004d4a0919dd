"""Real processes that beat as ranks do and need no torch; ``conftest.py`` has the fixture that starts them."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from lockstep.distributed.heartbeat import FOLDER_PREFIX

TIMEOUT_S = 60.0
PREAMBLE = """
import ctypes, os, signal, sys, threading, time
from pathlib import Path
from lockstep.core import beats, saves
from lockstep.core.interrupts import overheard, watch
from lockstep.distributed import heartbeat
from lockstep.distributed.stopping import ending_in_time

def hang_in_c():
    # The second lock of a mutex never returns, and no signal interrupts it; Python's own lock is free meanwhile.
    library, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    library.pthread_mutex_lock(mutex)
    print("hangs", flush=True)
    library.pthread_mutex_lock(mutex)

def hang_with_the_lock():
    library, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    library.pthread_mutex_lock(mutex)
    print("hangs", flush=True)
    library.pthread_mutex_lock(mutex)

def work_until(condition):
    while not condition():
        beats.enter("rollout")
        time.sleep(0.01)

"""
RANK_OF_TWO = """
heartbeat.begin()
with beats.training():
    beats.at_iteration(8)
    beats.enter("rollout")
    beats.at_iteration(9)
    beats.enter("rollout")
    print("ready", flush=True)
    {work}
"""
WAITS = RANK_OF_TWO.format(
    work="with beats.exchange('gradients'):\n        while not Path('enough').exists():\n            time.sleep(0.02)"
)


class Rank:
    """A process that torchrun could have started as a rank."""

    def __init__(self, script: str, rank: int = 1, **environment: str) -> None:
        variables = {
            "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2",
            "TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_RESTART_COUNT": "0", "LOCKSTEP_PIN": "0",
        }  # fmt: skip
        self.process = subprocess.Popen(
            [sys.executable, "-c", PREAMBLE + script],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | variables | environment,
        )
        self.pid = self.process.pid

    def says(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self) -> tuple[int, str]:
        """Return the exit code and what was said on stderr."""
        _, errors = self.process.communicate(timeout=TIMEOUT_S)
        return self.process.returncode, errors


def folders(temporary: Path) -> list[Path]:
    return list(temporary.glob(f"{FOLDER_PREFIX}*"))
