"""Fixtures that several unit tests share."""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lockstep.distributed import heartbeat
from tests.unit.heartbeat_fixtures import Rank


@pytest.fixture(autouse=True)
def _no_heartbeat_goes_on() -> Iterator[None]:
    """A test that acts as a rank, in this process, begins to beat; the next test is another process."""
    yield
    heartbeat.end()


@pytest.fixture
def start_rank() -> Iterator[Callable[..., Rank]]:
    """Starts a process as torchrun would start a rank; none of them outlives the test."""
    started: list[Rank] = []

    def start_one(*arguments: object, **environment: str) -> Rank:
        started.append(Rank(*arguments, **environment))  # type: ignore[arg-type]
        return started[-1]

    yield start_one
    for rank in started:
        rank.process.kill()
        rank.process.communicate()


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files, of this process and of those that it starts."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder
