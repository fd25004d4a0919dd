"""Which run a training goes on with: a restart with that of its launch, ``--resume auto`` with that of its job.

Rank 0 looks, since other nodes may not see its disk, and all ranks get what it found.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lockstep.core.config import load_overlay, show
from lockstep.core.errors import RunError, UsageError
from lockstep.core.outcome import note_final
from lockstep.core.run_directory import RunDirectory, RunInUseError
from lockstep.core.runs import attempts_of, newest_iteration, progress_of, run_info, runs_of
from lockstep.distributed.topology import Start, start_from_environment
from lockstep.learn.config import envs_of_run

if TYPE_CHECKING:
    from lockstep.core.types import Peers
    from lockstep.learn.config import TrainConfig

Resume = Path | Literal["auto"] | None
"""The run to go on with as the user gives it; ``auto`` for the one that the job has started, if there is one."""

RUN_KEY = "LOCKSTEP_RUN_KEY"
"""Variable by which the tries of one job know each other, as a job script sets it."""

MAX_FAILURES = 3
"""So many failures in a row without a new checkpoint, and the ranks are not started again; so many tries of a job that
SLURM puts back into its queue, and it is over."""

LOCK_WAIT_S = 120.0
"""How long to wait for a process of before that still has the run. The kernel may take a while to end one, and a file
server forgets a host that lost its power when its lease runs out: 90 s on NFSv4, as Linux serves it."""

_SILENT_WAIT_S = 2.0

# Where a run lies and how it is spread says nothing about what it learns.
_MAY_DIFFER = ("num_envs", "world_size", "log_root")


@dataclass(frozen=True)
class Found:
    """The run to go on with, and what of it counts for all ranks."""

    path: Path | None = None
    """None for a new run."""
    total_envs: int | None = None
    """Of all ranks, if the run knows that better than the command line; see ``fit``."""
    is_done: bool = False
    """It is finished, so that nothing is left to do."""
    is_found: bool = False
    """It was looked up, and not named by the user: whoever had it before belongs to it, and is about to end."""
    note: str = ""
    """For the user, in one line."""

    def fit(self, config: TrainConfig, world_size: int) -> TrainConfig:
        """Return the config with as many envs as the run has, on as many ranks as there are now."""
        return config if self.total_envs is None else config.with_total_envs(self.total_envs, world_size)

    def open(self) -> RunDirectory:
        """Lock the run for this process.

        Raises:
            UsageError: it is gone, or another process trains in it.
        """
        assert self.path is not None
        wait_s = LOCK_WAIT_S if self.is_found else 0.0
        deadline = time.monotonic() + wait_s
        says_so_at = time.monotonic() + _SILENT_WAIT_S
        while True:
            try:
                return RunDirectory.open(self.path)
            except RunInUseError as error:
                now = time.monotonic()
                if now >= deadline:
                    raise
                if now >= says_so_at:
                    says_so_at = math.inf
                    what = str(error).partition(";")[0]
                    print(f"lockstep: {what}; waiting up to {wait_s:.0f} s for its end", file=sys.stderr)  # noqa: T201
                time.sleep(0.2)


def ways_to_start(checkpoint: Path | None, resume: Resume) -> list[Literal["", "checkpoint", "resume"]]:
    """Return from what a training may have to start, for ``runner.check_runner``; with ``auto`` that shows later."""
    ways: list[Literal["", "checkpoint", "resume"]] = []
    ways += ["checkpoint"] if checkpoint else []
    ways += ["resume"] if resume else []
    return ways or [""]


def look(config: TrainConfig, resume: Resume, comm: Peers) -> Found:
    """Return on every rank what rank 0 has found.

    Raises:
        RunError: the last attempts of this launch have all failed before a new checkpoint, or the last tries of this
            job have all been stopped before one.
    """
    text = comm.on_main(lambda: json.dumps(asdict(find(config, resume)), default=str), "run to go on with")
    found = json.loads(text)
    return Found(**found | {"path": found["path"] and Path(found["path"])})


def find(config: TrainConfig, resume: Resume, environment: Mapping[str, str] = os.environ) -> Found:
    """Return the run to go on with, as this process sees it.

    Args:
        config: of the training, from the command line.
        resume: as the user gave it.
        environment: of this process.

    Raises:
        RunError: the last attempts of this launch have all failed before a new checkpoint, or the last tries of this
            job have all been stopped before one; or its run is out of sight.
    """
    start = start_from_environment(environment)
    given = resume if isinstance(resume, Path) else None
    path = run_of_launch(config.log_root, config.task, start, given)
    if path is not None:
        _require_progress(path, start)
        return _restarted(path, config, start)
    if start.run_path and start.number:
        note_final()
        raise RunError(
            f"the ranks start again, and this host does not see {start.run_path}, where they have trained; nodes of an "
            "elastic job need a --log_root that all of them see"
        )
    if start.num_failures >= MAX_FAILURES:
        note_final()
        raise RunError(
            f"{start.num_failures} attempts in a row failed before the training began{_last(start.last_failure)}; mend "
            "it, then start again"
        )
    if resume != "auto":
        return Found(given)
    key = environment.get(RUN_KEY, "")
    path = _run_of_key(config, key) if key else _unfinished_run(config)
    if path is None:
        return Found()
    found = _continued(path, config)
    if key and not found.is_done:
        _require_progress_of_job(path, key, _num_requeues(environment))
    return found


def run_of_launch(log_root: str, task: str, start: Start, given: Path | None = None) -> Path | None:
    """Return the run that earlier starts of the same launch have trained in, if there is one.

    Args:
        log_root: of all runs.
        task: of the training.
        start: of the ranks, by the environment.
        given: a run that may lie elsewhere.
    """
    if not start.launch_id or not start.number:
        return None
    candidates = [*runs_of(log_root, task), *([] if given is None else [given])]
    candidates += [Path(start.run_path)] if start.run_path else []
    return next((path for path in candidates if run_info(path).get("launch_id") == start.launch_id), None)


def attempt_info(start: Start, iteration: int, environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return what ``run.json`` says of an attempt that begins after ``iteration``."""
    return {
        "run_key": environment.get(RUN_KEY) or None,
        "launch_id": start.launch_id or None,
        "restart": start.number,
        "num_failures": start.num_failures,
        "num_requeues": _num_requeues(environment),
        "iteration": iteration,
    }


