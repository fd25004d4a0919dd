"""What is recorded, read back by the programs that read it."""

import json
import os
import resource
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

from lockstep.core import metrics
from lockstep.core.errors import RunError, UsageError
from lockstep.core.metrics import MetricsWriter, open_metrics, require_logger


def lines(folder: Path) -> list[Any]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def scalars(folder: Path, tag: str) -> dict[int, float]:
    """Return what TensorBoard shows of one curve, by iteration."""
    accumulator = EventAccumulator(str(folder)).Reload()
    assert tag in accumulator.Tags()["tensors"] + accumulator.Tags()["scalars"]
    return {event.step: event.value for event in accumulator.Scalars(tag)}


def test_every_iteration_is_a_line_at_once(tmp_path: Path) -> None:
    writer = open_metrics(tmp_path, "none")
    writer.record({"iteration": 1, "mean_return": 1.5, "kl": None})
    assert lines(tmp_path) == [{"iteration": 1, "mean_return": 1.5, "kl": None}]
    writer.record({"iteration": 2, "mean_return": 2.5})
    assert lines(tmp_path)[1] == {"iteration": 2, "mean_return": 2.5}
    writer.close()
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_what_json_has_no_word_for_becomes_null(tmp_path: Path) -> None:
    writer = open_metrics(tmp_path, "none")
    numbers: Any = {"iteration": np.int64(3), "a": float("nan"), "b": float("-inf"), "c": np.float32(0.5), "d": True}
    writer.record(numbers)
    assert lines(tmp_path) == [{"iteration": 3, "a": None, "b": None, "c": 0.5, "d": 1}]


def test_a_line_is_one_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = []
    system_write = os.write

    def write(descriptor: int, data: bytes) -> int:
        written.append(bytes(data))
        return system_write(descriptor, data)

    monkeypatch.setattr(os, "write", write)
    open_metrics(tmp_path, "none").record({"iteration": 1, "mean_return": 2.0})
    assert written == [b'{"iteration": 1, "mean_return": 2.0}\n']


def test_truncation_keeps_whole_lines_up_to_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"iteration": 1, "x": 0.1}\n{"iteration": 2}\n{"iteration": 3}\n{"iteration": 4, "mean_re')
    metrics.truncate(path, 2)
    assert path.read_text() == '{"iteration": 1, "x": 0.1}\n{"iteration": 2}\n'
    path.write_text('{"iteration": 1}\n{"itera')
    metrics.truncate(path, 2)
    assert path.read_text() == '{"iteration": 1}\n'


def test_truncation_of_nothing_makes_no_file(tmp_path: Path) -> None:
    metrics.truncate(tmp_path / "metrics.jsonl", 5)
    assert list(tmp_path.iterdir()) == []


def test_tensorboard_shows_the_curves(tmp_path: Path) -> None:
    writer = open_metrics(tmp_path, "tensorboard")
    writer.record({"iteration": 1, "mean_return": None, "loss/value": 0.25})
    writer.record({"iteration": 2, "mean_return": 7.0, "loss/value": 0.125})
    assert scalars(tmp_path, "loss/value") == {1: 0.25, 2: 0.125}  # before close: visible while training
    assert scalars(tmp_path, "mean_return") == {2: 7.0}
    writer.close()


def test_tensorboard_forgets_what_a_resumed_run_does_again(tmp_path: Path) -> None:
    first = open_metrics(tmp_path, "tensorboard")
    for iteration in range(1, 6):
        first.record({"iteration": iteration, "mean_return": 1.0 * iteration})
    first.close()
    second = open_metrics(tmp_path, "tensorboard", iteration=3)
    second.record({"iteration": 4, "mean_return": 40.0})
    assert scalars(tmp_path, "mean_return") == {1: 1.0, 2: 2.0, 3: 3.0, 4: 40.0}


@pytest.mark.parametrize("logger", ["none", "tensorboard"])
def test_what_a_full_disk_refused_is_written_later(tmp_path: Path, logger: metrics.Logger) -> None:
    writer = open_metrics(tmp_path, logger)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(RunError) as caught:
            for iteration in range(1, 1000):
                writer.record({"iteration": iteration, "mean_return": 1.0})
        assert "\n" not in str(caught.value)
        assert str(tmp_path) in str(caught.value)
        written = len(lines(tmp_path))  # and every line is whole
        for later in range(iteration + 1, 200):
            with pytest.raises(RunError):
                writer.record({"iteration": later, "mean_return": 1.0})
        assert 5 < written < 100
        assert writer.num_missing >= 100
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    writer.record({"iteration": 200, "mean_return": 1.0})
    assert writer.num_missing == 0
    assert [line["iteration"] for line in lines(tmp_path)] == list(range(1, 201))
    if logger == "tensorboard":
        assert scalars(tmp_path, "mean_return") == dict.fromkeys(range(1, 201), 1.0)


def test_no_sinks_do_nothing(tmp_path: Path) -> None:
    writer = MetricsWriter()
    writer.record({"iteration": 1})
    writer.close()
    assert list(tmp_path.iterdir()) == []


class FakeRun:
    """What ``wandb.init`` returns."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings
        self.logged: list[tuple[int, dict[str, Any]]] = []
        self.finished = False

    def log(self, values: dict[str, Any], step: int) -> None:
        self.logged.append((step, values))

    def finish(self) -> None:
        self.finished = True


class FakeWandb(types.ModuleType):
    """Stands in for Weights & Biases; what cannot be reached from a test."""

    class Error(Exception):
        pass

    def __init__(self) -> None:
        super().__init__("wandb")
        self.runs: list[FakeRun] = []
        self.refuses = False

    def init(self, **settings: Any) -> FakeRun:
        if self.refuses:
            raise self.Error("no API key configured\nUse wandb login")
        self.runs.append(FakeRun(**settings))
        return self.runs[-1]


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def run_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "cartpole" / "2026-01-01_00-00-00"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text('{"run_id": "abc123"}')
    return folder


def test_wandb_gets_every_iteration(tmp_path: Path, wandb: FakeWandb) -> None:
    folder = run_folder(tmp_path)
    writer = open_metrics(folder, "wandb", config={"seed": 1})
    writer.record({"iteration": 1, "mean_return": None, "kl": 0.5})
    writer.close()
    (run,) = wandb.runs
    assert run.settings["id"] == "abc123"
    assert run.settings["resume"] == "allow"
    assert (run.settings["group"], run.settings["name"]) == ("cartpole", "2026-01-01_00-00-00")
    assert run.settings["config"] == {"seed": 1}
    assert run.logged == [(1, {"iteration": 1, "kl": 0.5})]
    assert run.finished
    assert lines(folder) == [{"iteration": 1, "mean_return": None, "kl": 0.5}]


def test_wandb_that_refuses_is_one_line(tmp_path: Path, wandb: FakeWandb) -> None:
    wandb.refuses = True
    with pytest.raises(RunError) as caught:
        open_metrics(run_folder(tmp_path), "wandb")
    assert "no API key configured; run 'wandb login'" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_wandb_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UsageError, match=r"pip install 'lockstep-rl\[wandb\]'"):
        require_logger("wandb")
    require_logger("tensorboard")
