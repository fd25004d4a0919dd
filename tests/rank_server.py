"""A process that imports torch once and forks ranks from itself: ``python -m tests.rank_server``.

It reads one JSON object per line, answers with one, and ends with all its ranks when its standard input closes, which
it does when the test process is gone, however that ended.
"""

import ctypes
import faulthandler
import importlib
import json
import os
import pickle
import shutil
import signal
import sys
import traceback
from datetime import timedelta
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from lockstep.distributed.torch_collectives import Collectives
from lockstep.distributed.torch_comm import GroupComm

STACK_SIGNAL = signal.SIGUSR2
"""Makes a rank write the stacks of its threads to its output."""
GROUP_TIMEOUT_S = 120
_PR_SET_PDEATHSIG = 1


def serve() -> None:
    """Fork and end ranks as told."""
    torch.set_num_threads(1)
    folders: dict[int, Path] = {}
    for line in sys.stdin:
        request = json.loads(line)
        answer: dict[str, Any] = {}
        if "start" in request:
            world_size, folder = request["start"], Path(request["folder"])
            # A lock that a thread of this process held would stay locked for ever in a fork.
            tasks = Path("/proc/self/task")
            num_threads = len(list(tasks.iterdir())) if tasks.exists() else 1
            assert num_threads == 1, f"{num_threads} threads: forking is not safe"
            answer["pids"] = [_fork(rank, world_size, folder) for rank in range(world_size)]
            folders |= dict.fromkeys(answer["pids"], folder)
        else:
            answer["codes"] = [_end(pid) for pid in request["end"]]
            for pid in request["end"]:
                del folders[pid]
        print(json.dumps(answer), flush=True)
    for pid, folder in folders.items():  # nobody is left to do it
        _end(pid)
        shutil.rmtree(folder, ignore_errors=True)


def _end(pid: int) -> int:
    """Kill a rank; return its exit code, or minus the signal that ended it."""
    os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _fork(rank: int, world_size: int, folder: Path) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        _die_with(parent)
        _redirect(folder / f"rank_{rank}.txt")
        faulthandler.register(STACK_SIGNAL, all_threads=True)
        _serve_rank(rank, world_size, folder)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _die_with(parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def _redirect(path: Path) -> None:
    """Let everything this process writes, C libraries included, go to a file."""
    with path.open("ab", buffering=0) as file, Path(os.devnull).open("rb") as nothing:
        for stream, target in ((nothing, 0), (file, 1), (file, 2)):
            os.dup2(stream.fileno(), target)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)


def _serve_rank(rank: int, world_size: int, folder: Path) -> None:
    own = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
    }
    if sys.platform == "linux":
        own["GLOO_SOCKET_IFNAME"] = "lo"  # a host name need not resolve where tests run
    os.environ.update(own)
    connection: Connection[bytes, bytes] = Client(str(folder / "socket"), family="AF_UNIX")
    connection.send_bytes(pickle.dumps(rank))
    dist.init_process_group(
        "gloo",
        store=FileStore(str(folder / "store"), world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=GROUP_TIMEOUT_S),
    )
    connection.send_bytes(pickle.dumps("ready"))
    while True:
        try:
            message = connection.recv_bytes()
        except EOFError:
            return
        connection.send_bytes(_answer(message, own))


def _answer(message: bytes, own: dict[str, str]) -> bytes:
    """Run a job; return the pickled ``("returned", result)`` or ``("raised", line, traceback)``."""
    try:
        environment, folder, function, arguments = pickle.loads(message)
        os.environ.clear()
        os.environ.update(environment | own)
        os.chdir(folder)
        module, _, name = function.partition(":")
        job = getattr(importlib.import_module(module), name)
        # Plain pickle, not the connection's own: that one would share the memory of tensors.
        return pickle.dumps(("returned", job(GroupComm(Collectives(torch.device("cpu"))), *pickle.loads(arguments))))
    except Exception as error:
        return pickle.dumps(("raised", f"{type(error).__name__}: {error}", traceback.format_exc()))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def main() -> NoReturn:
    serve()
    sys.exit(0)


if __name__ == "__main__":
    main()
