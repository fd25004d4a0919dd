"""``python -m lockstep.distributed.torch_agent``: torchrun for one node, as the launcher starts it.

It takes torchrun's arguments and uses torchrun's own parser and agent. What differs: it ends with the launcher, SIGUSR1
does not end it, the words after the script or module reach the ranks as they are, and instead of printing a report of
its own it leaves ``agent.json`` (how each failed rank ended) and ``logs.json`` (where the ranks' output goes) in the
folder that LOCKSTEP_ATTEMPT_DIR names.
"""

import contextlib
import importlib
import json
import logging
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.core.files import write_atomic
from lockstep.core.outcome import ATTEMPT_DIR, LAUNCHER_PID
from lockstep.core.process_control import end_with_parent

if TYPE_CHECKING:
    import argparse

    from torch.distributed.elastic.multiprocessing import LogsSpecs


def main(argv: Sequence[str]) -> int:
    """Run the ranks of this node to their end; return 0 if all ended well, else 1."""
    # Before torch is imported, which takes seconds in which the launcher may end.
    end_with_parent(signal.SIGTERM, int(os.environ.pop(LAUNCHER_PID, os.getppid())))
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    attempt_dir = Path(os.environ[ATTEMPT_DIR])
    # What torchrun itself would take is spelled --name=value, so the first other word is the script or module.
    start = next(index for index, word in enumerate(argv) if not word.startswith("-"))
    report = _run(argv[: start + 1], argv[start + 1 :], attempt_dir)
    write_atomic(attempt_dir / "agent.json", json.dumps(report, indent=1), durable=False)
    return 1 if report["failures"] or report["error"] or report["signal"] else 0


def _run(own: Sequence[str], words: Sequence[str], attempt_dir: Path) -> dict[str, Any]:
    with _quiet_torch():
        importlib.import_module("torch.distributed")
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch
    from torch.distributed.run import config_from_args, parse_args

    arguments = parse_args(list(own))
    redirects, arguments.redirects = arguments.redirects, "0"
    arguments.training_script_args = list(words)  # argparse would swallow a "--" among them
    _log_to(Path(arguments.log_dir) / "agent.log")
    report: dict[str, Any] = {"failures": [], "signal": 0, "error": ""}
    try:
        config, command, command_words = config_from_args(arguments)
        config.logs_specs = _noting_logs(arguments, redirects, attempt_dir)
        config.numa_options = None  # lockstep pins its ranks itself
        elastic_launch(config, command)(*command_words)
    except ChildFailedError as error:
        report["failures"] = [
            {
                "rank": rank,
                "local_rank": failure.local_rank,
                "pid": failure.pid,
                "exit_code": failure.exitcode,
                "time_s": failure.timestamp,
                "error_file": failure.error_file,
            }
            for rank, failure in error.failures.items()
        ]
    except SignalException as error:
        report["signal"] = int(error.sigval)
    except Exception as error:
        logging.getLogger("torch.distributed").exception("the agent failed")
        report["error"] = _in_one_line(error, arguments)
    return report


def _noting_logs(arguments: "argparse.Namespace", redirects: str, attempt_dir: Path) -> "LogsSpecs":
    """Return torchrun's log files for ``redirects``, as 0:0,1:3, and note where they are whenever ranks start."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, Std

    class NotedLogs(DefaultLogsSpecs):
        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
            files = super().reify(envs)
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
            write_atomic(attempt_dir / "logs.json", json.dumps(content, indent=1), durable=False)
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
    handler = logging.FileHandler(path, delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger.handlers = [handler]
    logger.propagate = False


def _in_one_line(error: BaseException, arguments: "argparse.Namespace") -> str:
    cause = error.__cause__ or error
    reason = ": ".join(filter(None, [type(cause).__name__, " ".join(str(cause).split())[:300].rstrip(".")]))
    if arguments.nnodes == "1":
        return f"torchrun's agent failed: {reason}"
    where = arguments.rdzv_endpoint or f"{arguments.master_addr}:{arguments.master_port}"
    return (
        f"the nodes did not meet at {where} ({reason}); all launchers must be up, with the same arguments, and that "
        "address reachable from here"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
