"""Checkpoints beside the training: what the thread does, when one is due, and what a refusing disk comes to."""

import json
import math
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lockstep.core import saves
from lockstep.core.errors import RunError
from lockstep.core.interrupts import StopRequest
from lockstep.core.progress import Progress
from lockstep.core.run_directory import RunDirectory
from lockstep.core.saves import BackgroundSaver, NullSaver, Write
from lockstep.learn.torch.checkpoint import snapshot
from lockstep.session.observer import RETRY_S, RunObserver
from tests.unit.learner_fixtures import small_config

WAIT_S = 30.0


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


# --- the thread ----------------------------------------------------------------------------------------------------


class SlowDisk:
    """Writes what it is given once it is allowed to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.allowed = threading.Event()
        self.written: list[int] = []

    def save(self, iteration: int, write: Write) -> None:
        assert self.allowed.wait(WAIT_S)
        write(self.path / str(iteration))
        self.written.append(iteration)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SlowDisk]:
    slow = SlowDisk(tmp_path)
    yield slow
    slow.allowed.set()


def content_of(number: float) -> Callable[[], Write]:
    return lambda: lambda path: path.write_text(str(number))


def test_the_training_goes_on_while_a_checkpoint_is_written(disk: SlowDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saves, "LINGER_S", 0.0)
    saver = BackgroundSaver(disk.save)
    saver.start(1, content_of(1))
    assert disk.written == []
    assert saver.take_results() == []
    assert saves.in_progress()
    disk.allowed.set()
    saver.wait()
    assert not saves.in_progress()
    assert [(saved.iteration, saved.error) for saved in saver.take_results()] == [(1, None)]
    assert saver.take_results() == []


def test_a_save_waits_for_the_one_before_and_copies_nothing_until_then(disk: SlowDisk) -> None:
    saver = BackgroundSaver(disk.save)
    saver.start(1, content_of(1))
    written_at_copy: list[list[int]] = []

    def copy() -> Write:
        written_at_copy.append(list(disk.written))
        return content_of(2)()

    second = threading.Thread(target=saver.start, args=(2, copy))
    second.start()
    second.join(0.1)
    assert written_at_copy == []
    disk.allowed.set()
    second.join(WAIT_S)
    saver.wait()
    assert written_at_copy == [[1]]
    assert disk.written == [1, 2]


def test_an_error_in_the_thread_is_handed_over_and_is_no_checkpoint(tmp_path: Path) -> None:
    told: list[int] = []
    error = RunError("no space left")

    def refuse(iteration: int, write: Write) -> None:
        if iteration == 1:
            raise error
        write(tmp_path / "model")

    saver = BackgroundSaver(refuse, lambda: told.append(1))
    for iteration in (1, 2):
        saver.start(iteration, content_of(iteration))
    saver.wait()
    assert [(saved.iteration, saved.error) for saved in saver.take_results()] == [(1, error), (2, None)]
    assert told == [1]


def test_a_rank_that_writes_nothing_copies_nothing() -> None:
    saver = NullSaver()
    saver.start(1, lambda: pytest.fail("took a copy"))
    saver.wait()
    assert saver.take_results() == []


def test_somebody_who_saves_says_so_a_little_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(saves, "time", SimpleNamespace(monotonic=clock))
    monkeypatch.setattr(saves, "_ended_s", -math.inf)
    assert not saves.in_progress()
    with saves.saving(), saves.saving():
        assert saves.in_progress()
        clock.now_s += 100.0
    assert saves.in_progress()
    clock.now_s += 0.99 * saves.LINGER_S
    assert saves.in_progress()
    clock.now_s += 0.02 * saves.LINGER_S
    assert not saves.in_progress()


def test_a_snapshot_does_not_change_with_the_training(tmp_path: Path) -> None:
    weights = torch.arange(6.0).reshape(2, 3)
    view = weights[:, 1]
    state: dict[str, Any] = {"weights": weights, "nested": [{"view": view}, (1, weights.T)], "lists": [1, 2]}
    write = snapshot(state)
    weights.zero_()
    state["lists"].append(3)
    state["new"] = 1
    write(tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=True)
    expected = torch.tensor([[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]])
    assert set(loaded) == {"weights", "nested", "lists"}
    assert torch.equal(loaded["weights"], expected)
    assert torch.equal(loaded["nested"][0]["view"], torch.tensor([1.0, 4.0]))
    assert torch.equal(loaded["nested"][1][1], expected.T)
    assert loaded["lists"] == [1, 2]


# --- a training's observer -----------------------------------------------------------------------------------------


class Followed:
    """An observer of a training in a run directory, and what it said."""

    def __init__(self, folder: Path, **checkpoints: Any) -> None:
        self.clock = Clock()
        self.said: list[str] = []
        config = small_config(max_iterations=1000, logger="none", checkpoints=checkpoints)
        self.run = RunDirectory.create(folder, "t", "", "x: 1\n", {}, 1000)
        progress = Progress("t", self.run.path, on_screen=False)
        progress.message = self.hear  # type: ignore[method-assign, assignment]
        so_far = {"iteration": 0, "env_steps": 0, "wall_s": 0.0}
        self.observer = RunObserver(config, self.run, progress, StopRequest(), so_far, clock=self.clock)
        self.iteration = 0

    def hear(self, line: str) -> None:
        """Note what is said, but for the line of an iteration."""
        if line.startswith("lockstep:"):
            self.said.append(line)

    def iterate(self) -> None:
        """Record the next iteration."""
        self.iteration += 1
        self.observer.record({"iteration": self.iteration, "env_steps": 10 * self.iteration, "wall_s": 1.0})

    def save(self) -> None:
        """Save, and wait until the thread is done."""
        self.observer.save(self.iteration, {"weights": torch.full((3,), float(self.iteration))})
        self.observer._saver.wait()

    def is_due(self) -> bool:
        """Whether the clock asks for a checkpoint now."""
        return self.observer.save_due

    def told(self) -> dict[str, Any]:
        """What ``progress.json`` says."""
        content: dict[str, Any] = json.loads((self.run.path / "progress.json").read_text())
        return content

    def recorded(self) -> list[int]:
        """The iterations of ``metrics.jsonl``."""
        return [json.loads(line)["iteration"] for line in (self.run.path / "metrics.jsonl").read_text().splitlines()]

    def block(self, name: str) -> Callable[[], object]:
        """Put something in the way of a file or folder, as no right of root's overcomes; return what takes it away."""
        path, aside = self.run.path / name, self.run.path / f"aside_{name}"
        is_folder = path.is_dir()
        path.rename(aside)
        path.touch() if is_folder else path.mkdir()

        def unblock() -> None:
            path.unlink() if is_folder else path.rmdir()
            aside.rename(path)

        return unblock


