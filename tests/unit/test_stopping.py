"""The end of real processes that get SIGTERM: whoever can't stop by itself is ended in time, and nobody else."""

import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.core import beats
from lockstep.core.beats import read_beats
from lockstep.core.errors import UsageError
from lockstep.core.outcome import note_failure, read_outcomes
from lockstep.distributed import heartbeat, stopping
from tests.multiproc.commands import wait_for
from tests.unit.heartbeat_fixtures import Rank

TRAINING = """
heartbeat.begin()
with beats.training(), watch() as request, ending_in_time():
    {work}
sys.exit(request.exit_code)
"""


def training(work: str) -> str:
    return TRAINING.format(work=work.strip().replace("\n", "\n    "))


def test_sigterm_ends_a_rank_that_hangs_in_c(start_rank: Callable[..., Rank], tmp_path: Path) -> None:
    work = "beats.at_iteration(3)\nbeats.enter('save')\nbeats.enter('evaluate')\nhang_in_c()"
    rank = start_rank(training(work), LOCKSTEP_ATTEMPT_DIR=str(tmp_path), LOCKSTEP_TERM_TIMEOUT_S="1.5")
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


def test_who_moves_gets_the_time_to_stop_by_itself(start_rank: Callable[..., Rank], tmp_path: Path) -> None:
    work = """
print("ready", flush=True)
work_until(lambda: request.status)
end_s = time.monotonic() + 4.0
work_until(lambda: time.monotonic() > end_s)
"""
    rank = start_rank(training(work), LOCKSTEP_ATTEMPT_DIR=str(tmp_path), LOCKSTEP_TERM_TIMEOUT_S="2.5")
    assert rank.says() == "ready"
    rank.send(signal.SIGTERM)
    assert rank.end() == (75, "")


def test_a_warning_starts_no_countdown(start_rank: Callable[..., Rank], tmp_path: Path) -> None:
    work = "beats.enter('rollout')\nhang_in_c()"
    rank = start_rank(training(work), LOCKSTEP_ATTEMPT_DIR=str(tmp_path), LOCKSTEP_TERM_TIMEOUT_S="0.2")
    assert rank.says() == "hangs"
    rank.send(signal.SIGUSR1)
    with pytest.raises(subprocess.TimeoutExpired):
        rank.process.wait(2.0)


def test_a_save_is_waited_for(start_rank: Callable[..., Rank], tmp_path: Path) -> None:
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
    rank = start_rank(training(work), LOCKSTEP_ATTEMPT_DIR=str(tmp_path), LOCKSTEP_TERM_TIMEOUT_S="0.2")
    assert rank.says() == "hangs"
    rank.send(signal.SIGTERM)
    assert rank.end()[0] == 1
    assert Path("saved").exists()


def test_who_waits_for_a_rank_that_moves_goes_on_waiting(start_rank: Callable[..., Rank], tmp_path: Path) -> None:
    waiting = "beats.enter('rollout')\nwith beats.exchange('gradients'):\n    hang_in_c()"
    environment = {"LOCKSTEP_ATTEMPT_DIR": str(tmp_path), "LOCKSTEP_TERM_TIMEOUT_S": "2.5"}
    slow = start_rank(
        training("work_until(Path('enough').exists)\nprint('stands', flush=True)\nhang_in_c()"), 0, **environment
    )
    wait_for(lambda: 0 in read_beats(tmp_path))
    rank = start_rank(training(waiting), **environment)
    assert rank.says() == "hangs"
    rank.send(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        rank.process.wait(4.0)
    Path("enough").touch()
    assert slow.says() == "stands"
    code, errors = rank.end()
    assert code == 1
    assert "in iteration 1, phase compile, in the exchange of gradients" in errors


def test_after_another_ranks_failure_nothing_is_waited_for(start_rank: Callable[..., Rank], tmp_path: Path) -> None:
    work = "print('ready', flush=True)\nwork_until(lambda: False)"
    rank = start_rank(training(work), LOCKSTEP_ATTEMPT_DIR=str(tmp_path), LOCKSTEP_TERM_TIMEOUT_S="1000")
    assert rank.says() == "ready"
    note_failure(tmp_path, 7)  # of another start of the ranks
    rank.send(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        rank.process.wait(1.0)
    note_failure(tmp_path, 0)
    assert rank.end() == (1, "")  # who failed says why
    assert read_outcomes(tmp_path)[1].message == "another rank failed"


def test_what_the_main_thread_has_reported_stays(start_rank: Callable[..., Rank], tmp_path: Path) -> None:
    work = """
from lockstep.distributed.rank_exit import RankExit
RankExit().end(1, "lost another rank")
beats.enter("rollout")
hang_in_c()
"""
    rank = start_rank(training(work), LOCKSTEP_ATTEMPT_DIR=str(tmp_path), LOCKSTEP_TERM_TIMEOUT_S="0.2")
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


def test_who_waits_and_sees_no_beat_is_judged_by_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = time.monotonic() + 1000.0
    aborted: list[str] = []
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    beats.open_beats(tmp_path, 0, 0)
    try:
        with beats.exchange("gradients"), socket.socket() as unused:
            (tmp_path / "beat_0").unlink()  # as a sibling does that ends this rank
            rank = heartbeat.Heartbeat(tmp_path, 0, 0, None)
            countdown = stopping.Countdown(unused, rank, 10.0, lambda message, is_said: aborted.append(message))
            countdown.look(now_s + 60.0, now_s)
    finally:
        beats.close_beats()
    assert len(aborted) == 1


def test_a_patience_that_makes_no_sense() -> None:
    with (
        pytest.raises(UsageError, match="LOCKSTEP_TERM_TIMEOUT_S is '0'; give a number of seconds above 0"),
        stopping.ending_in_time({"LOCKSTEP_TERM_TIMEOUT_S": "0"}),
    ):
        pass


def test_a_forked_childs_signals_are_its_own(start_rank: Callable[..., Rank], tmp_path: Path) -> None:
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
    rank = start_rank(training(work), LOCKSTEP_ATTEMPT_DIR=str(tmp_path), LOCKSTEP_TERM_TIMEOUT_S="0.2")
    assert rank.says() == "ready"
    with pytest.raises(subprocess.TimeoutExpired):
        rank.process.wait(2.0)


def test_who_listens_to_signals_already_goes_on_listening(start_rank: Callable[..., Rank], tmp_path: Path) -> None:
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
    rank = start_rank(script)
    said = [rank.says() for _ in range(6)]
    assert rank.end() == (0, "")
    assert said == ["None", str(int(signal.SIGTERM)), str(int(signal.SIGUSR1)), "True", "-1", "[None]"]
