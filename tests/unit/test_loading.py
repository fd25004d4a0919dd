"""Which checkpoint a run goes on from, and what becomes of those that are not whole."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from lockstep.core.errors import UsageError
from lockstep.core.run_directory import RunDirectory
from lockstep.core.runs import newest_iteration
from lockstep.distributed.torch_comm import SoloComm
from lockstep.learn.torch import checkpoint
from lockstep.session.loading import go_on
from tests.unit.attempt_fixtures import CONFIG, create

NAMES = ["model_10.pt", "model_20.pt", "model_30.pt"]


class Taken:
    """A training that notes the iteration it is to go on from."""

    def __init__(self) -> None:
        self.config, self.iteration = CONFIG, 0

    def load_state_dict(self, saved: Any, path: object) -> None:
        self.iteration = saved["iteration"]


def saved(run: Path, format_of_newest: int = checkpoint.FORMAT) -> list[Path]:
    """Make a checkpoint every ten iterations."""
    paths = [run / "checkpoints" / name for name in NAMES]
    for path in paths:
        iteration = int(path.stem.removeprefix("model_"))
        content = {"format": checkpoint.FORMAT if path != paths[-1] else format_of_newest, "ml_framework": "torch"}
        content |= {"task": CONFIG.task, "config": {}, "iteration": iteration, "env_steps": 0, "policy": {}}
        checkpoint.save(content, path)
    return paths


def gone_on(run: Path) -> int:
    """Go on with a run, and return the iteration from which."""
    training: Any = Taken()
    with closing(RunDirectory.open(run)) as directory:
        go_on(training, SoloComm(), directory)
    return int(training.iteration)


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").glob("*.pt"))


def test_damaged_checkpoints_make_a_run_no_older_than_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    run = create()
    _, truncated, damaged = saved(run)
    truncated.write_bytes(truncated.read_bytes()[:100])
    content = bytearray(damaged.read_bytes())
    content[100] ^= 1
    damaged.write_bytes(content)
    assert newest_iteration(run) == 30
    assert gone_on(run) == 10
    assert newest_iteration(run) == 10  # or a crash loop from there would seem to get on
    assert names(run) == ["damaged_model_20.pt", "damaged_model_30.pt", "model_10.pt"]
    said = capsys.readouterr().err
    assert all(f"{path} is called damaged_{path.name} now" in said for path in (truncated, damaged))


def test_a_checkpoint_that_is_only_of_another_format_keeps_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    run = create()
    saved(run, format_of_newest=checkpoint.FORMAT + 1)
    assert gone_on(run) == 20
    assert names(run) == NAMES
    assert "model_30.pt has format" in capsys.readouterr().err


def test_where_none_is_whole_nothing_is_renamed() -> None:
    # A run without any checkpoint would begin anew.
    run = create()
    for path in saved(run):
        path.write_bytes(b"")
    for _ in range(2):
        with pytest.raises(UsageError, match="is whole"):
            gone_on(run)
    assert names(run) == NAMES
