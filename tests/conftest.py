"""What every test gets: a folder of its own, no trace of a surrounding job, and reproducible examples."""

import importlib.util
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import hypothesis
import pytest

# Tests run side by side, one per core: more threads each would only make them wait for one another. Where a test does
# use several, they must sleep while they wait: OpenMP's habit of spinning is 20 times slower on cores that are shared.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("MPLBACKEND", "Agg")

# JAX reads them when it starts. The number of its CPU devices goes before that which a training asks for, so that all
# tests of a process find four; commands that tests start do without it (see tests/multiproc/commands.py). The others
# compile in a quarter of the time, for programs that mostly run a few times. XLA refuses a flag that it doesn't know.
_XLA_FLAGS = (
    "--xla_force_host_platform_device_count=4",
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_use_fusion_emitters=false",
    "--xla_cpu_parallel_codegen_split_count=1",
)
_given_flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if flag not in _XLA_FLAGS]
os.environ["XLA_FLAGS"] = " ".join([*_given_flags, *_XLA_FLAGS])
os.environ.pop("JAX_NUM_CPU_DEVICES", None)
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


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep tests that share a fixture of their module on one worker of pytest-xdist, or each would make its own."""
    for item in items:
        fixtures: dict[str, Sequence[pytest.FixtureDef[object]]]
        fixtures = getattr(getattr(item, "_fixtureinfo", None), "name2fixturedefs", {})
        shared = any(definitions[-1].scope == "module" for definitions in fixtures.values())
        if shared and item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.path.stem))


@pytest.fixture
def double_precision() -> Iterator[None]:
    """JAX has 64-bit types, as in a training."""
    import jax

    with jax.enable_x64(True):
        yield
