"""``lockstep slurm`` as a user types it: what it writes and prints, and what it refuses before it writes anything."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.slurm_fixtures import TRAIN, call, make_run, written

Program = Callable[[str, str], None]


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    """Makes stand-ins for SLURM's commands; without one, no such command is found."""
    folder = tmp_path.parent / f"{tmp_path.name}_bin"
    folder.mkdir()
    others = [path for path in os.environ["PATH"].split(":") if not (Path(path) / "scontrol").exists()]
    monkeypatch.setenv("PATH", ":".join([str(folder), *others]))

    def make(name: str, text: str) -> None:
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)

    return make


def work_of(path: str | Path) -> list[str]:
    """Return the words of the array ``work`` as bash reads them."""
    text = Path(path).read_text()
    block = text[text.index("work=(") : text.index("\n)\n") + 2]
    show = block + "\nprintf '%s\\0' \"${work[@]}\""
    done = subprocess.run(["bash", "-c", show], capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.split("\0")[:-1]


@pytest.mark.parametrize(
    ("flags", "work"),
    [
        (
            ["--", "train", "--task", "cartpole_swingup", "--num_envs", "64"],
            ["--task", "cartpole_swingup", "--num_envs", "64", "--resume", "auto"],
        ),
        (["--", "train", "cartpole_swingup", "--resume", "auto"], ["cartpole_swingup", "--resume", "auto"]),
        (["--", "train-multigpu", "cartpole_swingup", "--tee", "3"], None),
        (
            ["--ranks_per_node", "2", "--", "train", "cartpole_swingup"],
            ["cartpole_swingup", "--device", "cpu", "--resume", "auto"],
        ),
        (
            ["--ranks_per_node", "2", "--", "train", "cartpole_swingup", "--device", "cpu"],
            ["cartpole_swingup", "--device", "cpu", "--resume", "auto"],
        ),
    ],
)
def test_a_training(flags: list[str], work: list[str] | None, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys, "--cpus_per_task", "8", *flags)
    assert (code, err) == (0, "")
    assert out == "slurm/cartpole_swingup.sh is written; sbatch slurm/cartpole_swingup.sh submits it (or --submit)\n"
    assert written() == ["slurm", "slurm/cartpole_swingup.sh"]
    assert work_of("slurm/cartpole_swingup.sh") == (work or ["cartpole_swingup", "--tee", "3", "--resume", "auto"])


def test_a_script_of_ones_own(capsys: pytest.CaptureFixture[str]) -> None:
    Path("my train.py").write_text("")
    code, _, err = call(capsys, "--ranks_per_node", "2", "--", "my train.py", "--resume", "--rate", "it's")
    assert (code, err) == (0, "")
    assert work_of("slurm/my_train.sh") == ["--device", "cpu", "--script", "my train.py", "--resume", "--rate", "it's"]


def test_the_same_command_writes_the_same_and_other_files_stay(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--gpus_per_node", "4", "--script", "night.sh", "--output_dir", "out", "--", "train", "cartpole_swingup"]
    assert call(capsys, *command)[0] == 0
    first = Path("night.sh").read_text()
    assert call(capsys, *command)[0] == 0
    assert Path("night.sh").read_text() == first
    assert written() == ["night.sh", "out"]
    Path("night.sh").write_text("precious\n")
    code, _, err = call(capsys, *command)
    assert code == 2
    assert "not written by lockstep slurm" in err
    assert Path("night.sh").read_text() == "precious\n"


def test_what_may_be_repeated(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--setup", "module load cuda", "--setup=ulimit -n 9999", "--sbatch", "--qos=high", "--sbatch=-C fast"]
    assert call(capsys, *flags, "--", "train", "cartpole_swingup")[0] == 0
    lines = Path("slurm/cartpole_swingup.sh").read_text().splitlines()
    assert "#SBATCH --qos=high -C fast" in lines
    assert lines.index("module load cuda") + 1 == lines.index("ulimit -n 9999")


def test_a_runner_that_can_not_go_on_is_refused_now_and_not_in_the_queue(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path.cwd()))
    train = "    def __init__(self, config, env, comm): ...\n    def train(self, observer, evaluation_env): ...\n"
    resume = "    def state_dict(self): ...\n    def load_state_dict(self, state): ...\n"
    Path("runner_for_slurm.py").write_text(f"class Short:\n{train}class Long:\n{train}{resume}")
    work = ["--", "train", "cartpole_swingup", "--runner"]
    code, _, err = call(capsys, *work, "runner_for_slurm:Short")
    assert code == 2
    assert "runner_for_slurm:Short has no state_dict(), which --resume needs" in err
    assert not Path("slurm").exists()
    assert call(capsys, *work, "runner_for_slurm:Long")[0] == 0


LONG = 300 * "x"  # more than a name may have


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], ["what is the job to run?", "-- train TASK"]),
        (["--nodes", "2", "--"], ["what is the job to run?"]),
        (["--nodes", "2", "train", "cartpole_swingup"], ["'train' is what the job runs: write -- before it"]),
        (["my.py"], ["write -- before it"]),
        (["stats"], ["did you mean 'status'"]),
        (["--node", "2", *TRAIN], ["'--node'", "did you mean '--nodes'"]),
        (["--num_gpus", "2", *TRAIN], ["--gpus_per_node N"]),
        (["--ntasks", "2", *TRAIN], ["--ranks_per_node N"]),
        (["--qos", "high", *TRAIN], ["--sbatch=--qos=high"]),
        (["--task", "cartpole_swingup"], ["stands after --"]),
        (["--sbatch", "--submit", *TRAIN], ["--sbatch needs a value"]),
        (["--setup", *TRAIN], ["--setup needs a value"]),
        (["--nodes", "0", *TRAIN], ["nodes must be at least 1"]),
        (["--nodes", "two", *TRAIN], ["nodes must be a whole number, not 'two'"]),
        (["--gpus_per_node", "0", *TRAIN], ["--ranks_per_node N"]),
        (["--gpus_per_node", "2", "--ranks_per_node", "2", *TRAIN], ["keep one"]),
        (["--time", "1h", *TRAIN], ["time '1h'"]),
        (["--sbatch=--nodes=2", *TRAIN], ["write --nodes N"]),
        (["--nodes", "2", "--", "trian", "cartpole_swingup"], ["not 'trian'", "did you mean 'train'"]),
        (["--", "lockstep", "train", "cartpole_swingup"], ["leave 'lockstep' out"]),
        (["--", "python", "my.py"], ["leave 'python' out"]),
        (["--", "missing.py"], ["'missing.py' does not exist"]),
        (["--", "train", "cartpole_swingu"], ["did you mean 'cartpole_swingup'"]),
        ([*TRAIN, "--num_env", "8"], ["--num_envs"]),
        ([*TRAIN, "--num_envs", "0"], ["num_envs"]),
        ([*TRAIN, "--agent.gamma", "2"], ["agent.gamma"]),
        ([*TRAIN, "--num_gpus", "4"], ["--num_gpus is the job script's to say", "--gpus_per_node"]),
        ([*TRAIN, "--node_rank", "0"], ["--node_rank is the job script's to say"]),
        ([*TRAIN, "--dry_run"], ["--dry_run"]),
        ([*TRAIN, "--tee", "7"], ["tee '7'"]),
        ([*TRAIN, "--device", "cpu"], ["--ranks_per_node N instead of --gpus_per_node"]),
        ([*TRAIN, "--device", "cuda:1"], ["cuda:1"]),
        (["--ranks_per_node", "2", *TRAIN, "--device", "cuda"], ["--ranks_per_node", "--gpus_per_node"]),
        ([*TRAIN, "--resume"], ["--resume RUN_DIR"]),
        ([*TRAIN, "--resume", "nowhere"], ["nowhere"]),
        ([*TRAIN, "--run_name", "a\nb"], ["line break"]),
        (["--nodes", "3", *TRAIN, "--total_envs", "8"], ["total_envs 8", "3 ranks"]),
        (["--submit", *TRAIN], ["sbatch is not here"]),
        (["--sbatch", "--nodes=3", *TRAIN], ["write --sbatch=--nodes=3"]),
        (["--sbatch=--comment=a b", *TRAIN], ["'b' belongs to no option", """--sbatch='--comment="a b"'"""]),
        (["--sbatch=--exclusive --comment a b -v", *TRAIN], ["""--sbatch='--comment "a b"'"""]),
        (["--script", f"slurm/{LONG}", *TRAIN], ["can't be made (file name too long)"]),
        (["--script", f"slurm/{LONG[:250]}", *TRAIN], ["file name too long; choose a shorter name"]),  # with .tmp-
        (["--output_dir", f"new/{LONG}", *TRAIN], ["can't be made (file name too long)"]),
        (["--", f"{LONG}.py"], ["does not exist (file name too long)"]),
        ([*TRAIN, "--resume", LONG], ["(file name too long)"]),
        ([5000 * "y", *TRAIN], ["unexpected 'yyy", "(5002 characters)"]),
        ([*TRAIN, f"--{5000 * 'y'}"], ["unknown flag '--yyy", "[5005 characters]"]),
        (["status"], ["which run?"]),
        (["status", "nowhere"], ["no run directory nowhere"]),
        (["status", "a", "b"], ["unexpected 'b'"]),
        (["status", "--json"], ["--json"]),
    ],
)
def test_refused_in_one_line_before_anything_is_written(
    argv: list[str], words: list[str], program: Program, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = call(capsys, *argv)
    assert (code, out) == (2, "")
    assert err.startswith("lockstep: error: ")
    assert err.count("\n") == 1
    assert len(err) < 1200
    assert all(word in err for word in words), err
    assert written() == []


def test_submit(program: Program, capsys: pytest.CaptureFixture[str]) -> None:
    program("sbatch", 'printf "%s\\n" "$@" > submitted; echo "77;alpha"')
    code, out, err = call(capsys, "--submit", "--cpus_per_task=8", *TRAIN)
    assert (code, err) == (0, "")
    assert out == (
        "job 77 is submitted (slurm/cartpole_swingup.sh); it prints to slurm/cartpole_swingup_77.out and "
        "slurm/cartpole_swingup_77.err\n"
    )
    assert Path("submitted").read_text().splitlines() == [
        "--parsable",
        str(Path("slurm/cartpole_swingup.sh").resolve()),
    ]


def test_a_job_that_slurm_does_not_take(program: Program, capsys: pytest.CaptureFixture[str]) -> None:
    program("sbatch", 'echo "sbatch: error: Batch job submission failed:\n  Invalid partition" >&2; exit 1')
    code, out, err = call(capsys, "--submit", "--cpus_per_task=8", *TRAIN)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "submission failed: Invalid partition; slurm/cartpole_swingup.sh is written" in err


def test_a_job_of_which_nobody_knows_whether_it_was_taken(
    program: Program, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lockstep.launch.slurm_commands._TIMEOUT_S", 0.3)
    program("sbatch", "exec /bin/sleep 60")
    code, out, err = call(capsys, "--submit", "--cpus_per_task=8", *TRAIN)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "look with squeue whether the job is there before you submit slurm/cartpole_swingup.sh again" in err


SHOW_JOB = """\
echo '\
JobId=77 JobName=x JobState=FAKE Reason=No Dependency=
   JobState={state} Reason={reason} Dependency=(null)
   Requeue=1 Restarts=2 BatchFlag=1 Reboot=0 ExitCode=1:0
   RunTime=00:10:00 TimeLimit=1-00:00:00 TimeMin=N/A
   StartTime=2026-05-01T10:00:00 EndTime=Unknown Deadline=N/A
   NodeList=node[0-1]
   Comment=NodeList=fake
   StdErr=/w/my slurm/x_77.err
   StdOut=/w/my slurm/x_77.out'"""
UNKNOWN_JOB = 'echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1'


def status_of(capsys: pytest.CaptureFixture[str], run: Path) -> dict[str, str]:
    code, out, err = call(capsys, "status", str(run))
    assert (code, err) == (0, "")
    return {line[:12].strip(): line[12:] for line in out.splitlines()}


def test_status_of_a_job_that_runs(program: Program, capsys: pytest.CaptureFixture[str]) -> None:
    program("scontrol", SHOW_JOB.format(state="RUNNING", reason="None"))
    run = make_run("running", run_key="slurm-77")
    assert status_of(capsys, run) == {
        "run": str(run),
        "job": "77 RUNNING on node[0-1] for 00:10:00 of 1-00:00:00; requeued 2 times",
        "output": "/w/my slurm/x_77.out and /w/my slurm/x_77.err",
        "progress": "running, iteration 120 of 500, 3,932,160 env steps in 210 s",
        "checkpoint": "checkpoints/model_100.pt",
        "attempts": "2",
        "1": "2026-05-01T09:00:00 on node0, 8 ranks",
        "2": "2026-05-01T09:00:00 on node1, 8 ranks",
    }


def test_status_of_a_job_that_waits(program: Program, capsys: pytest.CaptureFixture[str]) -> None:
    program("scontrol", SHOW_JOB.format(state="PENDING", reason="Resources or so"))
    told = status_of(capsys, make_run("preempted", run_key="slurm-77"))
    assert told["job"].startswith("77 PENDING (Resources or so)")
    assert "next" not in told


def test_status_of_a_job_that_failed(program: Program, capsys: pytest.CaptureFixture[str]) -> None:
    program("scontrol", SHOW_JOB.format(state="FAILED", reason="NonZeroExitCode"))
    run = make_run("failed", run_key="slurm-77")
    told = status_of(capsys, run)
    assert "77 FAILED (NonZeroExitCode)" in told["job"]
    assert "with exit code 1" in told["job"]
    assert told["next"].endswith(f"-- train --resume {run}")


def test_status_when_only_the_accounts_know_the_job(program: Program, capsys: pytest.CaptureFixture[str]) -> None:
    program("scontrol", UNKNOWN_JOB)
    program("sacct", "echo 'CANCELLED by 1000|0:15|00:09:00|01:00:00|node0'")
    told = status_of(capsys, make_run("running", run_key="slurm-77"))
    assert told["job"] == "77 CANCELLED on node0 for 00:09:00 of 01:00:00 with exit code 0"
    assert "--resume" in told["next"]


@pytest.mark.parametrize("sacct", [None, 'echo "Slurm accounting storage is disabled" >&2; exit 1', ""])
def test_status_when_nobody_knows_the_job(
    sacct: str | None, program: Program, capsys: pytest.CaptureFixture[str]
) -> None:
    program("scontrol", UNKNOWN_JOB)
    if sacct is not None:
        program("sacct", sacct)
    told = status_of(capsys, make_run("running", run_key="slurm-77"))
    assert told["job"] == "77, of which SLURM knows nothing any more"
    assert told["progress"].startswith("running, iteration 120 of 500")
    assert "--resume" in told["next"]


def test_status_of_a_finished_run_asks_for_nothing(program: Program, capsys: pytest.CaptureFixture[str]) -> None:
    program("scontrol", UNKNOWN_JOB)
    assert "next" not in status_of(capsys, make_run("finished", run_key="slurm-77"))


@pytest.mark.parametrize("text", [None, 'echo "slurm_load_jobs error: Unable to contact\n controller" >&2; exit 1'])
def test_status_where_slurm_does_not_answer(
    text: str | None, program: Program, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        program("scontrol", text)
    told = status_of(capsys, make_run("running", run_key="slurm-77"))
    assert told["job"].startswith("77, whose state is not known (")
    assert ("Unable to contact controller" if text else "scontrol is not here") in told["job"]
    assert "next" not in told


@pytest.mark.parametrize("cluster", ["alpha", "ALPHA", "is-a-1"])
def test_status_of_a_job_of_this_cluster_or_another(
    cluster: str, program: Program, capsys: pytest.CaptureFixture[str]
) -> None:
    config = "echo 'Configuration data\nAccountingName = x\nClusterName             = alpha'"
    program("scontrol", f'if [ "$2" = config ]; then {config}; exit; fi; [ "$3" = 77 ] || exit 9; {UNKNOWN_JOB}')
    told = status_of(capsys, make_run("running", run_key=f"slurm-{cluster}-77"))
    if cluster.lower() == "alpha":
        assert told["job"] == "77, of which SLURM knows nothing any more"
    else:
        assert told["job"].endswith("(it is a job of cluster is-a-1, and this is cluster alpha)")
        assert "next" not in told


def test_status_of_the_element_that_has_the_id_of_its_array(
    program: Program, capsys: pytest.CaptureFixture[str]
) -> None:
    other = SHOW_JOB.format(state="FAILED", reason="None").replace("JobId=77", "JobId=76")
    program("scontrol", f"{other}\necho\n{SHOW_JOB.format(state='RUNNING', reason='None')}")
    assert status_of(capsys, make_run("running", run_key="slurm-77"))["job"].startswith("77 RUNNING")


def test_status_of_a_preempted_run_while_slurm_is_silent(program: Program, capsys: pytest.CaptureFixture[str]) -> None:
    said = "error: s_p_parse_file: unable to read conf\nerror: ClusterName\nscontrol: fatal: Unable to process file"
    program("scontrol", f'echo "{said}" >&2; exit 1')
    told = status_of(capsys, make_run("preempted", run_key="slurm-77"))
    assert told["job"] == "77, whose state is not known (scontrol: fatal: Unable to process file)"
    assert "squeue" in told["next"]
    assert "-- train --resume" in told["next"]


def test_status_of_a_run_that_no_job_made(program: Program, capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of(capsys, make_run("finished", run_key=None))["job"].startswith("none")


def test_the_last_job_of_a_run_counts(program: Program, capsys: pytest.CaptureFixture[str]) -> None:
    program("scontrol", '[ "$3" = 80 ] || exit 9; ' + UNKNOWN_JOB)
    run = make_run("running", run_key="slurm-77", attempts=[{"run_key": "slurm-79"}, {"run_key": "slurm-80"}, {}])
    assert status_of(capsys, run)["job"].startswith("80,")


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys, "--help")
    assert (code, err) == (0, "")
    for flag in ("--nodes", "--gpus_per_node", "--stop_before", "--submit", "status RUN_DIR"):
        assert flag in out
    assert max(map(len, out.splitlines())) <= 120
