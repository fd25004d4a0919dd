"""Processes of JAX that die or are asked to stop: the job says which, goes on from its last checkpoint, or saves."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.multiproc.commands import (
    Command,
    assert_same_curve,
    attempts_of,
    metrics_of,
    num_recorded,
    only_run,
    progress_of,
    wait_for,
)
from tests.multiproc.jax_jobs import OWN, TASK, TIMEOUT_S, pid_of, train, with_example

LAUNCH = ("train_multigpu", "--num_gpus", "2")
RUNS = Path("logs", TASK)

pytestmark = pytest.mark.usefixtures("nothing_is_left")


def wait_for_iteration(iteration: int, job: Command) -> Path:
    def found() -> Path | None:
        return next((run for run in RUNS.glob("[!.]*") if num_recorded(run) >= iteration), None)

    return job.wait_for(found)


def ends_within(job: Command, seconds: float) -> bool:
    with contextlib.suppress(subprocess.TimeoutExpired):
        job.process.wait(seconds)
    return job.process.poll() is not None


def test_a_killed_process_is_started_again_and_a_stop_saves(hold: Callable[[int], None], tmp_path: Path) -> None:
    with_example()
    hold(5)
    # A rank that a test holds does not move.
    job = Command(*LAUNCH, "--hang_timeout", "0", "--max_restarts", "1", *OWN, "--max_iterations", "100000")
    try:
        run = wait_for_iteration(5, job)
        os.kill(pid_of(run, 1), signal.SIGKILL)
        job.wait_for(lambda: len(attempts_of(run)) == 2)
        hold(7)
        wait_for(lambda: num_recorded(run) >= 7, timeout_s=TIMEOUT_S)
        job.send(signal.SIGTERM)  # which asks process 0, and that the other
        for iteration in range(8, 12):
            hold(iteration)
            if ends_within(job, 5.0):
                break
        code, output, errors = job.end()
    finally:
        job.kill()
    assert code == 75, errors
    assert f"restart 1 after a failure (rank 1 was killed by SIGKILL): {run} goes on from iteration 4" in output
    progress = progress_of(run)
    reached = progress["iteration"]
    assert (progress["status"], progress["checkpoint"]) == ("preempted", f"checkpoints/model_{reached}")
    assert "Traceback" not in errors

    hold(100)
    os.chdir(tmp_path)
    train("--resume", str(run), "--max_iterations", str(reached + 1))
    Path("alone").mkdir()
    os.chdir("alone")
    with_example()
    undisturbed = metrics_of(train(*OWN, "--max_iterations", str(reached + 1)))
    os.chdir(tmp_path)
    assert_same_curve(run, undisturbed)


# As sitecustomize.py it is imported by every process first.
PLANT = """
import importlib.util, os, sys
from importlib.abc import MetaPathFinder

class Plant(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != "lockstep.learn.jax.training":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module
        def execute_and_plant(module):
            execute(module)
            iterate = module.Training.iterate
            def faulty(training, *arguments):
                if training.iteration == 2:
                    raise LookupError("planted")
                return iterate(training, *arguments)
            module.Training.iterate = faulty
        spec.loader.exec_module = execute_and_plant
        return spec

if os.environ.get("RANK") == "0":
    sys.meta_path.insert(0, Plant())
"""


def test_a_failure_where_the_coordinator_is_is_not_blamed_on_another(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("sitecustomize.py").write_text(PLANT)
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))
    with_example()
    # With process 0 goes JAX's service, at which the others are aborted by C++: a signal, where process 0 has an error.
    job = Command(*LAUNCH, *OWN, "--max_iterations", "100")
    try:
        code, _, errors = job.end()
    finally:
        job.kill()
    assert code == 1, errors
    assert "LookupError: planted" in errors
    assert "SIGABRT" not in errors
    progress = progress_of(only_run(TASK))
    assert (progress["iteration"], progress["status"]) == (2, "failed")
    assert progress["reason"].startswith("LookupError: planted")
