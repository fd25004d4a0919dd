"""The job script, run by a real bash with stand-ins for SLURM's commands and for Python; what can't work is refused."""

import os
import shlex
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from lockstep.core.errors import UsageError
from lockstep.launch.slurm import Options, Payload, Surroundings, make_job, time_limit_s
from lockstep.launch.slurm_script import quoted_for_sbatch, script_of

# Python that notes how it was called, and ends as the test wants it to.
PYTHON = """\
#!/bin/bash
case " $* " in *" --dry_run "*) what=check ;; *) what=rank_$SLURM_NODEID ;; esac
printf '%s\\0' "$@" > "$RECORDS/$what.words"
env > "$RECORDS/$what.environment"
if [ "$what" = check ]; then exit "${CHECK_CODE:-0}"; fi
if [ -n "$SIGNAL_TO_LAUNCHER" ]; then kill -"$SIGNAL_TO_LAUNCHER" $$; fi
codes=($CODES)
exit "${codes[$SLURM_NODEID]}"
"""
# srun: signals its parent as SLURM might, and starts the tasks, which inherit no signals from it; ends with their worst
# code.
SRUN = """\
#!/bin/bash
printf '%s\\0' "$@" > "$RECORDS/srun.words"
while [ "$1" != bash ]; do
    case "$1" in --nodes=*) nodes=${1#--nodes=} ;; esac
    shift
done
if [ -n "$SIGNAL_TO_JOB" ]; then kill -"$SIGNAL_TO_JOB" $PPID; sleep 0.2; fi
worst=0
for ((node = 0; node < nodes; node++)); do
    code=0
    SLURM_NODEID=$node env --default-signal "$@" || code=$?
    if [ "$code" -gt "$worst" ]; then worst=$code; fi
done
exit "$worst"
"""
SCONTROL = """\
#!/bin/bash
case "$1 $2" in
    "show hostnames") [ "$3" = 'node[0-1]' ] && printf 'node0\\nnode1\\n' ;;
    "show node") [ "$3" = node0 ] && printf 'NodeName=node0\\n   NodeAddr=10.0.0.7 NodeHostName=h Version=22\\n' ;;
    "requeue "*) echo "$2" >> "$RECORDS/requeued"; exit "${REQUEUE_CODE:-0}" ;;
esac
"""


@dataclass(frozen=True)
class Ended:
    """What a run of a script left."""

    code: int
    stderr: str
    records: Path

    def words(self, name: str) -> list[str]:
        """The words with which something was called."""
        return (self.records / f"{name}.words").read_text().split("\0")[:-1]

    def environment(self, name: str) -> dict[str, str]:
        """The environment in which something was called."""
        lines = (self.records / f"{name}.environment").read_text().splitlines()
        return dict(line.partition("=")[::2] for line in lines)

    @property
    def requeued(self) -> list[str]:
        """Ids of the jobs that were put back into the queue."""
        path = self.records / "requeued"
        return path.read_text().split() if path.exists() else []


@pytest.fixture
def here(tmp_path: Path) -> Surroundings:
    """A folder whose name needs quotes everywhere, in which Python is a stand-in."""
    folder = tmp_path / 'it\'s $(touch broken) "#1" %j'
    folder.mkdir()
    for name, text in (("python", PYTHON), ("srun", SRUN), ("scontrol", SCONTROL)):
        path = folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    (folder / "slurm").mkdir()
    return Surroundings(folder, str(folder / "bin" / "python"), folder / "packages", ("lockstep", "slurm"))


TRAIN = Payload("cartpole", ("cartpole", "--num_envs", "8", "--resume", "auto"))
SCRIPT = Payload("own", ("--script", "own.py", "-x"), is_script=True)
TWO_NODES = Options(num_nodes=2, gpus_per_node=4, cpus_per_task=6)


def run(options: Options, payload: Payload, here: Surroundings, **settings: str) -> Ended:
    """Run the script of a job as its node 0 would; ``CODES`` are those of the nodes' launchers."""
    text = script_of(make_job(options, payload, here))
    records = here.folder.parent / "records"
    records.mkdir(exist_ok=True)
    environment = os.environ | {
        "PATH": f"{here.folder / 'bin'}:{os.environ['PATH']}",
        "RECORDS": str(records),
        "SLURM_CLUSTER_NAME": "alpha",
        "SLURM_JOB_ID": "41207",
        "SLURM_JOB_NODELIST": "node[0-1]",
        "CODES": "0 0",
        **settings,
    }
    done = subprocess.run(
        ["bash"], input=text, env=environment, cwd=here.folder, capture_output=True, text=True, timeout=60
    )
    assert not list(here.folder.parent.rglob("broken")), "a value was run as a command"
    return Ended(done.returncode, done.stderr, records)


