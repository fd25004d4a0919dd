"""``python -m lockstep.distributed.torch_agent``: torchrun for one node, as the launcher starts it.

It takes torchrun's arguments and uses torchrun's own parser and agent. What differs: it ends with the launcher, SIGUSR1
does not end it, the words after the script or module reach the ranks as they are, and instead of printing a report of
its own it leaves ``agent.json`` (how each rank ended) and ``logs.json`` (where the ranks' output goes) in the folder
that LOCKSTEP_ATTEMPT_DIR names. If that folder takes no file, the ranks run all the same.
"""

import contextlib
import importlib
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.core.errors import RunError
from lockstep.core.files import write_atomic
from lockstep.core.interrupts import EXIT_CODES
from lockstep.core.outcome import ATTEMPT_DIR, LAUNCHER_PID, forget_launch, note_failure
from lockstep.core.process_control import end_with_parent

if TYPE_CHECKING:
    import argparse
    from subprocess import Popen

    from torch.distributed.elastic.multiprocessing import LogsSpecs

FOLLOW_S = 5.0
"""How long ranks may take to end by themselves after one has failed, before torchrun ends them. One that has left the
others, and is what their failure comes from, may take seconds to unload its libraries on a busy host."""
SAVE_S = 60.0
"""The same, where all that have ended so far say that they were preempted: rank 0 may still be saving for them."""
_POLL_S = 0.02


def main(argv: Sequence[str]) -> int:
    """Run the ranks of this node to their end; return 0 if all ended well, else 1."""
    # Before torch is imported, which takes seconds in which the launcher may end.
    end_with_parent(signal.SIGTERM, int(os.environ.pop(LAUNCHER_PID, os.getppid())))
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    attempt_dir = Path(os.environ[ATTEMPT_DIR])
    with contextlib.suppress(OSError):
        attempt_dir.mkdir(mode=0o700, parents=True, exist_ok=True)  # no launcher has made it if this was typed by hand
    forget_launch(attempt_dir)
    # What torchrun itself would take is spelled --name=value, so the first other word is the script or module.
    start = next(index for index, word in enumerate(argv) if not word.startswith("-"))
    report = _run(argv[: start + 1], argv[start + 1 :], attempt_dir)
    _leave(attempt_dir / "agent.json", report)
    return 1 if report["failures"] or report["error"] or report["signal"] else 0


def _run(own: Sequence[str], words: Sequence[str], attempt_dir: Path) -> dict[str, Any]:
    with _quiet_torch():
        importlib.import_module("torch.distributed")
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher import api
    from torch.distributed.run import config_from_args, parse_args

    from lockstep.distributed.torch_restarts import agent_class

    arguments = parse_args(list(own))
    redirects, arguments.redirects = arguments.redirects, "0"
    arguments.training_script_args = list(words)  # argparse would swallow a "--" among them
    _log_to(Path(arguments.log_dir) / "agent.log")
    exits: dict[int, dict[str, Any]] = {}
    report: dict[str, Any] = {"failures": [], "signal": 0, "error": "", "exits": exits}
    try:
        config, command, command_words = config_from_args(arguments)
        _share_the_endpoint(config.rdzv_configs)
        _note_exits(exits, attempt_dir)
        config.logs_specs = _noting_logs(arguments, redirects, attempt_dir, exits)
        config.numa_options = None  # lockstep pins its ranks itself
        api.LocalElasticAgent = agent_class(attempt_dir, exits)  # type: ignore[attr-defined]
        api.elastic_launch(config, command)(*command_words)
    except ChildFailedError as error:
        report["failures"] = [
            {
                "rank": rank,
                "local_rank": failure.local_rank,
                "pid": failure.pid,
                "exit_code": failure.exitcode,
                "time_s": exits.get(failure.local_rank, {}).get("time_s", failure.timestamp),
                "error_file": failure.error_file,
            }
            for rank, failure in error.failures.items()
        ]
        report["failures"].sort(key=lambda failure: (failure["local_rank"] not in exits, failure["time_s"]))
    except SignalException as error:
        report["signal"] = int(error.sigval)
    except Exception as error:
        logging.getLogger("torch.distributed").exception("the agent failed")
        report["error"] = _in_one_line(error, arguments)
    report["exits"] = list(exits.values())
    return report


def _leave(path: Path, content: object) -> None:
    """Leave word for the launcher; a full disk must not turn a job that ended well into a failure."""
    with contextlib.suppress(RunError):
        write_atomic(path, json.dumps(content, indent=1), durable=False)