@pytest.fixture
def followed(tmp_path: Path) -> Iterator[Followed]:
    one = Followed(tmp_path, interval_s=100.0)
    with one.observer:
        yield one


def test_progress_names_a_checkpoint_as_soon_as_it_is_on_the_disk(followed: Followed) -> None:
    followed.iterate()
    assert followed.told()["checkpoint"] is None
    followed.save()
    assert followed.told()["checkpoint"] == "checkpoints/model_1.pt"  # though no iteration came after
    assert torch.load(followed.run.path / "checkpoints" / "latest", weights_only=True)["weights"][0] == 1.0
    assert followed.observer.settle().endswith("model_1.pt")


def test_a_checkpoint_is_due_when_the_last_is_so_many_seconds_old(followed: Followed) -> None:
    followed.clock.now_s = 99.0
    assert not followed.is_due()
    followed.clock.now_s = 100.0
    assert followed.is_due()
    followed.save()
    assert not followed.is_due()
    followed.clock.now_s = 199.0
    assert not followed.is_due()
    followed.clock.now_s = 200.0
    assert followed.is_due()


def test_without_such_an_interval_none_is_due(tmp_path: Path) -> None:
    one = Followed(tmp_path, interval_s=0.0)
    one.clock.now_s = 1e6
    assert not one.is_due()


def test_a_refused_checkpoint_leaves_the_one_before_is_told_once_and_tried_again(followed: Followed) -> None:
    followed.iterate()
    followed.save()
    unblock = followed.block("checkpoints")
    for _ in range(3):
        followed.iterate()
        followed.save()
    followed.iterate()
    (warning,) = followed.said
    assert warning.startswith("lockstep: warning: can't write")
    assert "model_2.pt: not a directory; one of its parent folders is a file; move the file; the training" in warning
    assert followed.told()["checkpoint"] == "checkpoints/model_1.pt"
    # None is due before a minute has passed, though no interval is so short.
    assert not followed.is_due()
    followed.clock.now_s += RETRY_S
    assert followed.is_due()
    unblock()
    followed.save()
    followed.iterate()
    assert followed.said[1:] == ["lockstep: checkpoints can be written again"]
    assert not followed.is_due()
    assert followed.observer.settle().endswith("model_5.pt")


