"""What every test gets: a folder of its own, no trace of a surrounding job, and reproducible examples."""

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

# Tests run side by side, one per core: more threads each would only make them wait for one another. Where a test does
# use several, they must sleep while they wait: OpenMP's habit of spinning is 20 times slower on cores that are shared.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("MPLBACKEND", "Agg")

# JAX reads it when it is imported. Commands that tests start do without (see tests/multiproc/commands.py).
NUM_JAX_DEVICES = 4
os.environ["JAX_NUM_CPU_DEVICES"] = str(NUM_JAX_DEVICES)
collect_ignore_glob = [] if importlib.util.find_spec("jax") else ["*/test_jax_*.py"]

# No deadline, since how fast a shared machine is says nothing about the code; derandomised, so a failure comes back.
hypothesis.settings.register_profile("lockstep", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("lockstep")

_JOB_PREFIXES = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "MASTER_", "SLURM_", "TORCHELASTIC_", "LOCKSTEP_")


@pytest.fixture(autouse=True)
def _a_place_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in an empty folder and as an ordinary process, even when the tests themselves run inside a job."""
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.startswith(_JOB_PREFIXES):
            monkeypatch.delenv(name)


@pytest.hookimpl(tryfirst=True)  # before fixtures, of a module or of all, train something
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Start JAX with all devices: a training that starts it makes as many as it needs, and they stay for all tests."""
    if any(word in item.path.name for word in ("jax", "mjx", "frameworks")):
        import jax

        assert len(jax.devices()) == NUM_JAX_DEVICES, "another test has started JAX with other devices"


@pytest.fixture
def double_precision() -> Iterator[None]:
    """JAX has 64-bit types, as in a training."""
    import jax

    with jax.enable_x64(True):
        yield
