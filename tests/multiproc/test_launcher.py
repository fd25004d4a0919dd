"""``train_multigpu`` with real processes: jobs side by side, crashes, signals, and nothing left behind.

Most ranks run small scripts without torch, so that a launch takes little more than torchrun's own start.
"""

import json
import os
import pty
import shlex
import signal
import socket
import subprocess
import time
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from tests.multiproc.commands import (
    SMALL,
    TIMEOUT_S,
    Command,
    free_port,
    only_run,
    processes_here,
    progress_of,
    wait_for,
)

TWO_RANKS = ("--num_gpus", "2", "--device", "cpu")

pytestmark = pytest.mark.usefixtures("nothing_is_left")

# Every script begins with this; `note` leaves a file that says what happened to a rank.
PREAMBLE = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
rank = int(os.environ["RANK"])
def note(name, content=""):
    Path(f"{name}.tmp{rank}").write_text(json.dumps(content))
    Path(f"{name}.tmp{rank}").rename(f"{name}_{rank}")
"""


class Launch(Command):
    """A launcher at work."""

    def __init__(self, *arguments: str, script: str | None = None, stdout: int = subprocess.PIPE) -> None:
        if script is not None:
            Path("my script.py").write_text(PREAMBLE + script)
        temporary = Path("tmp")
        temporary.mkdir(exist_ok=True)
        super().__init__("train_multigpu", *arguments, stdout=stdout, environment={"TMPDIR": str(temporary.absolute())})


def script_on_two_ranks(script: str, *arguments: str) -> Launch:
    return Launch(*TWO_RANKS, "--script", "my script.py", *arguments, script=script)


def noted(name: str, num_ranks: int = 2) -> bool:
    """Return whether so many ranks have left a note of this name."""
    return len(list(Path().glob(f"{name}_*"))) == num_ranks


def notes(name: str) -> list[object]:
    """Return what the ranks noted, in order."""
    return [json.loads(path.read_text()) for path in sorted(Path().glob(f"{name}_*"))]


def temporary_folders() -> list[Path]:
    return list(Path("tmp").glob("lockstep-*"))


def test_two_jobs_at_once_and_arguments_as_they_are() -> None:
    script = """
note(f"job_{sys.argv[1]}", {name: os.environ[name] for name in ("WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")})
while len(list(Path().glob("job_*_?"))) < 4:  # both jobs are at work at the same time
    time.sleep(0.02)
note("argv_" + sys.argv[1], sys.argv[2:])
print("rank", rank, "speaks", sys.stdout.isatty())
"""
    arguments = ["two words", "--", "--num_gpus", "7", "$HOME ${local_rank} $$", "", "--help", "ö'\""]
    first, second = script_on_two_ranks(script, "a", *arguments), script_on_two_ranks(script, "b", *arguments)
    assert first.end() == (0, "rank 0 speaks False\n", "")
    assert second.end() == (0, "rank 0 speaks False\n", "")
    assert notes("argv_a") == notes("argv_b") == [arguments, arguments]
    environments = notes("job_a") + notes("job_b")
    assert [(entry["WORLD_SIZE"], entry["LOCAL_RANK"]) for entry in environments if isinstance(entry, dict)] == [
        ("2", "0"),
        ("2", "1"),
    ] * 2
    assert len({entry["MASTER_PORT"] for entry in environments if isinstance(entry, dict)}) == 2
    assert temporary_folders() == []


def test_all_ranks_on_the_screen_and_a_terminal_that_stays_one() -> None:
    script = """
print("rank", rank, "speaks", sys.stdout.isatty())
print("and complains", file=sys.stderr)
"""
    both = Launch(*TWO_RANKS, "--log_all_ranks", "--script", "my script.py", script=script)
    master, slave = pty.openpty()
    kept = Launch(*TWO_RANKS, "--tee", "1:1", "--log_dir", "kept", "--script", "my script.py", stdout=slave)
    code, output, errors = both.end()
    assert code == 0
    assert sorted(output.splitlines()) == ["[rank 0] rank 0 speaks False", "[rank 1] rank 1 speaks False"]
    assert sorted(errors.splitlines()) == ["[rank 0] and complains", "[rank 1] and complains"]

    assert kept.process.wait(TIMEOUT_S) == 0
    os.close(slave)
    lines = os.read(master, 10_000).decode().splitlines()
    os.close(master)
    assert sorted(lines) == ["[rank 1] rank 1 speaks False", "rank 0 speaks True"]
    assert kept.process.stderr is not None
    assert kept.process.stderr.read() == "and complains\n"
    logs = {path.parent.name + "/" + path.name: path.read_text() for path in Path("kept").rglob("std*.log")}
    assert logs == {"1/stdout.log": "rank 1 speaks False\n", "1/stderr.log": "and complains\n"}
    assert temporary_folders() == []


def test_a_crash_of_a_hidden_rank_is_shown_and_its_stragglers_end() -> None:
    script = """
