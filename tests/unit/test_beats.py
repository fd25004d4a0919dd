"""What a rank's file says of it, in every phase of a training, and that whoever reads it gets something whole."""

import math
import multiprocessing
import os
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.core import beats
from lockstep.core.beats import Beat
from lockstep.core.blame import Limits, judge
from lockstep.learn.torch.evaluation import evaluate
from lockstep.session.make_env import build_env
from tests.unit.learner_fixtures import make_training, small_config


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    beats.close_beats()


def read(folder: Path, rank: int = 0) -> Beat:
    beat = beats.read_beat(folder / f"beat_{rank}")
    assert beat is not None
    return beat


def place(beat: Beat) -> tuple[str, str]:
    return beat.phase, beat.exchange


def test_a_file_says_who_and_where(tmp_path: Path) -> None:
    began_s = time.monotonic()
    assert beats.open_beats(tmp_path, 3, 1)
    first = read(tmp_path, 3)
    assert (first.rank, first.restart, first.pid) == (3, 1, os.getpid())
    assert (first.phase, first.exchange, first.iteration, first.num_exchanges) == ("start", "", 0, 0)
    assert began_s <= first.moved_s <= first.alive_s <= time.monotonic()

    beats.alive()
    alive = read(tmp_path, 3)
    assert alive.alive_s > first.alive_s
    assert alive.moved_s == first.moved_s

    beats.at_iteration(7)
    beats.enter("save")
    moved = read(tmp_path, 3)
    assert (moved.phase, moved.iteration) == ("save", 7)
    assert moved.alive_s == moved.moved_s > alive.alive_s  # one that moves is alive
    assert beats.own_beat() == moved
    assert beats.read_beats(tmp_path) == {3: moved}


def test_without_a_file_nothing_happens(tmp_path: Path) -> None:
    beats.enter("rollout")
    beats.at_iteration(1)
    beats.alive()
    beats.exchanges_on_device("gradients")
    with beats.exchange("gradients"), beats.within("save"):
        pass
    assert beats.own_beat() is None
    assert beats.longest_pause_s() == 0.0
    assert not beats.open_beats(tmp_path / "gone", 0, 0)
    assert beats.read_beats(tmp_path) == {}


def test_exchanges_are_counted_and_inner_ones_give_way(tmp_path: Path) -> None:
    beats.open_beats(tmp_path, 0, 0)
    with beats.exchange("meeting"):
        assert place(read(tmp_path)) == ("start", "meeting")
        with beats.exchange("gradients"):
            assert place(read(tmp_path)) == ("start", "gradients")
        beats.enter("save")
        assert place(read(tmp_path)) == ("save", "meeting")
    with pytest.raises(ZeroDivisionError), beats.exchange("ü" * 100):
        assert read(tmp_path).exchange == "ü" * 28  # as much of it as there is room for
        raise ZeroDivisionError
    assert place(read(tmp_path)) == ("save", "")
    assert read(tmp_path).num_exchanges == 3


def test_an_exchange_on_a_device_lasts_until_the_host_moves(tmp_path: Path) -> None:
    beats.open_beats(tmp_path, 0, 0)
    beats.exchanges_on_device("metrics")
    assert place(read(tmp_path)) == ("start", "metrics")
    with beats.exchange("device"):
        pass
    assert read(tmp_path).exchange == ""
    beats.exchanges_on_device("metrics")
    beats.at_iteration(1)
    assert read(tmp_path).exchange == ""
    assert read(tmp_path).num_exchanges == 3


def test_a_device_is_behind_others_until_it_was_waited_for(tmp_path: Path) -> None:
    beats.open_beats(tmp_path, 0, 0)
    assert not read(tmp_path).is_behind_others
    beats.exchanges_on_device("gradients")
    beats.enter("update")
    with beats.exchange("text"):
        pass
    beats.at_iteration(1)
    beats.enter("rollout")
    assert read(tmp_path).is_behind_others
    with beats.exchange("device"):
        assert read(tmp_path).is_behind_others
    assert not read(tmp_path).is_behind_others


