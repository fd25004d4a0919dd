"""``lockstep slurm status``: what SLURM knows of a run's job, and what the run itself tells."""

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.cli.arguments import parse
from lockstep.cli.usage import unexpected_word, unknown_flag
from lockstep.core.errors import RunError, UsageError
from lockstep.core.run_directory import check_run_directory
from lockstep.core.runs import attempts_of, progress_of, run_info
from lockstep.launch.slurm_commands import JobState, job_state

_KEY = re.compile(r"slurm-(?:(?P<cluster>.+)-)?(?P<job_id>\d+)")


def show_status(argv: Sequence[str]) -> int:
    """Print the state of a run and of its job; return the exit code."""
    positionals = parse(argv, _lookup).positionals
    if not positionals:
        raise UsageError("which run? Write lockstep slurm status RUN_DIR, logs/<task>/<time>")
    if len(positionals) > 1:
        raise unexpected_word(positionals[1])
    run = check_run_directory(positionals[0])
    cluster, job_id = job_of(run_info(run), attempts_of(run))
    state: JobState | None = None
    problem = ""
    if job_id is not None:
        try:
            state = job_state(job_id, cluster)
        except RunError as error:
            problem = str(error)
    for label, text in _rows(run, job_id, state, problem):
        print(f"{label:<12}{text}")
    sys.stdout.flush()
    return 0


def job_of(run: Mapping[str, Any], attempts: Sequence[Mapping[str, Any]]) -> tuple[str, str | None]:
    """Return the cluster, if it has a name, and the id of the job that trained a run last; None if it was none."""
    for source in (*reversed(attempts), run):
        match = _KEY.fullmatch(str(source.get("run_key")))
        if match:
            return match["cluster"] or "", match["job_id"]
    return "", None


def _lookup(name: str) -> Any:
    raise unknown_flag(name, [])


def _rows(run: Path, job_id: str | None, state: JobState | None, problem: str) -> Iterator[tuple[str, str]]:
    progress, attempts = progress_of(run), attempts_of(run)
    yield "run", str(run)
    if job_id is None:
        yield "job", "none; the run was not started by a job script of lockstep slurm"
    elif problem:
        yield "job", f"{job_id}, whose state is not known ({problem})"
    elif state is None:
        yield "job", f"{job_id}, of which SLURM knows nothing any more"
    else:
        yield "job", f"{job_id} {_job(state)}"
        if state.stdout:
            yield "output", " and ".join(dict.fromkeys([state.stdout, state.stderr]))
    yield "progress", _progress(progress)
    yield "checkpoint", str(progress.get("checkpoint") or "none yet")
    yield "attempts", str(len(attempts))
    for number, attempt in enumerate(attempts, 1):
        ranks = attempt.get("world_size", "?")
        words = f"{str(attempt.get('start_time'))[:19]} on {attempt.get('host')}, {_counted(ranks, 'rank')}"
        start = attempt.get("iteration")
        yield f"  {number}", words + (f", from iteration {start}" if isinstance(start, int) else "")
    advice = _advice(run, progress, job_id, state, bool(problem))
    if advice:
        yield "next", advice


def _job(state: JobState) -> str:
    words = [state.state]
    if state.reason:
        words.append(f"({state.reason})")
    if state.nodes:
        words.append(f"on {state.nodes}")
    if state.state == "PENDING" and state.start:
        words.append(f"until {state.start}")
    elif state.elapsed:
        words.append(f"for {state.elapsed}" + (f" of {state.time_limit}" if state.time_limit else ""))
    if state.is_over and state.exit_code:
        words.append(f"with exit code {state.exit_code.partition(':')[0]}")
    text = " ".join(words)
    return text + (f"; requeued {_counted(state.num_restarts, 'time')}" if state.num_restarts else "")


def _counted(number: object, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _progress(progress: Mapping[str, Any]) -> str:
    if not progress:
        return "progress.json can't be read"
    words = f"{progress.get('status')}, iteration {progress.get('iteration')} of {progress.get('max_iterations')}"
    steps, wall_s = progress.get("env_steps"), progress.get("wall_s")
    if isinstance(steps, int) and isinstance(wall_s, int | float):
        words += f", {steps:,} env steps in {wall_s:.0f} s"
    return words + (f" ({progress['reason']})" if progress.get("reason") else "")


def _advice(
    run: Path, progress: Mapping[str, Any], job_id: str | None, state: JobState | None, is_unknown: bool
) -> str:
    """Return what is left to do, nothing where SLURM does it by itself or it is done."""
    status = progress.get("status")
    if status == "finished" or job_id is None or (is_unknown and status == "running"):
        return ""
    if is_unknown:
        return f"unless squeue shows the job, in its queue: lockstep slurm ... -- train --resume {run}"
    if state is not None and not state.is_over:
        return ""
    return f"the job is over and the run is not finished: lockstep slurm ... -- train --resume {run}"