if rank == 0:
    # A process that nothing connects to the job any more but its descent.
    code = "import os, time; open('straggler', 'w').write(str(os.getpid())); time.sleep(600)"
    subprocess.Popen([sys.executable, "-c", code], env={}, start_new_session=True)
    while not Path("straggler").exists():
        time.sleep(0.02)
    note("ready")
    time.sleep(600)
while not Path("ready_0").exists():
    time.sleep(0.02)
def deep():
    raise LookupError("not there")
try:
    deep()
except LookupError:
    import traceback
    traceback.print_exc()
    sys.exit(7)
"""
    code, output, errors = script_on_two_ranks(script).end()
    lines = errors.splitlines()
    assert (code, output) == (7, "")
    assert lines[0].startswith(f"lockstep: error: rank 1 (local rank 1 on {socket.gethostname()}, cpu, pid ")
    assert lines[0].endswith(") ended with exit code 7")
    assert "  LookupError: not there" in lines
    log = Path(lines[-1].removeprefix("  logs in "), "stderr.log")
    assert log.read_text().endswith("LookupError: not there\n")
    assert "torch" not in errors
    assert not psutil.pid_exists(int(Path("straggler").read_text()))


def test_a_rank_that_is_killed_decides_the_exit_code() -> None:
    script = """
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(600)
"""
    code, _, errors = script_on_two_ranks(script).end()
    assert code == 128 + signal.SIGKILL
    assert errors.splitlines()[0].endswith(") was killed by SIGKILL")


def test_a_rank_that_fails_because_another_has_is_not_taken_for_the_first() -> None:
    script = """
if rank == 1:
    note("failing")
    sys.exit(7)
while not Path("failing_1").exists():
    time.sleep(0.02)
time.sleep(1.0)
sys.exit(3)
"""
    code, _, errors = script_on_two_ranks(script).end()
    assert code == 7
    assert errors.startswith("lockstep: error: rank 1 ")


def test_a_rank_of_a_script_that_ends_early_and_well_is_named() -> None:
    script = """
if rank == 1:
    note("gone")
    time.sleep(3.0)  # it unloads its libraries, long after its connections are closed
    os._exit(0)
while not Path("gone_1").exists():
    time.sleep(0.02)
sys.exit("Connection closed by peer")
"""
    code, _, errors = script_on_two_ranks(script).end()
    assert code == 1
    first, second = errors.splitlines()
    assert first == "Connection closed by peer"  # of rank 0, on the screen
    assert second.startswith("lockstep: warning: rank 1 (local rank 1 on ")
    assert second.endswith(") ended early with exit code 0 while the others went on")


EARLY = """
import os
import torch
from lockstep.distributed import DistributedMixin

class Early(DistributedMixin):
    def __init__(self, config, env, comm):
        self.env, self.comm, self.model = env, comm, torch.nn.Linear(1, 1)

    def train(self, observer, evaluation_env):
        if os.environ["RANK"] == "1":
            {end}
        self.comm.gather_text("here", "words")
"""


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("os._exit(0)", " ended early with exit code 0 while the others went on"),
        ("raise SystemExit(0)", "sys.exit(0) was called ("),
    ],
)
def test_a_training_rank_that_ends_early_and_well_is_named_as_the_cause(
    end: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("early_runner.py").write_text(EARLY.format(end=end))
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))
    launch = Launch("--num_gpus", "2", "cartpole_classic", *SMALL, "--runner", "early_runner:Early")
    code, _, errors = launch.end()
    assert code == 1
    last = [line for line in errors.splitlines() if line.startswith("lockstep: error: rank 1 ")]
    assert len(last) == 1, errors
    assert said in last[0]


@pytest.mark.parametrize("has_room", [True, False], ids=["", "attempt folder takes no file"])
def test_the_command_of_the_dry_run_can_be_pasted(has_room: bool) -> None:
    arguments = ("--dry_run", *TWO_RANKS, "--log_dir", "kept", "--script", "my script.py")
    _, output, _ = Launch(*arguments, script="note('ran')\n").end()
    (command,) = [line.removeprefix("command ") for line in output.splitlines() if line.startswith("command ")]
    (folder,) = [word.partition("=")[2] for word in shlex.split(command) if word.startswith("LOCKSTEP_ATTEMPT_DIR=")]
    if not has_room:
        Path(folder).parent.mkdir()
        Path(folder).write_text("")  # a file in its place: not even root can put anything into it
    run = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")
    assert noted("ran")
    assert Path(folder, "agent.json").exists() == has_room


def test_signals_reach_the_ranks_of_a_script() -> None:
    script = """
heard = []
def hear(number, frame):
    heard.append(signal.Signals(number).name)
    note("heard", heard)
    if number == signal.SIGTERM:
        sys.exit(0)
for number in (signal.SIGUSR1, signal.SIGINT, signal.SIGTERM):
    signal.signal(number, hear)
note("ready")
while True:
    time.sleep(0.02)
