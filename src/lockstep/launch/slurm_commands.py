"""SLURM's own commands: handing a job in, and what SLURM knows of it."""

import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.core.errors import RunError, UsageError

_TIMEOUT_S = 60.0
"""A controller that is busy may take its time."""
_NO_JOB = "Invalid job id"
_ACCOUNT_FIELDS = ("State", "ExitCode", "Elapsed", "Timelimit", "NodeList")


@dataclass(frozen=True)
class JobState:
    """What SLURM knows of a job, in SLURM's words."""

    state: str
    """As in RUNNING, PENDING, COMPLETED, CANCELLED."""
    reason: str = ""
    """Why it waits or ended."""
    nodes: str = ""
    elapsed: str = ""
    """As SLURM writes times: [days-]hours:minutes:seconds."""
    time_limit: str = ""
    exit_code: str = ""
    """Of the script, and after a colon the signal that ended it."""
    start: str = ""
    num_restarts: int = 0
    stdout: str = ""
    stderr: str = ""

    @property
    def is_over(self) -> bool:
        """Whether SLURM will do nothing more for it."""
        return self.state not in _UNDER_WAY


_UNDER_WAY = (
    "PENDING",
    "CONFIGURING",
    "RUNNING",
    "COMPLETING",
    "SUSPENDED",
    "STOPPED",
    "STAGE_OUT",
    "SIGNALING",
    "RESIZING",
    "REQUEUED",
    "REQUEUE_FED",
    "REQUEUE_HOLD",
    "SPECIAL_EXIT",
    "RESV_DEL_HOLD",
)


def check_sbatch() -> None:
    """Raise UsageError where jobs can't be handed in."""
    if shutil.which("sbatch") is None:
        raise UsageError("sbatch is not here, so --submit can't work; leave it out, and submit where SLURM is")


def syntax_error(text: str) -> str:
    """Return what bash has against a script, in one line; "" if nothing, or if there is no bash here.

    A here-document without an end is a mere warning to bash, and takes the rest of the script for its own.
    """
    bash = shutil.which("bash")
    if bash is None:
        return ""
    surroundings = {"LC_ALL": "C"}  # without the user's functions and BASH_ENV, of which bash might speak too
    done = subprocess.run(
        [bash, "-n"], input=text.encode(), env=surroundings, capture_output=True, timeout=_TIMEOUT_S, check=False
    )
    lines = done.stderr.decode(errors="replace").splitlines()
    return lines[0].removeprefix(f"{bash}: ") if lines else "" if done.returncode == 0 else "it does not say what"


def submit(script: Path, folder: Path) -> str:
    """Hand a job script in and return the job's id.

    Args:
        script: to hand in.
        folder: where to do so.

    Raises:
        RunError: SLURM does not take it.
    """
    done = _run(["sbatch", "--parsable", str(folder / script)], folder)
    if done is None:
        raise RunError(
            f"sbatch does not answer; look with squeue whether the job is there before you submit {script} again"
        )
    match = re.match(r"\d+", done.stdout.strip())  # a semicolon and the cluster may follow
    if done.returncode != 0 or match is None:
        raise RunError(f"SLURM does not take the job: {_in_one_line(done)}; {script} is written")
    return match[0]


def job_state(job_id: str, cluster: str = "") -> JobState | None:
    """Return what SLURM knows of a job; None if it knows nothing any more.

    Args:
        job_id: of the job.
        cluster: where it was submitted; empty if that is not known.

    Raises:
        RunError: SLURM is not here, does not answer, or is that of another cluster.
    """
    if shutil.which("scontrol") is None:
        raise RunError("the command scontrol is not here")
    here = _cluster_name() if cluster else ""
    if here and here.lower() != cluster.lower():
        raise RunError(f"it is a job of cluster {cluster}, and this is cluster {here}")
    done = _run(["scontrol", "show", "job", job_id])
    if done is None:
        raise RunError("scontrol does not answer")
    if done.returncode == 0:
        return _of_controller(_record_of(job_id, done.stdout))
    if _NO_JOB not in done.stderr:
        raise RunError(_in_one_line(done))
    return _of_accounting(job_id)


def _cluster_name() -> str:
    """Return the name of the cluster whose commands are here; empty if it does not say."""
    done = _run(["scontrol", "show", "config"])
    match = None if done is None else re.search(r"^ClusterName\s*=\s*(\S+)", done.stdout, re.MULTILINE)
    return "" if match is None else match[1]


def _record_of(job_id: str, text: str) -> str:
    """Return what a text says of one job; the id of an array's last element stands for all of them."""
    records = re.split(r"\n\s*\n", text)
    return next((record for record in records if record.startswith(f"JobId={job_id} ")), text)


def _of_controller(text: str) -> JobState:
    # The job's own words (name, comment) might look like fields; each has a line of its own, or the end of one.
    def field(pattern: str) -> str:
        found = re.search(rf"^   {pattern}", text, re.MULTILINE)
        return found[1].strip() if found and found[1] not in ("(null)", "None", "Unknown") else ""

    return JobState(
        state=field(r"JobState=(\S+)") or "UNKNOWN",
        reason=field(r"JobState=\S+ Reason=(.*?) Dependency="),
        nodes=field(r"NodeList=(\S+)"),
        elapsed=field(r"RunTime=(\S+)"),
        time_limit=field(r"RunTime=\S+ TimeLimit=(\S+)"),
        exit_code=field(r"Requeue=.* ExitCode=(\S+)"),
        start=field(r"StartTime=(\S+)"),
        num_restarts=int(field(r"Requeue=\d+ Restarts=(\d+)") or 0),
        stdout=field(r"StdOut=(.*)"),
        stderr=field(r"StdErr=(.*)"),
    )


def _of_accounting(job_id: str) -> JobState | None:
    if shutil.which("sacct") is None:
        return None
    flags = ["--noheader", "--parsable2", "--allocations", f"--jobs={job_id}", f"--format={','.join(_ACCOUNT_FIELDS)}"]
    done = _run(["sacct", *flags])
    lines = [] if done is None or done.returncode != 0 else done.stdout.splitlines()  # without accounting it fails
    if not lines:
        return None
    values = dict(zip(_ACCOUNT_FIELDS, lines[-1].split("|"), strict=False))
    return JobState(
        state=values.get("State", "UNKNOWN").partition(" ")[0],  # CANCELLED by 1000
        nodes=values.get("NodeList", ""),
        elapsed=values.get("Elapsed", ""),
        time_limit=values.get("Timelimit", ""),
        exit_code=values.get("ExitCode", ""),
    )


def _run(words: Sequence[str], folder: Path | None = None) -> "subprocess.CompletedProcess[str] | None":
    try:
        return subprocess.run(
            words, cwd=folder, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return None


def _in_one_line(done: "subprocess.CompletedProcess[str]") -> str:
    """Return the last of what a command says, with the lines that go on with it: the others lead to it."""
    said = done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}"
    return " ".join(re.split(r"\n(?=\S)", said)[-1].split())
