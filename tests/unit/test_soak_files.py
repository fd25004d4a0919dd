"""What a soak takes for a file that can't be read, and what not."""

import time
from pathlib import Path

import pytest

from tests.multiproc.soak_files import FilesWatch


def looked_at(metrics: Path) -> list[str]:
    watch = FilesWatch(metrics.parent.parent)
    watch.look()
    return watch.take_problems()


def test_a_record_that_is_half_there_for_an_instant_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics = tmp_path / "run" / "metrics.jsonl"
    metrics.parent.mkdir()
    for name in ("run.json", "progress.json"):
        (metrics.parent / name).write_text("{}")
    metrics.write_text('{"iteration": 1}\n{"iterat')
    assert [problem.rpartition(": ")[2] for problem in looked_at(metrics)] == ["1}\\n{\"iterat'"]

    def write_the_rest(seconds: float) -> None:
        with metrics.open("a") as file:
            file.write('ion": 2}\n')

    monkeypatch.setattr(time, "sleep", write_the_rest)
    assert looked_at(metrics) == []