"""
    launch = script_on_two_ranks(script)
    wait_for(lambda: noted("ready"))
    for number in (signal.SIGUSR1, signal.SIGINT, signal.SIGTERM):
        launch.send(number)
        wait_for(lambda name=number.name: [heard[-1] for heard in notes("heard")] == [name] * 2)  # type: ignore[misc, index]
    assert launch.end() == (0, "", "")
    assert notes("heard") == [["SIGUSR1", "SIGINT", "SIGTERM"]] * 2


def test_a_second_interrupt_kills() -> None:
    script = """
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda *_: note("heard"))
subprocess.run([sys.executable, "-c", "import os; os.fork()"], check=True)  # leaves an orphan, which ends at once
note("ready")
while True:
    time.sleep(0.02)
"""
    launch = script_on_two_ranks(script)
    wait_for(lambda: noted("ready"))
    wait_for(lambda: len(psutil.Process(launch.process.pid).children()) == 1)  # torchrun's agent, and no zombies
    launch.send(signal.SIGTSTP)  # Ctrl-Z, which would stop the launcher alone
    time.sleep(0.3)
    launch.send(signal.SIGINT)
    wait_for(lambda: noted("heard"))
    launch.send(signal.SIGINT)
    code, output, errors = launch.end()
    assert (code, output) == (130, "")
    assert errors.splitlines() == [
        "lockstep: Ctrl-Z does not stop a job of several processes; Ctrl-C ends it",
        "lockstep: killed",
    ]
    assert temporary_folders() == []


def test_an_interrupt_before_anything_runs_ends_at_once() -> None:
    interrupted, preempted = (Launch("--num_gpus", "2", "cartpole_classic", *SMALL) for _ in range(2))
    wait_for(lambda: len(temporary_folders()) == 2)
    interrupted.send(signal.SIGINT)
    preempted.send(signal.SIGTERM)
    said = "lockstep: stopped before training began; nothing was saved\n"
    assert interrupted.end() == (130, "", said)
    assert preempted.end() == (75, "", said)
    assert temporary_folders() == []
    assert not Path("logs").exists()


def test_a_launcher_that_is_killed_takes_the_job_with_it() -> None:
    launch = script_on_two_ranks("note('ready')\ntime.sleep(600)\n")
    wait_for(lambda: noted("ready"))
    launch.send(signal.SIGKILL)
    launch.process.communicate(timeout=TIMEOUT_S)
    wait_for(lambda: processes_here() == [])


@pytest.mark.parametrize("way", ["static", "rendezvous"])
def test_two_launchers_are_two_nodes(way: str) -> None:
    script = "note('here', [os.environ[name] for name in ('WORLD_SIZE', 'LOCAL_RANK', 'GROUP_RANK')])\n"
    port = str(free_port())
    where = {
        "static": ("--master_addr", "127.0.0.1", "--master_port", port),
        "rendezvous": ("--rdzv_endpoint", f"127.0.0.1:{port}", "--rdzv_id", "job7", "--local_addr", "127.0.0.1"),
    }[way]
    common = ("--nnodes", "2", "--num_gpus", "1", "--device", "cpu", *where)
    nodes = [
        Launch(*common, *(("--node_rank", node) if way == "static" else ()), "--script", "my script.py", script=script)
        for node in ("1", "0")
    ]
    for node in nodes:
        code, _, errors = node.end()
        assert code == 0, errors
        assert "waits for the others" in errors
    assert notes("here") == [["2", "0", "0"], ["2", "0", "1"]]
    assert temporary_folders() == []


def long_training() -> Launch:
    """Return a launch that trains already."""
    launch = Launch("--num_gpus", "2", "cartpole_classic", *SMALL, "--max_iterations", "1000000")
    wait_for(lambda: any(path.stat().st_size for path in Path("logs").glob("cartpole_classic/*/metrics.jsonl")))
    return launch


def test_training_stops_together_when_the_launcher_is_asked_to() -> None:
    launch = long_training()
    launch.send(signal.SIGTERM)
    code, _, errors = launch.end()
    assert code == 75, errors
    run = only_run("cartpole_classic")
    assert progress_of(run)["status"] == "preempted"
    assert (run / "checkpoints" / "latest").exists()
    assert temporary_folders() == []


def test_a_first_interrupt_is_answered_at_once() -> None:
    launch = long_training()
    launch.send(signal.SIGINT)
    code, _, errors = launch.end()
    assert code == 130, errors
    assert errors.splitlines().count("lockstep: stopping after this iteration; Ctrl-C again ends it now") == 1


def test_what_the_ranks_refuse_is_one_line() -> None:
    launch = Launch("--num_gpus", "2", "cartpole_classic", *SMALL, "--checkpoint", "nothing.pt")
    code, output, errors = launch.end()
    assert (code, output) == (2, "")
    assert errors.count("\n") == 1
    assert errors.startswith("lockstep: error: ")
    assert "nothing.pt" in errors
