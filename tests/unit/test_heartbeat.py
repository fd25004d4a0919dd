"""Signs of life, stacks on request, and ends after SIGTERM, of real processes that need no torch."""

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lockstep.core import beats, stack_dump
from lockstep.core.beats import read_beats
from lockstep.core.blame import Limits
from lockstep.core.errors import UsageError
from lockstep.core.outcome import note_failure, read_outcomes
from lockstep.distributed import heartbeat, stopping
from lockstep.distributed.siblings import Siblings

TIMEOUT_S = 60.0
PREAMBLE = """
import ctypes, os, signal, sys, threading, time
from pathlib import Path
from lockstep.core import beats, saves
from lockstep.core.interrupts import overheard, watch
from lockstep.distributed import heartbeat
from lockstep.distributed.stopping import ending_in_time

def hang_in_c():
    # The second lock of a mutex never returns, and no signal interrupts it; Python's own lock is free meanwhile.
    library, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    library.pthread_mutex_lock(mutex)
    print("hangs", flush=True)
    library.pthread_mutex_lock(mutex)

def hang_with_the_lock():
    library, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    library.pthread_mutex_lock(mutex)
    print("hangs", flush=True)
    library.pthread_mutex_lock(mutex)

def work_until(condition):
    while not condition():
        beats.enter("rollout")
        time.sleep(0.01)

"""


class Rank:
    """A process that torchrun could have started as a rank."""

    def __init__(self, script: str, rank: int = 1, **environment: str) -> None:
        variables = {
            "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2",
            "TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_RESTART_COUNT": "0", "LOCKSTEP_PIN": "0",
        }  # fmt: skip
        self.process = subprocess.Popen(
            [sys.executable, "-c", PREAMBLE + script],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | variables | environment,
        )
        self.pid = self.process.pid

    def says(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self) -> tuple[int, str]:
        """Return the exit code and what was said on stderr."""
        _, errors = self.process.communicate(timeout=TIMEOUT_S)
        return self.process.returncode, errors


@pytest.fixture
def start() -> Iterator[Callable[..., Rank]]:
    started: list[Rank] = []

    def start_one(*arguments: object, **environment: str) -> Rank:
        started.append(Rank(*arguments, **environment))  # type: ignore[arg-type]
        return started[-1]

    yield start_one
    for rank in started:
        rank.process.kill()
        rank.process.communicate()


def wait_for(what: Callable[[], object]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not what():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.02)


# --- beating ---------------------------------------------------------------------------------------------------------


def test_a_rank_is_alive_while_its_main_thread_hangs(start: Callable[..., Rank], tmp_path: Path) -> None:
    rank = start("heartbeat.begin()\nheartbeat.begin()\nhang_in_c()", LOCKSTEP_ATTEMPT_DIR=str(tmp_path))
    assert rank.says() == "hangs"
    first = read_beats(tmp_path)[1]
    wait_for(lambda: read_beats(tmp_path)[1].alive_s > first.alive_s)
    assert (read_beats(tmp_path)[1].pid, read_beats(tmp_path)[1].moved_s) == (rank.pid, first.moved_s)


def test_one_process_alone_does_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    heartbeat.begin({})
    assert heartbeat.current() is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"LOCKSTEP_HANG_TIMEOUT_S": "soon"}, "LOCKSTEP_HANG_TIMEOUT_S 'soon' must be a number of seconds"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK is 2 but WORLD_SIZE is 2"),
    ],
)
def test_variables_that_make_no_sense(variables: dict[str, str], said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=said):
        heartbeat.begin(variables | {"LOCKSTEP_ATTEMPT_DIR": str(tmp_path)})
    assert list(tmp_path.iterdir()) == []


def test_a_patience_that_makes_no_sense() -> None:
    with (
        pytest.raises(UsageError, match="LOCKSTEP_TERM_TIMEOUT_S is '0'; give a number of seconds above 0"),
        stopping.ending_in_time({"LOCKSTEP_TERM_TIMEOUT_S": "0"}),
    ):
        pass