def test_a_training_whose_last_checkpoint_is_not_saved_has_failed(followed: Followed) -> None:
    followed.iterate()
    followed.save()
    unblock = followed.block("checkpoints")
    followed.iterate()
    followed.save()
    unblock()
    with pytest.raises(RunError) as caught:
        followed.observer.settle()
    line = str(caught.value)
    assert line.startswith("the checkpoint of iteration 2 is not saved, the newest on the disk is model_1.pt: can't ")
    assert line.endswith(f"then continue with lockstep train --resume {followed.run.path}")
    assert "\n" not in line


def test_folders_that_vanish_are_told_and_made_again_where_only_they_are_gone(followed: Followed) -> None:
    followed.iterate()
    shutil.rmtree(followed.run.path / "checkpoints")
    followed.save()
    assert followed.told()["checkpoint"] == "checkpoints/model_1.pt"
    shutil.rmtree(followed.run.path)
    followed.iterate()
    followed.save()
    followed.iterate()
    assert len(followed.said) == 3  # metrics, progress.json, checkpoints
    assert all("its folder is gone; do not move or remove it while it is in use" in line for line in followed.said)
    with pytest.raises(RunError, match=r"iteration 2 is not saved, there is none on the disk: can't write"):
        followed.observer.settle()


def test_metrics_and_progress_that_were_refused_are_written_later(followed: Followed) -> None:
    followed.iterate()
    aside = followed.block("metrics.jsonl"), followed.block("progress.json")
    (followed.run.path / "aside_metrics.jsonl").unlink()  # or it would still be open, and take more
    for _ in range(3):
        followed.iterate()
    assert len(followed.said) == 2
    (followed.run.path / "aside_metrics.jsonl").write_text('{"iteration": 1}\n')
    for unblock in aside:
        unblock()
    followed.clock.now_s += 60.0
    followed.iterate()
    assert followed.recorded() == [1, 2, 3, 4, 5]
    assert followed.told()["iteration"] == 5
    assert sorted(followed.said[2:]) == [
        "lockstep: metrics can be written again",
        "lockstep: progress.json can be written again",
    ]


def test_metrics_that_are_never_written_are_told_at_the_end(followed: Followed) -> None:
    followed.iterate()
    followed.block("metrics.jsonl")
    (followed.run.path / "aside_metrics.jsonl").unlink()
    for _ in range(3):
        followed.iterate()
    followed.observer.finish("finished", {})
    assert "lockstep: warning: the metrics of 3 iterations are lost" in followed.said
    assert followed.told()["status"] == "finished"


@pytest.mark.parametrize("name", ["checkpoints", "progress.json"])
def test_with_stop_a_refusal_ends_the_training_at_its_next_step(tmp_path: Path, name: str) -> None:
    one = Followed(tmp_path, on_error="stop")
    with pytest.raises(RunError, match=f"can't write .*{name}"), one.observer:
        one.iterate()
        unblock = one.block(name)
        try:
            one.save()
            one.iterate()
        finally:
            unblock()
    assert one.told()["status"] == "failed"
    assert one.said == []


def test_what_is_no_refusal_of_the_disk_ends_the_training_whatever_the_config_says(followed: Followed) -> None:
    followed.iterate()
    followed.observer.save(1, {"function": lambda: None})  # can't be pickled
    followed.observer._saver.wait()
    with pytest.raises(Exception, match="pickle"):
        followed.iterate()


def test_a_training_that_fails_waits_for_the_checkpoint_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Followed(tmp_path)
    begun, allowed = threading.Event(), threading.Event()
    write = one.run.save_checkpoint

    def slowly(*arguments: Any) -> Path:
        begun.set()
        assert allowed.wait(WAIT_S)
        return write(*arguments)

    monkeypatch.setattr(one.run, "save_checkpoint", slowly)

    def fail() -> None:
        with pytest.raises(ValueError, match="something else"), one.observer:
            one.iterate()
            one.observer.save(1, {"weights": torch.ones(3)})
            assert begun.wait(WAIT_S)
            raise ValueError("something else")

    failing = threading.Thread(target=fail)
    failing.start()
    failing.join(0.1)
    assert one.told()["status"] == "running"
    allowed.set()
    failing.join(WAIT_S)
    told = one.told()
    assert (told["status"], told["checkpoint"]) == ("failed", "checkpoints/model_1.pt")
