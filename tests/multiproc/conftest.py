"""The ranks that tests share, one pool of each size per test process; trainings that wait; a look at what is left."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.multiproc import held_training
from tests.multiproc.commands import processes_here
from tests.rank_pool import RankPool, RankServer


@pytest.fixture(scope="session")
def rank_server() -> Iterator[RankServer]:
    server = RankServer()
    yield server
    server.close()


@pytest.fixture(scope="session")
def ranks_2(rank_server: RankServer) -> Iterator[RankPool]:
    """Two ranks."""
    pool = RankPool(rank_server, 2)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def ranks_4(rank_server: RankServer) -> Iterator[RankPool]:
    """Four ranks."""
    pool = RankPool(rank_server, 4)
    yield pool
    pool.close()


@pytest.fixture
def hold(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Lets trainings that start from now on go as far as is said."""
    Path("modules").mkdir()
    shutil.copy(held_training.__file__, "modules/sitecustomize.py")
    monkeypatch.setenv("PYTHONPATH", str(Path("modules").absolute()))

    def hold_at(iteration: int) -> None:
        Path("new hold").write_text(str(iteration))
        Path("new hold").rename("hold")

    return hold_at


@pytest.fixture
def nothing_is_left() -> Iterator[None]:
    """Fails the test if it leaves a process in its folder, and ends that process."""
    yield
    left = processes_here()
    for process in left:
        process.kill()
    assert [process.cmdline() for process in left] == []


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the tests of a pool on one worker of pytest-xdist, or each worker would start a pool of its own."""
    for item in items:
        used = sorted({"ranks_2", "ranks_4"} & set(getattr(item, "fixturenames", ())))
        if used:
            item.add_marker(pytest.mark.xdist_group(used[-1]))