# --- stacks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["hang_in_c", "hang_with_the_lock"])
def test_a_hanging_rank_says_where_it_is(how: str, start: Callable[..., Rank], tmp_path: Path) -> None:
    rank = start(f"heartbeat.begin()\n{how}()", LOCKSTEP_ATTEMPT_DIR=str(tmp_path))
    assert rank.says() == "hangs"
    path = stack_dump.stack_path(tmp_path, 1)
    stack_dump.ask(rank.pid, path)
    stack = stack_dump.read_main_thread(path)
    assert stack[0].endswith(f"in {how}")
    assert stack[-1].endswith("in <module>")
    assert rank.process.poll() is None


def test_a_handler_of_the_users_own_is_not_taken_away(start: Callable[..., Rank], tmp_path: Path) -> None:
    script = """
signal.signal(signal.SIGUSR2, lambda *_: print("mine", flush=True))
heartbeat.begin()
print("ready", flush=True)
while True:
    time.sleep(0.01)
"""
    rank = start(script, LOCKSTEP_ATTEMPT_DIR=str(tmp_path))
    assert rank.says() == "ready"
    rank.send(signal.SIGUSR2)
    assert rank.says() == "mine"
    assert stack_dump.read_main_thread(stack_dump.stack_path(tmp_path, 1)) == []


def test_who_does_not_answer_is_not_asked() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        stack_dump.ask(process.pid, Path("nothing"))
        assert process.poll() is None  # of which SIGUSR2 would be the end
        process.kill()


# --- SIGTERM ---------------------------------------------------------------------------------------------------------

TRAINING = """
heartbeat.begin()
with beats.training(), watch() as request, ending_in_time():
    {work}
sys.exit(request.exit_code)
"""


def training(work: str) -> str:
    return TRAINING.format(work=work.strip().replace("\n", "\n    "))


def test_sigterm_ends_a_rank_that_hangs_in_c(start: Callable[..., Rank], tmp_path: Path) -> None:
    work = "beats.at_iteration(3)\nbeats.enter('save')\nbeats.enter('evaluate')\nhang_in_c()"
    rank = start(training(work), LOCKSTEP_ATTEMPT_DIR=str(tmp_path), LOCKSTEP_TERM_TIMEOUT_S="1.5")
    assert rank.says() == "hangs"
    rank.send(signal.SIGTERM)
    code, errors = rank.end()
    assert code == 1
    message = (
        r"was asked to stop by SIGTERM and its main thread has not moved for \d+ s, in iteration 4, phase compile; "
        r"what it learned since the last checkpoint is lost"
    )
    assert re.fullmatch(rf"lockstep: error: rank 1 {message}\n", errors)
    outcome = read_outcomes(tmp_path)[1]
    assert (outcome.exit_code, outcome.traceback) == (1, "")
    assert re.fullmatch(message, outcome.message)


def test_who_moves_gets_the_time_to_stop_by_itself(start: Callable[..., Rank], tmp_path: Path) -> None:
    work = """
print("ready", flush=True)
work_until(lambda: request.status)
end_s = time.monotonic() + 4.0
work_until(lambda: time.monotonic() > end_s)
"""
    rank = start(training(work), LOCKSTEP_ATTEMPT_DIR=str(tmp_path), LOCKSTEP_TERM_TIMEOUT_S="2.5")
    assert rank.says() == "ready"
    rank.send(signal.SIGTERM)
    assert rank.end() == (75, "")


def test_a_warning_starts_no_countdown(start: Callable[..., Rank], tmp_path: Path) -> None:
    work = "beats.enter('rollout')\nhang_in_c()"
    rank = start(training(work), LOCKSTEP_ATTEMPT_DIR=str(tmp_path), LOCKSTEP_TERM_TIMEOUT_S="0.2")
    assert rank.says() == "hangs"
    rank.send(signal.SIGUSR1)
    with pytest.raises(subprocess.TimeoutExpired):
        rank.process.wait(2.0)


def test_a_save_is_waited_for(start: Callable[..., Rank], tmp_path: Path) -> None:
    work = """
def save():
    with saves.saving():
        time.sleep(2.0)
    Path("saved").touch()
    time.sleep(60)
threading.Thread(target=save, daemon=True).start()
beats.enter("rollout")
hang_in_c()
"""
    rank = start(training(work), LOCKSTEP_ATTEMPT_DIR=str(tmp_path), LOCKSTEP_TERM_TIMEOUT_S="0.2")
    assert rank.says() == "hangs"
    rank.send(signal.SIGTERM)
    assert rank.end()[0] == 1
    assert Path("saved").exists()