def _note_exits(exits: dict[int, dict[str, Any]], attempt_dir: Path) -> None:
    """Have the exit code of every rank that ends by itself noted, with the time: torchrun keeps only failures.

    A rank that ends with 0 while others go on may be what their failures come from. They notice when its connections
    close, which is before its process has ended; so after the first failure the others get a while before torchrun
    ends them.
    """
    from torch.distributed.elastic.multiprocessing.api import RunProcsResult, SubprocessContext

    poll = SubprocessContext._poll

    def note_and_poll(context: SubprocessContext) -> RunProcsResult | None:
        processes = {local_rank: handler.proc for local_rank, handler in context.subprocess_handlers.items()}
        _note_ended(exits, processes, context.envs)
        if any(seen["exit_code"] for seen in exits.values()):
            restart = int(context.envs[0]["TORCHELASTIC_RESTART_COUNT"])
            note_failure(attempt_dir, restart)
            began = time.monotonic()
            while len(exits) < len(processes) and time.monotonic() < began + _patience_s(exits):
                time.sleep(_POLL_S)
                _note_ended(exits, processes, context.envs)
            _leave(attempt_dir / f"exits_{restart}.json", list(exits.values()))
        return poll(context)

    SubprocessContext._poll = note_and_poll  # type: ignore[method-assign, assignment]


def _patience_s(exits: dict[int, dict[str, Any]]) -> float:
    codes = {seen["exit_code"] for seen in exits.values()} - {0}
    return SAVE_S if codes == {EXIT_CODES["preempted"]} else FOLLOW_S


def _note_ended(
    exits: dict[int, dict[str, Any]], processes: "dict[int, Popen[bytes]]", environments: dict[int, dict[str, str]]
) -> None:
    now_s = time.time()
    for local_rank, process in processes.items():
        if local_rank not in exits and process.poll() is not None:
            exits[local_rank] = {
                "rank": int(environments[local_rank]["RANK"]),
                "local_rank": local_rank,
                "pid": process.pid,
                "exit_code": process.returncode,
                "time_s": now_s,
            }


def _share_the_endpoint(settings: dict[str, Any]) -> None:
    """Let several nodes of a job be on the host of its endpoint: the first that comes listens, the others join it.

    torchrun does so only where it has found out by itself that the endpoint is this host's.
    """
    from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend

    if str(settings.get("is_host")).lower() in ("1", "true", "t", "yes", "y"):
        del settings["is_host"]
        c10d_rendezvous_backend._matches_machine_hostname = lambda host: True  # type: ignore[attr-defined]


def _noting_logs(
    arguments: "argparse.Namespace", redirects: str, attempt_dir: Path, exits: dict[int, dict[str, Any]]
) -> "LogsSpecs":
    """Return torchrun's log files for ``redirects``, as 0:0,1:3, and note where they are whenever ranks start."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, Std

    class NotedLogs(DefaultLogsSpecs):
        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
            files = super().reify(envs)
            exits.clear()  # those of before a restart
            ranks = [
                {
                    "local_rank": local_rank,
                    "rank": int(environment["RANK"]),
                    "stdout": files.stdouts[local_rank],
                    "stderr": files.stderrs[local_rank],
                }
                for local_rank, environment in envs.items()
            ]
            content = {"restart": int(envs[0]["TORCHELASTIC_RESTART_COUNT"]), "ranks": ranks}
            _leave(attempt_dir / "logs.json", content)
            return files

    # torchrun's own parser knows no local rank above 9.
    by_rank = [part.split(":") for part in redirects.split(",")]
    return NotedLogs(arguments.log_dir, {int(rank): Std(int(streams)) for rank, streams in by_rank})


@contextlib.contextmanager
def _quiet_torch() -> Iterator[None]:
    """Have torch's C++ part print nothing in this process if it is imported now; the ranks' stays as it was.

    While it waits for another node it would fill the screen with stack traces, once for every attempt.
    """
    name = "TORCH_CPP_LOG_LEVEL"
    if name in os.environ:
        yield
        return
    os.environ[name] = "FATAL"
    try:
        yield
    finally:
        del os.environ[name]


def _log_to(path: Path) -> None:
    """Have what torchrun logs go to a file, since the launcher says all of it in its own words."""
    logger = logging.getLogger("torch.distributed")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
    handler = _QuietFile(path, delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger.handlers = [handler]
    logger.propagate = False


class _QuietFile(logging.FileHandler):
    """A log that leaves out what the disk does not take."""

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        pass


def _in_one_line(error: BaseException, arguments: "argparse.Namespace") -> str:
    cause = error.__cause__ or error
    reason = ": ".join(filter(None, [type(cause).__name__, " ".join(str(cause).split())[:300].rstrip(".")]))
    if arguments.nnodes == "1":
        return f"torchrun's agent failed: {reason}"
    if type(cause).__name__ in ("RendezvousClosedError", "EndedElsewhereError"):
        return f"the launcher of another node has ended the job ({reason}); it says why"
    where = arguments.rdzv_endpoint or f"{arguments.master_addr}:{arguments.master_port}"
    return (
        f"the nodes did not meet at {where} ({reason}); all launchers must be up, with the same arguments, and that "
        "address reachable from here"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