def test_each_node_runs_a_launcher_that_knows_where_they_meet(here: Surroundings) -> None:
    ended = run(TWO_NODES, TRAIN, here)
    assert (ended.code, ended.requeued) == (0, [])
    meeting = ["--num_gpus", "4", "--nnodes", "2", "--master_addr", "10.0.0.7", "--master_port", "11207"]
    work = ["cartpole", "--num_envs", "8", "--resume", "auto"]
    command = ["-m", "lockstep", "train_multigpu"]
    assert ended.words("rank_0") == [*command, "--node_rank", "0", *meeting, *work]
    assert ended.words("rank_1") == [*command, "--node_rank", "1", *meeting, *work]
    assert ended.words("check") == [*command, *meeting, "--node_rank", "0", "--dry_run", *work]
    flags = ended.words("srun")
    assert flags[: flags.index("bash")] == [
        "--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=6", "--cpu-bind=none", "--kill-on-bad-exit=1",
        "--export=ALL",
    ]  # fmt: skip
    assert ended.environment("rank_1")["LOCKSTEP_RUN_KEY"] == "slurm-alpha-41207"


def test_one_node_needs_no_meeting_point(here: Surroundings) -> None:
    ended = run(Options(gpus_per_node=1), TRAIN, here)
    assert ended.words("rank_0") == ["-m", "lockstep", "train_multigpu", "--num_gpus", "1", *TRAIN.words]
    assert "--nodes=1" in ended.words("srun")
    assert not any(word.startswith("--cpus-per-task") for word in ended.words("srun"))


def test_a_folder_whose_name_looks_like_an_option(here: Surroundings) -> None:
    (here.folder / "-x").mkdir()
    ended = run(Options(gpus_per_node=1, output_dir=Path("-x")), TRAIN, here, CODES="75")
    assert (ended.code, ended.requeued) == (75, ["41207"]), ended.stderr
    assert list((here.folder / "-x").iterdir()) == []


def test_no_word_reaches_the_shell(here: Surroundings) -> None:
    nasty: tuple[str, ...] = (
        "$(touch broken)",
        "`touch broken`",
        "; touch broken",
        "'; touch broken; '",
        '"; touch broken; "',
        "a  b",
    )
    nasty += ("#x", "\\", "*", "~", "", "-n", "--run_name=); touch broken", "&& touch broken", "${HOME}")
    payload = Payload("$(touch broken)", ("--script", "own.py", *nasty), is_script=True)
    surroundings = replace(here, command=("lockstep", "slurm", *nasty))
    ended = run(replace(TWO_NODES, assets_dir=Path("$(touch broken)")), payload, surroundings)
    assert ended.code == 0
    assert ended.words("rank_1")[-len(nasty) :] == list(nasty)
    assert ended.words("check")[-len(nasty) :] == list(nasty)
    assert ended.environment("rank_0")["LOCKSTEP_ASSETS_DIR"] == str(here.folder / "$(touch broken)")


def test_all_ranks_saved_and_stopped_so_the_job_is_requeued(here: Surroundings) -> None:
    ended = run(TWO_NODES, TRAIN, here, CODES="75 75")
    assert (ended.code, ended.requeued) == (75, ["41207"])
    again = run(TWO_NODES, TRAIN, here)  # which ends well, and has nothing to do with the attempt before
    assert (again.code, again.requeued) == (0, ["41207"])


def test_only_its_own_element_of_an_array_is_requeued(here: Surroundings) -> None:
    array = {"SLURM_ARRAY_JOB_ID": "41207", "SLURM_ARRAY_TASK_ID": "3"}  # the last element has the array's own id
    ended = run(TWO_NODES, TRAIN, here, CODES="75 75", **array)
    assert (ended.code, ended.requeued) == (75, ["41207_3"])


def test_jobs_of_several_clusters_have_keys_that_differ(here: Surroundings) -> None:
    def key(cluster: str) -> str:
        return run(TWO_NODES, TRAIN, here, SLURM_CLUSTER_NAME=cluster).environment("rank_0")["LOCKSTEP_RUN_KEY"]

    assert [key("alpha"), key("beta"), key("")] == ["slurm-alpha-41207", "slurm-beta-41207", "slurm-41207"]


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        ("1 1", 1),
        ("2 0", 2),
        ("75 1", 1),  # the first node was ended because of the second one's failure
        ("75 137", 137),
        ("0 75", 0),  # only the first node's word counts
        ("130 130", 130),
    ],
)
def test_failures_are_passed_on(here: Surroundings, codes: str, code: int) -> None:
    ended = run(TWO_NODES, TRAIN, here, CODES=codes)
    assert (ended.code, ended.requeued) == (code, [])