def test_what_is_done_for_the_first_time_may_compile(tmp_path: Path) -> None:
    beats.open_beats(tmp_path, 0, 0)

    def phases(*entered: beats.Phase) -> list[str]:
        found: list[str] = []
        for phase in entered:
            beats.enter(phase)
            found.append(read(tmp_path).phase)
        return found

    beats.at_iteration(40)  # a run that goes on
    assert phases("rollout", "rollout", "update") == ["compile", "compile", "compile"]
    beats.at_iteration(41)
    assert phases("save", "rollout", "update", "evaluate", "evaluate") == [
        "save", "rollout", "update", "compile", "compile",
    ]  # fmt: skip
    beats.at_iteration(41)
    assert phases("rollout", "update", "evaluate", "end") == ["rollout", "update", "evaluate", "end"]
    assert phases("step", "step") == ["compile", "compile"]
    beats.at_iteration(42)
    assert phases("step", "evaluate", "step") == ["step", "evaluate", "step"]


def test_a_phase_within_another(tmp_path: Path) -> None:
    beats.open_beats(tmp_path, 0, 0)
    beats.enter("rollout")
    with pytest.raises(ZeroDivisionError), beats.within("save"):
        assert read(tmp_path).phase == "save"
        raise ZeroDivisionError
    assert read(tmp_path).phase == "compile"


def test_outside_a_training_nothing_is_a_phase(tmp_path: Path) -> None:
    beats.open_beats(tmp_path, 0, 0, in_training=False)
    beats.enter("rollout")
    with beats.within("save"), beats.exchange("mine"):
        assert place(read(tmp_path)) == ("start", "mine")
    for _ in range(2):  # kernels of another training may have to be built anew
        with beats.training():
            assert read(tmp_path).phase == "start"
            beats.enter("rollout")
            assert read(tmp_path).phase == "compile"
            beats.at_iteration(1)
            beats.enter("rollout")
            assert read(tmp_path).phase == "rollout"
        assert read(tmp_path).phase == "end"
        beats.enter("evaluate")  # as if the policy were played
        assert place(read(tmp_path)) == ("end", "")


def test_after_a_failure_the_phase_stays_until_the_caller_moves(tmp_path: Path) -> None:
    beats.open_beats(tmp_path, 0, 0, in_training=False)
    with pytest.raises(ZeroDivisionError), beats.training():
        beats.at_iteration(4)
        beats.enter("save")
        with beats.exchange("gradients"):
            raise ZeroDivisionError
    failed = read(tmp_path)
    assert (failed.phase, failed.iteration, failed.moved_s) == ("save", 4, math.inf)
    assert failed.alive_s <= time.monotonic()
    beats.alive()  # its other thread goes on
    alive = read(tmp_path)
    assert judge({0: alive}, alive.alive_s + 5.0, Limits()) is None
    verdict = judge({0: alive}, alive.alive_s + 1e6, Limits(), state_of=lambda pid: "stopped")
    assert verdict is not None and verdict.kind == "stopped"
    with beats.exchange("mine"):
        assert place(read(tmp_path)) == ("end", "mine")
    assert read(tmp_path).moved_s <= time.monotonic()


def test_only_pauses_of_what_was_done_before_are_the_longest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])

    def after(seconds: float, phase: beats.Phase) -> None:
        clock[0] += seconds
        beats.enter(phase)

    beats.open_beats(tmp_path, 0, 0)
    after(1000.0, "rollout")
    after(500.0, "update")  # kernels were built
    beats.at_iteration(1)
    after(400.0, "rollout")  # a checkpoint or an evaluation, of which nothing is known yet
    after(3.0, "rollout")
    after(2.0, "save")
    after(300.0, "rollout")
    assert beats.longest_pause_s() == 3.0
    with beats.exchange("gradients"):
        clock[0] += 5.0
    assert beats.longest_pause_s() == 5.0


def test_half_a_file_or_a_foreign_one_is_none(tmp_path: Path) -> None:
    beats.open_beats(tmp_path, 0, 0)
    path = tmp_path / "beat_0"
    whole = path.read_bytes()
    for content in (b"", whole[:20], whole[:-1], b"x" * len(whole), whole.replace(b"start", b"sleep")):
        (tmp_path / "beat_1").write_bytes(content)
        assert beats.read_beat(tmp_path / "beat_1") is None
    assert beats.read_beats(tmp_path).keys() == {0}


def test_a_new_file_takes_the_place_of_an_old_one(tmp_path: Path) -> None:
    beats.open_beats(tmp_path, 0, 0)
    beats.enter("save")
    kept = beats._writer
    beats.open_beats(tmp_path, 0, 1)
    assert kept is not None
    kept.enter("evaluate")  # a process of the attempt before that does not end
    assert (read(tmp_path).restart, read(tmp_path).phase) == (1, "start")


