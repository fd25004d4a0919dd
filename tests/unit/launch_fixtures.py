"""What torchrun's agent and the ranks leave when a launch ends, as tests of the launcher leave it."""

import json
import signal
from pathlib import Path
from typing import Any

from lockstep.core.gpu_mask import Gpu
from lockstep.core.outcome import RankOutcome
from lockstep.launch.ends import RankEnd
from lockstep.launch.plan import Options, Plan, Work, make_plan

GPUS = [Gpu(index, f"GPU-{index}", "H200", "0", 1, "1", ()) for index in range(3)]
KILLED, TERMINATED, CRASHED = -signal.SIGKILL, -signal.SIGTERM, -signal.SIGSEGV


def ended(rank: int, process_code: int = 0, said: int | None = None, at_s: float = 100.0, order: int = 0) -> RankEnd:
    """Return the end of a rank: its process's code, and the exit code it noted itself, if any."""
    outcome = None if said is None else RankOutcome(rank, said, "no luck", time_s=at_s)
    return RankEnd(rank, rank, process_code, outcome, pid=7, failed_at_s=at_s, order=order)


def plan(tmp_path: Path, is_script: bool = False, **options: Any) -> Plan:
    work = Work(("-m", "x"), is_script=is_script)
    return make_plan(Options(log_dir=tmp_path / "logs", **options), work, GPUS, {}, job="abc")


def failure(rank: int, code: int) -> dict[str, object]:
    return {"rank": rank, "local_rank": rank % 2, "pid": 40 + rank, "exit_code": code, "time_s": 100, "error_file": ""}


def leave(folder: Path, restart: int = 0, **report_of_agent: object) -> None:
    """Leave what torchrun's agent leaves in an attempt folder; the ranks on this node are 2 and 3."""
    ranks = []
    for local_rank in (0, 1):
        log = folder / f"{local_rank}.log"
        ranks.append({"local_rank": local_rank, "rank": 2 + local_rank, "stdout": "", "stderr": str(log)})
        log.write_text("".join(f"line {number} of {local_rank}\n" for number in range(100)))
    (folder / "logs.json").write_text(json.dumps({"restart": restart, "ranks": ranks}))
    content = {"failures": [], "signal": 0, "error": ""} | report_of_agent
    (folder / "agent.json").write_text(json.dumps(content))


def exited(rank: int, code: int, time_s: float) -> dict[str, object]:
    return {"rank": rank, "local_rank": rank % 2, "pid": 40 + rank, "exit_code": code, "time_s": time_s}