def test_who_waits_for_a_rank_that_moves_goes_on_waiting(start: Callable[..., Rank], tmp_path: Path) -> None:
    waiting = "beats.enter('rollout')\nwith beats.exchange('gradients'):\n    hang_in_c()"
    environment = {"LOCKSTEP_ATTEMPT_DIR": str(tmp_path), "LOCKSTEP_TERM_TIMEOUT_S": "2.5"}
    slow = start(
        training("work_until(Path('enough').exists)\nprint('stands', flush=True)\nhang_in_c()"), 0, **environment
    )
    wait_for(lambda: 0 in read_beats(tmp_path))
    rank = start(training(waiting), **environment)
    assert rank.says() == "hangs"
    rank.send(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        rank.process.wait(4.0)
    Path("enough").touch()
    assert slow.says() == "stands"
    code, errors = rank.end()
    assert code == 1
    assert "in iteration 1, phase compile, in the exchange of gradients" in errors


def test_after_another_ranks_failure_nothing_is_waited_for(start: Callable[..., Rank], tmp_path: Path) -> None:
    work = "print('ready', flush=True)\nwork_until(lambda: False)"
    rank = start(training(work), LOCKSTEP_ATTEMPT_DIR=str(tmp_path), LOCKSTEP_TERM_TIMEOUT_S="1000")
    assert rank.says() == "ready"
    note_failure(tmp_path, 7)  # of another start of the ranks
    rank.send(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        rank.process.wait(1.0)
    note_failure(tmp_path, 0)
    assert rank.end() == (1, "")  # who failed says why
    assert read_outcomes(tmp_path)[1].message == "another rank failed"


def test_what_the_main_thread_has_reported_stays(start: Callable[..., Rank], tmp_path: Path) -> None:
    work = """
from lockstep.distributed.rank_exit import RankExit
RankExit().end(1, "lost another rank")
beats.enter("rollout")
hang_in_c()
"""
    rank = start(training(work), LOCKSTEP_ATTEMPT_DIR=str(tmp_path), LOCKSTEP_TERM_TIMEOUT_S="0.2")
    assert rank.says() == "hangs"
    rank.send(signal.SIGTERM)
    assert rank.end()[0] == 1
    assert read_outcomes(tmp_path)[1].message == "lost another rank"


@pytest.mark.parametrize(
    ("phase", "slow_step_s", "ended_after_s"),
    [
        ("rollout", 0.1, 10),
        ("rollout", 12.0, 18),  # half as long again as such a step takes
        ("rollout", 100.0, 25),  # at 30 s torchrun and SLURM kill
        ("start", 0.1, 25),  # as with a learner of the user's own
        ("save", 0.1, None),
    ],
)
def test_how_long_a_main_thread_may_stand_still(
    phase: beats.Phase, slow_step_s: float, ended_after_s: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = time.monotonic() + 1000.0  # long after any save of this process
    aborted: list[float] = []
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    beats.open_beats(tmp_path, 0, 0)
    try:
        beats.enter("rollout")
        beats.at_iteration(1)
        beats.enter("rollout")
        now_s += slow_step_s
        beats.enter("rollout")
        beats.enter(phase)
        rank = heartbeat.Heartbeat(tmp_path, 0, 0, None)
        with socket.socket() as unused:
            countdown = stopping.Countdown(unused, rank, 10.0, lambda message, is_said: aborted.append(now_s))
            asked_s = now_s = now_s + 100.0
            while not aborted and now_s < asked_s + 60.0:
                now_s += 0.5
                countdown.look(now_s, asked_s)
    finally:
        beats.close_beats()
    assert [when_s - asked_s for when_s in aborted] == ([] if ended_after_s is None else [ended_after_s])


def test_a_forked_childs_signals_are_its_own(start: Callable[..., Rank], tmp_path: Path) -> None:
    work = """
child = os.fork()
if child == 0:
    os.kill(os.getpid(), signal.SIGTERM)
    os._exit(3)
os.waitpid(child, 0)
beats.enter("rollout")
print("ready", flush=True)
hang_in_c()
"""
    rank = start(training(work), LOCKSTEP_ATTEMPT_DIR=str(tmp_path), LOCKSTEP_TERM_TIMEOUT_S="0.2")
    assert rank.says() == "ready"
    with pytest.raises(subprocess.TimeoutExpired):
        rank.process.wait(2.0)


def test_who_listens_to_signals_already_goes_on_listening(start: Callable[..., Rank], tmp_path: Path) -> None:
    script = """
import socket
reader, writer = socket.socketpair()
writer.setblocking(False)
signal.set_wakeup_fd(writer.fileno())
with watch(), overheard() as heard:
    print(heard, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    print(reader.recv(1)[0], flush=True)
assert signal.set_wakeup_fd(-1) == writer.fileno()
with watch(), overheard() as heard:
    os.kill(os.getpid(), signal.SIGUSR1)
    print(heard.recv(1)[0], flush=True)
    signal.set_wakeup_fd(writer.fileno())
print(signal.set_wakeup_fd(-1) == writer.fileno(), flush=True)
with overheard():
    pass
print(signal.set_wakeup_fd(-1), flush=True)
threads = []
def elsewhere():
    with overheard() as heard:
        threads.append(heard)
thread = threading.Thread(target=elsewhere)
thread.start()
thread.join()
print(threads)
"""
    rank = start(script)
    said = [rank.says() for _ in range(6)]
    assert rank.end() == (0, "")
    assert said == ["None", str(int(signal.SIGTERM)), str(int(signal.SIGUSR1)), "True", "-1", "[None]"]


# --- ranks that look after one another -------------------------------------------------------------------------------

RANK_OF_TWO = """
heartbeat.begin()
with beats.training():
    beats.at_iteration(8)
    beats.enter("rollout")
    beats.at_iteration(9)
    beats.enter("rollout")
    print("ready", flush=True)
    {work}
"""
WAITS = RANK_OF_TWO.format(
    work="with beats.exchange('gradients'):\n        while not Path('enough').exists():\n            time.sleep(0.02)"
)


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def folders(temporary: Path) -> list[Path]:
    return list(temporary.glob(f"{heartbeat.FOLDER_PREFIX}*"))


def test_a_stopped_rank_is_ended_by_the_other(start: Callable[..., Rank], temporary: Path) -> None:
    script = RANK_OF_TWO.format(work="work_until(lambda: False)")
    healthy = start(WAITS, 0, LOCKSTEP_HANG_TIMEOUT_S="5")
    stopped = start(script, 1, LOCKSTEP_HANG_TIMEOUT_S="5")
    assert (healthy.says(), stopped.says()) == ("ready", "ready")
    (folder,) = folders(temporary)
    assert folder.stat().st_mode & 0o777 == 0o700
    stopped.send(signal.SIGSTOP)
    assert stopped.end()[0] == -signal.SIGKILL
    assert (folder / "failed_0").exists()  # what torchrun's SIGTERM to the other will mean
    Path("enough").touch()
    code, errors = healthy.end()
    assert code == 0
    line = errors.splitlines()[0]
    assert line.startswith("lockstep: error: rank 1 (on ")
    assert f"pid {stopped.pid}) was stopped by a signal" in line
    assert line.endswith("in iteration 10, phase rollout; rank 0 ends it, and with it the job")
    assert folders(temporary) == []


def test_a_rank_that_hangs_is_ended_with_its_stack(start: Callable[..., Rank], temporary: Path) -> None:
    script = RANK_OF_TWO.format(work="hang_in_c()")
    stuck = start(script, 0, LOCKSTEP_HANG_TIMEOUT_S="5")
    healthy = start(WAITS, 1, LOCKSTEP_HANG_TIMEOUT_S="5")
    assert (healthy.says(), stuck.says()) == ("ready", "ready")
    assert stuck.end()[0] == -signal.SIGKILL
    Path("enough").touch()
    code, errors = healthy.end()
    assert code == 0
    line, *stack = errors.splitlines()
    assert f"rank 0 (on {os.uname().nodename}, pid {stuck.pid}) is stuck: its main thread has not moved for" in line
    assert line.endswith("in iteration 10, phase rollout; rank 1 ends it, and with it the job")
    assert stack[0].endswith("in hang_in_c")
    assert stack[-1].endswith("in <module>")


def test_the_first_rank_that_is_well_ends_all_that_are_not(start: Callable[..., Rank], temporary: Path) -> None:
    environment = {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", "LOCKSTEP_HANG_TIMEOUT_S": "6"}
    scripts = {
        0: RANK_OF_TWO.format(work="hang_with_the_lock()"),
        1: WAITS,
        2: RANK_OF_TWO.format(work="work_until(lambda: False)"),
    }
    ranks = [start(script, rank, **environment) for rank, script in scripts.items()]
    assert [rank.says() for rank in ranks] == ["ready"] * 3
    ranks[2].send(signal.SIGSTOP)
    assert [ranks[rank].end()[0] for rank in (0, 2)] == [-signal.SIGKILL] * 2
    Path("enough").touch()
    code, errors = ranks[1].end()
    assert code == 0
    lines = [line for line in errors.splitlines() if line.endswith("; rank 1 ends it, and with it the job")]
    assert len(lines) == 2
    (silent,) = (line for line in lines if "gave no sign of life for" in line and "stopped" not in line)
    assert silent.startswith("lockstep: error: rank 0 ")


class Pair:
    """Two ranks, which wait in the same exchange for ever and look at one another; whom one would end is noted."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        self.ended: list[tuple[int, int]] = []
        self._alive = []
        monkeypatch.setattr(time, "monotonic", lambda: self.now_s)
        monkeypatch.setattr(Siblings, "_end", lambda watch, verdict: self.ended.append((watch._rank, verdict.rank)))
        for rank in (0, 1):
            beats.open_beats(folder, rank, 0)
            beats.enter("rollout")
            beats.at_iteration(1)
            beats.enter("rollout")
            beats.exchanges_on_device("gradients")
            assert beats._writer is not None
            self._alive.append(beats._writer.alive)
        beats.close_beats()
        self.watches = [Siblings(folder, rank, 0, 2, Limits(20.0), print) for rank in (0, 1)]

    def after(self, seconds: float) -> None:
        self.now_s += seconds
        for alive in self._alive:
            alive()
        for watch in self.watches:
            watch.look()


def test_time_in_which_nobody_looked_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(tmp_path, monkeypatch)
    pair.after(1.0)
    pair.after(3600.0)  # all were stopped, or the host had no time for them
    for _ in range(19):
        pair.after(1.0)
    assert pair.ended == []
    for _ in range(3):
        pair.after(1.0)
    assert pair.ended == [(1, 0)]


def test_two_jobs_and_two_starts_have_folders_of_their_own(start: Callable[..., Rank], temporary: Path) -> None:
    others = [{"MASTER_PORT": "29501"}, {"TORCHELASTIC_RESTART_COUNT": "1"}, {"GROUP_RANK": "1"}, {}]
    ranks = [start(WAITS, 0, **other) for other in others] + [start(WAITS, 1)]
    assert [rank.says() for rank in ranks] == ["ready"] * 5
    found = sorted(sorted(read_beats(folder)) for folder in folders(temporary))
    Path("enough").touch()
    assert [rank.end()[0] for rank in ranks] == [0] * 5
    assert found == [[0], [0], [0], [0, 1]]
    assert folders(temporary) == []


@pytest.mark.parametrize("trap", ["link", "open to others", "a file"])
def test_a_folder_that_others_may_write_to_is_refused(trap: str, temporary: Path) -> None:
    environment = {"RANK": "0", "WORLD_SIZE": "2"}
    folder = heartbeat._folder_of_job(environment)
    assert folder is not None
    folder.rmdir()
    if trap == "link":
        (temporary / "elsewhere").mkdir(mode=0o700)
        folder.symlink_to(temporary / "elsewhere")
    elif trap == "open to others":
        folder.mkdir()
        folder.chmod(0o770)
    else:
        folder.touch()
    assert heartbeat._folder_of_job(environment) is None


def test_only_old_folders_without_a_process_are_removed(start: Callable[..., Rank], temporary: Path) -> None:
    living = start(WAITS, 0)
    assert living.says() == "ready"
    (used,) = folders(temporary)
    old, young, other = (temporary / name for name in (f"{used.name}1", f"{used.name}2", "lockstep-runs"))
    for folder in (old, young, other):
        folder.mkdir()
    for folder in (used, old, other):
        os.utime(folder, (0, time.time() - 25 * 3600))
    heartbeat._remove_leftovers(temporary)
    assert sorted(temporary.glob("lockstep-*")) == sorted([used, young, other])
    Path("enough").touch()
    assert living.end() == (0, "")