def test_a_job_that_can_not_be_requeued_says_how_to_go_on(here: Surroundings) -> None:
    ended = run(TWO_NODES, TRAIN, here, CODES="75 75", REQUEUE_CODE="1")
    assert ended.code == 75
    assert "--resume RUN_DIR" in ended.stderr


def test_what_is_refused_on_the_first_node_ends_the_job_before_the_others_start(here: Surroundings) -> None:
    ended = run(TWO_NODES, TRAIN, here, CHECK_CODE="2")
    assert (ended.code, ended.requeued) == (2, [])
    assert not (ended.records / "srun.words").exists()


def test_the_signal_does_not_end_the_shell_of_the_job(here: Surroundings) -> None:
    ended = run(TWO_NODES, TRAIN, here, CODES="75 75", SIGNAL_TO_JOB="USR1")
    assert (ended.code, ended.requeued) == (75, ["41207"])


def test_the_end_of_a_cancelled_job_is_no_preemption(here: Surroundings) -> None:
    ended = run(TWO_NODES, TRAIN, here, CODES="75 75", SIGNAL_TO_JOB="TERM")
    assert (ended.code, ended.requeued) == (-15, [])
    again = run(TWO_NODES, TRAIN, here)  # in the same files, if somebody has requeued it
    assert (again.code, again.requeued) == (0, [])


@pytest.mark.parametrize(("payload", "code", "requeued"), [(TRAIN, 75, ["41207"]), (SCRIPT, 138, [])])
def test_a_signal_that_comes_before_the_launcher_can_take_it(
    here: Surroundings, payload: Payload, code: int, requeued: list[str]
) -> None:
    # A training has not begun then; a script may have, and knows nothing of the signal.
    ended = run(TWO_NODES, payload, here, SIGNAL_TO_LAUNCHER="USR1")
    assert (ended.code, ended.requeued) == (code, requeued)


def test_setup_comes_first_and_torch_finds_its_own_libraries(here: Surroundings) -> None:
    for name in ("cudnn", "nccl"):
        (here.folder / "packages" / "nvidia" / name / "lib").mkdir(parents=True)
    setup = ("export LD_LIBRARY_PATH=/opt/cuda/lib", "export FROM_SETUP='a b'")
    environment = run(replace(TWO_NODES, setup=setup), TRAIN, here).environment("rank_1")
    *own, last = environment["LD_LIBRARY_PATH"].split(":")
    assert sorted(own) == [f"{here.folder}/packages/nvidia/{name}/lib" for name in ("cudnn", "nccl")]
    assert last == "/opt/cuda/lib"
    assert environment["FROM_SETUP"] == "a b"


def test_a_setup_that_fails_ends_the_job(here: Surroundings) -> None:
    ended = run(replace(TWO_NODES, setup=("module load cuda/99",)), TRAIN, here)
    assert ended.code == 127
    assert not (ended.records / "check.words").exists()


def directives(text: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]


def test_what_sbatch_is_told(tmp_path: Path) -> None:
    options = Options(
        num_nodes=2,
        gpus_per_node=4,
        gpu_type="a100",
        cpus_per_task=32,
        mem="64G",
        partition="gpu,long",
        time="1-12",
        account="lab",
        stop_before_s=300,
        sbatch=("--qos=high", "--comment 'two words'"),
        output_dir=Path("out puts 5%"),
        job_name="night",
    )
    folder = tmp_path / "my project"
    job = make_job(options, TRAIN, Surroundings(folder, "/venv/bin/python", None, ("lockstep", "slurm")))
    text = script_of(job)
    assert directives(text) == [
        "--job-name=night",
        f'"--chdir={folder}"',
        "--nodes=2",
        "--ntasks-per-node=1",
        "--gres=gpu:a100:4",
        "--cpus-per-task=32",
        "--mem=64G",
        "--partition=gpu,long",
        "--account=lab",
        "--time=1-12",
        "--signal=USR1@300",
        "--requeue",
        "--open-mode=append",
        '"--output=out puts 5%%/night_%j.out"',
        '"--error=out puts 5%%/night_%j.err"',
        '--qos=high --comment "two words"',
    ]
    assert text == script_of(job)
    assert max(text.index(line) for line in directives(text)) < text.index("set -e"), (
        "sbatch stops at the first command"
    )
    assert not any(line.startswith("--gres") for line in directives(script_of(replace(job, options=Options()))))