class StoppedError(Exception):
    pass


class StopsHalfway:
    """Writes the first fields and half of the phase, as a process that is stopped right then."""

    def __init__(self, real: struct.Struct) -> None:
        self._real = real

    def pack_into(self, memory: Any, at: int, *fields: object) -> None:
        memory[at : at + 27] = self._real.pack(*fields)[:27]
        raise StoppedError


@pytest.mark.parametrize("num_notes_before", [0, 1])
def test_a_note_that_is_never_finished_is_not_seen(
    num_notes_before: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beats.open_beats(tmp_path, 0, 0)
    for _ in range(num_notes_before):
        beats.enter("start")
    whole = read(tmp_path)
    with monkeypatch.context() as patched, pytest.raises(StoppedError):
        patched.setattr(beats, "_NOTE", StopsHalfway(beats._NOTE))
        beats.at_iteration(1000)
    assert read(tmp_path) == whole


BUSY = """
import sys
from pathlib import Path
from lockstep.core import beats
beats.open_beats(Path(sys.argv[1]), 0, 0)
print("ready", flush=True)
for iteration in range(10**9):
    beats.at_iteration(iteration)
    beats.enter("save")
    with beats.exchange("gradients of iteration %d" % iteration):
        pass
    beats.enter("start")
    with beats.exchange("x"):
        pass
"""


def test_what_is_read_while_it_is_written_is_whole(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", BUSY, str(tmp_path)], stdout=subprocess.PIPE, text=True) as busy:
        try:
            assert busy.stdout is not None
            assert busy.stdout.readline() == "ready\n"
            before = read(tmp_path)
            for _ in range(3000):
                beat = read(tmp_path)
                assert beat.exchange in ("", "x", f"gradients of iteration {beat.iteration}")
                assert beat.exchange != "x" or beat.phase == "start"
                assert beat.moved_s >= before.moved_s
                assert beat.num_exchanges >= before.num_exchanges
                before = beat
        finally:
            busy.kill()


def enter_in_child() -> None:
    beats.enter("save")


def test_a_forked_child_does_not_beat_for_its_parent(tmp_path: Path) -> None:
    beats.open_beats(tmp_path, 0, 0)
    child = multiprocessing.get_context("fork").Process(target=enter_in_child)
    child.start()
    child.join(30)
    assert child.exitcode == 0
    assert read(tmp_path).phase == "start"


def test_the_phases_of_a_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = make_training(small_config(agent={"chunk_size": 4}))
    seen: list[tuple[str, int, bool]] = []
    before = [0.0]

    def spy(owner: Any, name: str) -> None:
        method = getattr(owner, name)

        def spied(*arguments: Any, **keywords: Any) -> Any:
            beat = read(tmp_path)
            seen.append((f"{name} in {beat.phase}", beat.iteration, beat.moved_s > before[0]))
            before[0] = beat.moved_s
            return method(*arguments, **keywords)

        monkeypatch.setattr(owner, name, spied)

    beats.open_beats(tmp_path, 0, 0)
    spy(training.env, "step")
    spy(training.learner.gradients, "ride_")
    training.iteration = 5
    training.iterate()
    num_steps = training.config.agent.num_steps_per_env
    num_chunks = len(seen) - num_steps
    assert num_chunks > training.learner.config.num_mini_batches  # several chunks in each
    assert seen == [("step in compile", 5, True)] * num_steps + [("ride_ in compile", 5, True)] * num_chunks
    assert read(tmp_path).iteration == 6
    seen.clear()
    training.iterate()
    assert seen == [("step in rollout", 6, True)] * num_steps + [("ride_ in update", 6, True)] * num_chunks

    evaluation_env = build_env(training.config)
    spy(evaluation_env, "step")
    for phase in ("compile", "evaluate"):
        seen.clear()
        evaluate(training.policy, evaluation_env)
        assert set(seen) == {(f"step in {phase}", training.iteration, True)}
        assert len(seen) > 1
        training.iterate()


def test_waiting_for_a_device_is_an_exchange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = make_training(small_config())
    beats.open_beats(tmp_path, 0, 0)
    seen = []
    monkeypatch.setattr(training.env, "device", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: seen.append(read(tmp_path).exchange))
    training._wait_for_device()
    assert seen == ["device"]
    assert read(tmp_path).exchange == ""