def _restarted(path: Path, config: TrainConfig, start: Start) -> Found:
    iteration = newest_iteration(path)
    last: dict[str, Any] = next(reversed(attempts_of(path)), {})
    is_after_failure = start.num_failures > _noted(last, "num_failures", 0)  # else a node came or went
    after = f" after a failure ({start.last_failure})" if start.last_failure and is_after_failure else ""
    return Found(
        path,
        envs_of_run(load_overlay(path / "config.yaml")),
        is_done=_is_done(path, config),
        is_found=True,
        note=f"restart {start.number}{after}: {path} goes on from iteration {iteration}",
    )


def _continued(path: Path, config: TrainConfig) -> Found:
    run = load_overlay(path / "config.yaml")
    differences = _differences(run, config)
    changed = f", now with {', '.join(differences)}" if differences else ""
    return Found(
        path,
        envs_of_run(run),
        is_done=_is_done(path, config),
        is_found=True,
        note=f"{path} goes on from iteration {newest_iteration(path)}{changed}",
    )


def _require_progress(path: Path, start: Start) -> None:
    """Refuse to go on where the last attempts have all failed at the same place.

    Raises:
        RunError: they have.
    """
    newest = newest_iteration(path)
    failures_before = start.num_failures
    for attempt in reversed(attempts_of(path)):
        if attempt.get("launch_id") != start.launch_id or _noted(attempt, "iteration", 0) < newest:
            break
        failures_before = _noted(attempt, "num_failures", failures_before)
    in_a_row = start.num_failures - failures_before
    if in_a_row >= MAX_FAILURES:
        note_final()
        reason = start.last_failure or str(progress_of(path).get("reason") or "")
        raise RunError(
            f"{in_a_row} attempts in a row failed before a new checkpoint after iteration {newest}{_last(reason)}; "
            f"mend it, then --resume {path}"
        )


def _require_progress_of_job(path: Path, key: str, num_requeues: int | None) -> None:
    """Refuse to go on where the last tries of a job that is put back into the queue have all made no checkpoint.

    A try is what happens between two requeues, however often ranks or launches start in it. So neither restarts of one
    launch count, which have a rule of their own, nor what a user starts by hand, by the same key or not.

    Raises:
        RunError: they have.
    """
    newest, tries = newest_iteration(path), set[int]()
    for attempt in reversed(attempts_of(path)):
        number = _noted(attempt, "num_requeues", -1)
        if attempt.get("run_key") != key or number < 0:
            break
        if _noted(attempt, "iteration", 0) < newest:
            tries.discard(number)  # it has made the newest checkpoint itself
            break
        tries.add(number)
    tries.discard(-1 if num_requeues is None else num_requeues)
    if num_requeues and len(tries) >= MAX_FAILURES:
        note_final()
        raise RunError(
            f"{len(tries)} tries of this job in a row made no checkpoint after iteration {newest}; give it more "
            f"--time, or take checkpoints more often (--checkpoints.interval_s), then --resume {path}"
        )


def _noted(attempt: Mapping[str, Any], name: str, otherwise: int) -> int:
    """Return a number that ``run.json`` has of an attempt; something else where the file lacks it or is damaged."""
    value = attempt.get(name)
    return value if isinstance(value, int) else otherwise


def _num_requeues(environment: Mapping[str, str]) -> int | None:
    """Return how often SLURM has put this job back into the queue; None if it is no job of SLURM's."""
    if "SLURM_JOB_ID" not in environment:
        return None
    count = environment.get("SLURM_RESTART_COUNT", "")  # not set at the first start
    return int(count) if count.isdecimal() else 0


def _last(reason: str) -> str:
    return f"; last reason: {reason}" if reason else ""


def _is_done(path: Path, config: TrainConfig) -> bool:
    progress = progress_of(path)
    total = progress.get("max_iterations")
    return progress.get("status") == "finished" and isinstance(total, int) and total >= config.max_iterations


def _run_of_key(config: TrainConfig, key: str) -> Path | None:
    runs = runs_of(config.log_root, config.task)
    return next((path for path in runs if run_info(path).get("run_key") == key), None)


def _unfinished_run(config: TrainConfig) -> Path | None:
    """Return the newest run of the same name, if it is not finished."""
    for path in runs_of(config.log_root, config.task):
        # The end of the folder's name can't tell: of two runs in one second the second is named <run_name>_2.
        run: Mapping[str, Any] = {}
        with contextlib.suppress(UsageError):  # not whole, so not one to go on with
            run = load_overlay(path / "config.yaml")
        if run.get("run_name") == config.run_name:
            return None if progress_of(path).get("status") == "finished" else path
    return None


def _differences(run: Mapping[str, Any], config: TrainConfig) -> list[str]:
    """Return the settings that are not those of a run, each as ``name value (was value)``."""
    now, then = _flat(config.model_dump(mode="json", serialize_as_any=True)), _flat(run)
    return [
        f"{name} {show(value)} (was {show(then[name])})"
        for name, value in now.items()
        if name in then and name not in _MAY_DIFFER and then[name] != value
    ]


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return flat
