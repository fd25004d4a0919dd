"""Job scripts on a real SLURM cluster of two nodes: training to the end, and going on after whatever SLURM does."""

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lockstep.launch.slurm import Options, Payload, Surroundings, make_job
from lockstep.launch.slurm_script import FIRST_PORT, NUM_PORTS, script_of
from tests.cluster.slurm_cluster import SlurmCluster
from tests.multiproc.commands import SMALL, only_run

TIMEOUT_S = 240.0
TASK = "cartpole_classic"
NODES = ("--nodes", "2", "--ranks_per_node", "2", "--cpus_per_task", "3")
OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED")


def lockstep(cluster: SlurmCluster, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lockstep", *words]
    return subprocess.run(command, env=cluster.environment, capture_output=True, text=True, timeout=60)


def submit(cluster: SlurmCluster, *words: str) -> str:
    """Write and submit a job; return its id."""
    done = lockstep(cluster, "slurm", "--submit", *words)
    assert done.returncode == 0, done.stderr
    match = re.match(r"job (\d+) is submitted", done.stdout)
    assert match, done.stdout
    return match[1]


def said(job_id: str) -> str:
    """Return what a job printed."""
    return "\n".join(path.read_text() for path in sorted(Path("slurm").glob(f"*_{job_id}.*")))


def wait_until(condition: Callable[[], object], job_id: str, what: str) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, f"not {what}\n{said(job_id)}"
        time.sleep(0.2)


def progress() -> dict[str, Any]:
    """Return the progress of the only run so far, nothing if there is none."""
    runs = [path for path in Path("logs", TASK).glob("*") if not path.name.startswith(".")]
    return json.loads((runs[0] / "progress.json").read_text()) if runs else {}


def train_long(cluster: SlurmCluster, *flags: str) -> str:
    """Submit a training that lasts long enough to be interrupted; return the job's id once it is under way."""
    job_id = submit(
        cluster,
        *NODES,
        *flags,
        "--",
        "train",
        TASK,
        *SMALL,
        "--max_iterations",
        "100000",
        "--checkpoints.interval",
        "5",
    )
    wait_until(lambda: progress().get("checkpoint"), job_id, "training")
    return job_id


def attempts() -> list[dict[str, Any]]:
    run: dict[str, Any] = json.loads((only_run(TASK) / "run.json").read_text())
    return list(run["attempts"])


def iterations() -> list[int]:
    """Return the iterations that the run's metrics hold."""
    lines = (only_run(TASK) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["iteration"] for line in lines]


def check_goes_on(cluster: SlurmCluster, job_id: str, num_attempts: int, done_before: int) -> None:
    """The job has begun again in the same run, after what it had done before."""
    wait_until(lambda: len(attempts()) == num_attempts, job_id, "started again")
    wait_until(lambda: progress()["iteration"] > done_before + 2, job_id, "training again")
    assert cluster.job(job_id)["Restarts"] == str(num_attempts - 1)
    assert [attempt["world_size"] for attempt in attempts()] == [4] * num_attempts
    assert [attempt["num_requeues"] for attempt in attempts()] == list(range(num_attempts))
    numbers = iterations()
    assert numbers == list(range(1, len(numbers) + 1)), "an iteration is missing, or was made twice"


def test_two_nodes_train_to_the_end(cluster: SlurmCluster) -> None:
    exact = ("--setup", "export SLURM_EXACT=1")  # steps get what they ask for, not all that the job has
    job_id = submit(cluster, *NODES, *exact, "--", "train", TASK, *SMALL, "--max_iterations", "8")
    wait_until(lambda: "CPUs=" in cluster.step(job_id), job_id, "in its step")
    assert " CPUs=6 Tasks=2 " in cluster.step(job_id), "two tasks with three cores each were asked for"
    job = cluster.wait_for(job_id, lambda job: job["JobState"] in OVER, TIMEOUT_S)
    assert job["JobState"] == "COMPLETED", said(job_id)
    run = only_run(TASK)
    assert progress()["status"] == "finished"
    assert iterations() == list(range(1, 9))
    info = json.loads((run / "run.json").read_text())
    assert info["run_key"] == f"slurm-lockstep-{job_id}"  # so is the cluster called
    assert [(rank["rank"], rank["local_rank"]) for rank in info["ranks"]] == [(0, 0), (1, 1), (2, 0), (3, 1)]
    left = sorted(path.name for path in Path("slurm").iterdir())
    assert left == [f"{TASK}.sh", f"{TASK}_{job_id}.err", f"{TASK}_{job_id}.out"]
    check_status(cluster, f"{job_id} COMPLETED on node[0-1]", "finished, iteration 8 of 8")


def check_status(cluster: SlurmCluster, *words: str) -> None:
    done = lockstep(cluster, "slurm", "status", str(only_run(TASK)))
    assert all(word in done.stdout for word in words), (done.stdout, done.stderr)


@pytest.mark.timeout(900)
def test_a_job_goes_on_until_it_is_cancelled(cluster: SlurmCluster) -> None:
    job_id = train_long(cluster)

    # SLURM's own signal goes to every process of the step: shells, launchers, agents and ranks.
    cluster.command("scancel", "--signal=USR1", job_id)
    wait_until(lambda: progress()["status"] == "preempted", job_id, "saved")
    stopped = progress()
    assert stopped["checkpoint"] == f"checkpoints/model_{stopped['iteration']}.pt"
    check_status(cluster, "preempted, iteration")
    check_goes_on(cluster, job_id, 2, stopped["iteration"])
    assert attempts()[1]["iteration"] == stopped["iteration"]

    cluster.command("scontrol", "requeue", job_id)
    check_goes_on(cluster, job_id, 3, progress()["iteration"])
    assert attempts()[2]["iteration"] >= stopped["iteration"]
    check_status(cluster, f"{job_id} RUNNING on node[0-1]", "requeued 2 times", "running, iteration")

    cluster.command("scancel", job_id)
    job = cluster.wait_for(job_id, lambda job: job["JobState"] in OVER, TIMEOUT_S)
    assert (job["JobState"], job["Restarts"]) == ("CANCELLED", "2")
    check_status(cluster, f"{job_id} CANCELLED", f"train --resume {only_run(TASK)}")


@contextmanager
def taken(first: int, last: int) -> Iterator[None]:
    """Take the ports of the jobs with these ids, as strangers would."""
    listeners = []
    try:
        for job_id in range(first, last + 1):
            listeners.append(socket.socket())
            listeners[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listeners[-1].bind(("", FIRST_PORT + job_id % NUM_PORTS))
            listeners[-1].listen()
        yield
    finally:
        for listener in listeners:
            listener.close()


def test_a_taken_port_ends_the_job_before_it_begins(cluster: SlurmCluster) -> None:
    before = int(cluster.command("sbatch", "--parsable", "--hold", "--output=/dev/null", "--wrap=true"))
    cluster.command("scancel", str(before))
    with taken(before + 1, before + 1):
        job_id = submit(cluster, *NODES, "--", "train", TASK, *SMALL, "--max_iterations", "8")
        assert int(job_id) == before + 1
        job = cluster.wait_for(job_id, lambda job: job["JobState"] in OVER, TIMEOUT_S)
    assert (job["JobState"], job["ExitCode"], job["Restarts"]) == ("FAILED", "2:0", "0")
    assert f"port {FIRST_PORT + before + 1} of this node is taken" in said(job_id)
    assert not Path("logs").exists()


def test_a_failure_is_no_preemption(cluster: SlurmCluster) -> None:
    # srun ends the first node because of the second one; its launcher says so, but that is not why the job ended.
    Path("breaks.py").write_text("import os, sys, time\nsys.exit(3 if os.environ['RANK'] == '3' else time.sleep(60))\n")
    job_id = submit(cluster, *NODES, "--", "breaks.py")
    job = cluster.wait_for(job_id, lambda job: job["JobState"] in OVER, TIMEOUT_S)
    assert (job["JobState"], job["Restarts"]) == ("FAILED", "0"), said(job_id)
    assert "rank 3" in said(job_id)
    assert "exit code 3" in said(job_id)


STOPS_ONCE = """
import os, sys, time
from pathlib import Path

def wait_for(task, times):
    while Path("starts").read_text().split().count(task) < times:
        time.sleep(0.1)

task = os.environ["SLURM_ARRAY_TASK_ID"]
with open("starts", "a") as starts:
    starts.write(f"{task}\\n")
Path(f"keys_{task}").open("a").write(os.environ["LOCKSTEP_RUN_KEY"] + "\\n")
if task == "0":
    wait_for("1", 2)
elif Path("starts").read_text().split().count("1") == 1:
    wait_for("0", 1)
    sys.exit(75)
"""


def test_one_element_of_an_array_is_requeued_alone(cluster: SlurmCluster) -> None:
    Path("stops_once.py").write_text(STOPS_ONCE)
    job_id = submit(cluster, "--ranks_per_node", "1", "--sbatch=--array=0-1", "--", "stops_once.py")
    wait_until(lambda: not cluster.command("squeue", "--noheader").strip(), job_id, "over")
    assert sorted(Path("starts").read_text().split()) == ["0", "1", "1"], said(job_id)
    first, second = Path("keys_1").read_text().split()
    assert first == second == f"slurm-lockstep-{job_id}"  # the last element has the id of all
    assert Path("keys_0").read_text().strip() != first


def test_gpus_and_set_up_reach_the_ranks_of_a_script(cluster: SlurmCluster) -> None:
    # The GPUs of this cluster are none, so the launcher would refuse; what each node was given shows all the same.
    text = "import os, sys\nprint(os.environ['CUDA_VISIBLE_DEVICES'], os.environ['WORD'], sys.argv, flush=True)\n"
    Path("fake_python").write_text(f"#!{sys.executable}\n{text}")
    Path("fake_python").chmod(0o755)
    options = Options(num_nodes=2, gpus_per_node=2, setup=("export WORD='a b'",))
    surroundings = Surroundings(Path.cwd(), str(Path("fake_python").resolve()), None, ("lockstep",))
    Path("slurm").mkdir()
    payload = Payload("show", ("--script", "show.py", "it's", "$HOME"), is_script=True)
    Path("slurm/show.sh").write_text(script_of(make_job(options, payload, surroundings)))
    job_id = cluster.command("sbatch", "--parsable", "slurm/show.sh").strip()
    cluster.wait_for(job_id, lambda job: job["JobState"] in OVER, TIMEOUT_S)
    lines = [line for line in Path(f"slurm/show_{job_id}.out").read_text().splitlines() if "--dry_run" not in line]
    assert len(lines) == 2
    assert all(line.startswith("0,1 a b ") and line.endswith("""'show.py', "it's", '$HOME']""") for line in lines)


def test_sbatch_reads_every_value_as_it_was_given(cluster: SlurmCluster) -> None:
    folder = Path('it\'s "mine" $(touch broken) #1; 100%').resolve()
    folder.mkdir()
    comment = "a \"b\" \\ $(touch broken) `touch broken` # 'c' %j"
    quoted = "'" + comment.replace("'", "'\\''") + "'"
    python = folder / "python"
    python.write_text('#!/bin/sh\necho "$PWD"\n')
    python.chmod(0o755)
    options = Options(ranks_per_node=1, output_dir=Path("out 5%"), sbatch=(f"--comment={quoted}",))
    (folder / "out 5%").mkdir()
    job = make_job(options, Payload("x", ()), Surroundings(folder, str(python), None, ("lockstep",)))
    Path("job.sh").write_text(script_of(job))
    job_id = cluster.command("sbatch", "--parsable", "job.sh").strip()
    assert f"   Comment={comment} \n" in cluster.command("scontrol", "show", "job", job_id)
    cluster.wait_for(job_id, lambda job: job["JobState"] == "COMPLETED", TIMEOUT_S)
    output, errors = (folder / path for path in job.output(job_id))
    assert output.read_text() == f"{folder}\n" * 2  # of the check and of the only rank
    assert errors.exists()
    assert not list(Path().rglob("broken"))


@pytest.mark.slow
@pytest.mark.skipif(
    os.environ.get("LONG_TESTS") != "1", reason="takes minutes, as time limits do; LONG_TESTS=1 runs it"
)
@pytest.mark.timeout(600)
def test_a_job_that_reaches_its_time_limit_goes_on_by_itself(cluster: SlurmCluster) -> None:
    job_id = train_long(cluster, "--time", "3", "--stop_before", "60")
    wait_until(lambda: progress()["status"] == "preempted", job_id, "saved before its time limit")
    check_goes_on(cluster, job_id, 2, progress()["iteration"])