@pytest.mark.parametrize(
    ("word", "quoted"),
    [
        ("--qos=high", "--qos=high"),
        ("a b", '"a b"'),
        ('say "x"', r'"say \"x\""'),
        ("back\\slash", r'"back\\slash"'),
        ("$(x) # 'y'", "\"$(x) # 'y'\""),
        ("", '""'),
    ],
)
def test_quotes_for_sbatch(word: str, quoted: str) -> None:
    assert quoted_for_sbatch(word) == quoted


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 5400), ("1:30", 90), ("2:00:05", 7205), ("1-12", 129600), ("1-1:30", 91800), ("2-0:00:01", 172801)],
)
def test_time_limits(text: str, seconds: int) -> None:
    assert time_limit_s(text) == seconds


@pytest.mark.parametrize("text", ["1h", "", "1:2:3:4", "-5", "1-", "1-2-3", "1.5", "12:", "tomorrow", "²"])
def test_what_is_no_time_limit(text: str) -> None:
    with pytest.raises(UsageError, match="days-hours:minutes:seconds"):
        time_limit_s(text)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (Options(gpus_per_node=2, ranks_per_node=2), ["--gpus_per_node", "--ranks_per_node", "keep one"]),
        (Options(ranks_per_node=2, gpu_type="a100"), ["--gpu_type a100 goes with --gpus_per_node"]),
        (Options(gpus_per_node=2, gpu_type="a100:4"), ["gpu_type 'a100:4'"]),
        (Options(mem="64GB"), ["mem '64GB'", "64G"]),
        (Options(mem="lots"), ["mem 'lots'"]),
        (Options(partition="gpu --nodes=9"), ["partition 'gpu --nodes=9' must be one word"]),
        (Options(account="lab\n#SBATCH --nodes=9"), [r"'lab\n#SBATCH --nodes=9' holds a line break"]),
        (Options(setup=("true\nfalse",)), ["line break"]),
        (Options(time="2:00"), ["time 2:00 is 120 s", "--stop_before"]),
        (Options(time="later"), ["time 'later' is none of the forms"]),
        (Options(stop_before_s=70000), ["stop_before must lie in 1 to 65535 seconds, not 70000"]),
        (Options(job_name="a/b"), ["job_name 'a/b'"]),
        (Options(job_name="-x"), ["job_name '-x'"]),
        (Options(output_dir=Path("a\\b")), ["output_dir", "backslash"]),
        (Options(output_dir=Path("/dev/null/x")), ["/dev/null is no folder", "--output_dir"]),
        (Options(script=Path("mine.sh")), ["mine.sh was not written by lockstep slurm"]),
        (Options(script=Path("slurm")), ["is a folder", "--script FILE"]),
        (Options(sbatch=("qos=high",)), ["'qos=high' is no option of sbatch"]),
        (Options(sbatch=("",)), ["'' is no option"]),
        (Options(sbatch=("--comment='x",)), ["can't be read", "quotes"]),
        (Options(sbatch=("--nodes=3",)), ["'--nodes=3' is lockstep's to say: write --nodes N"]),
        (Options(sbatch=("-N3",)), ["write --nodes N"]),
        (Options(sbatch=("--qos=high --ntasks 4",)), ["one launcher on each node"]),
        (Options(sbatch=("--gres=gpu:1",)), ["--gpus_per_node N"]),
        (Options(sbatch=("--no-requeue",)), ["requeues"]),
        (Options(sbatch=("--signal=B:USR1@5",)), ["--stop_before S"]),
    ],
)
def test_refused_in_one_line(options: Options, words: list[str], tmp_path: Path) -> None:
    (tmp_path / "slurm").mkdir()
    (tmp_path / "mine.sh").write_text("#!/bin/bash\necho precious\n")
    surroundings = Surroundings(tmp_path, "/venv/bin/python", None, ("lockstep", "slurm"))
    with pytest.raises(UsageError) as caught:
        make_job(options, TRAIN, surroundings)
    line = str(caught.value)
    assert "\n" not in line
    assert all(word in line for word in words), line


@pytest.mark.parametrize(
    "change",
    [
        {"folder": Path("/home/u/a\nb")},
        {"python": "/venv\r/python"},
        {"command": ("lockstep", "slurm", "x\n#SBATCH --nodes=9")},
    ],
)
def test_nothing_around_a_job_breaks_its_lines(change: Mapping[str, object], tmp_path: Path) -> None:
    surroundings = replace(Surroundings(tmp_path, "python", None, ("lockstep",)), **change)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="line break"):
        make_job(Options(), TRAIN, surroundings)


def test_the_header_writes_it_again(here: Surroundings) -> None:
    command = ("lockstep", "slurm", "--setup", "module load x", "--", "train", "it's")
    text = script_of(make_job(Options(), TRAIN, replace(here, command=command)))
    lines = [line.removeprefix("#   ") for line in text.splitlines() if line.startswith("#   ")]
    assert [shlex.split(line) for line in lines] == [["cd", str(here.folder)], list(command)]
