"""Real starts of a training, measured in one process and in several."""

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest

from lockstep.benchmark.schema import Startup
from lockstep.benchmark.startup import process as startup_process
from lockstep.benchmark.startup.clock import PHASES
from lockstep.benchmark.startup.starts import RankStarts, coordinator_config, measure_startup
from lockstep.core.blame import process_state
from lockstep.core.errors import UsageError
from lockstep.distributed.torch_comm import SoloComm
from lockstep.session.make_config import make_config
from tests.multiproc.commands import Command, lockstep, processes_here, wait_for

SMALL: dict[str, Any] = {
    "num_envs": 16, "device": "cpu", "logger": "none", "evaluation": {"interval": 0},
    "agent": {"num_steps_per_env": 8, "actor_hidden_dims": (16,), "critic_hidden_dims": (16,)},
}  # fmt: skip
SCRIPT = f"""
import json, os, sys
from pathlib import Path

from lockstep.benchmark.startup.starts import coordinator_config, measure_startup
from lockstep.session.framework import framework_of
from lockstep.session.make_config import make_config

config = make_config("cartpole_classic", **({SMALL!r} | json.loads(sys.argv[1])))
framework = framework_of(config)
with framework.running():
    team = framework.join(coordinator_config(config))
    found, ranks = measure_startup(config, team.comm, repetitions=int(sys.argv[2]))
    said = {{"startup": found.model_dump(mode="json"), "ranks": [vars(each) for each in ranks]}}
    Path(f"found_{{os.environ.get('RANK', '0')}}.json").write_text(json.dumps(said))
    team.comm.close()
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files, of this process and of those that it starts."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


@pytest.fixture
def removed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths of the files that are taken away with folders of caches."""
    found: list[str] = []
    remove = shutil.rmtree

    def note_and_remove(folder: Path, **options: Any) -> None:
        found.extend(str(path.relative_to(folder)) for path in folder.rglob("*"))
        remove(folder, **options)

    monkeypatch.setattr(shutil, "rmtree", note_and_remove)
    return found


def check(found: Startup, ranks: tuple[RankStarts, ...], absent: set[str]) -> None:
    """Every phase is there and took time, and all of them together are the whole."""
    assert [phase.name for phase in found.phases] == [name for name in PHASES if name not in absent]
    cold_s = {phase.name: phase.cold_s.mean for phase in found.phases if phase.cold_s is not None}
    assert all(seconds >= 0 for seconds in cold_s.values())
    assert sum(cold_s.values()) - cold_s["total"] >= 0.999 * cold_s["total"]
    assert {function.phase for function in found.functions} >= {"imports", "config", "learner", "first_iteration"}
    assert all(each.total_s[0] > 0 and each.cpu_s[0] > 0 and each.memory_bytes[0] > 1e7 for each in ranks)


def test_one_process_of_torch(temporary: Path) -> None:
    found, ranks = measure_startup(make_config("cartpole_classic", **SMALL), SoloComm(), repetitions=1)
    check(found, ranks, absent={"compile"})
    assert found.repetitions == 1
    assert any("torch" in each.function for each in found.functions if each.phase == "imports")
    assert [(each.rank, each.place["device"]) for each in ranks] == [(0, "cpu")]
    assert list(temporary.iterdir()) == []


def test_one_process_of_jax_with_two_devices(temporary: Path, removed: list[str]) -> None:
    pytest.importorskip("jax")
    config = make_config("cartpole_classic", **SMALL, ml_framework="jax", num_devices=2)
    found, ranks = measure_startup(config, SoloComm(), repetitions=0)
    check(found, ranks, absent=set())
    assert [(each.rank, each.process) for each in ranks] == [(0, 0), (1, 0)]
    assert ranks[0].total_s == ranks[1].total_s
    # What JAX has compiled was kept where the next start finds it, and is gone with all else.
    assert any("kernels" in path and path.endswith("-cache") for path in removed)
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("ml_framework", ["torch", "jax"])
def test_two_processes_start_at_the_same_time(temporary: Path, ml_framework: str) -> None:
    if ml_framework == "jax":
        pytest.importorskip("jax")
    Path("script.py").write_text(SCRIPT)
    words = ("script.py", json.dumps({"ml_framework": ml_framework, "num_envs": [8, 24]}), "0")
    done = lockstep("train_multigpu", "--num_gpus", "2", "--device", "cpu", "--script", *words, timeout_s=240.0)
    assert done.returncode == 0, done.stderr
    first, second = (json.loads(Path(f"found_{rank}.json").read_text()) for rank in range(2))
    assert first == second
    found = Startup.model_validate(first["startup"])
    ranks = tuple(RankStarts(**each) for each in first["ranks"])
    check(found, ranks, absent={"compile"} if ml_framework == "torch" else set())
    assert [(each.rank, each.process, each.place["local_rank"]) for each in ranks] == [(0, 0, 0), (1, 1, 1)]
    assert len({each.place["pid"] for each in ranks}) == 2
    for phase in found.phases:
        assert phase.cold_s is not None
        assert phase.cold_s.num == 2
    assert processes_here() == []
    assert [path for path in temporary.iterdir() if path.name.startswith(startup_process.FOLDER_PREFIX)] == []


def test_what_can_not_start_is_told_in_its_own_words(temporary: Path) -> None:
    Path("refuses.py").write_text("raise RuntimeError('no licence')\n")
    config = make_config("cartpole_classic", **SMALL, runner="refuses:Runner")
    with pytest.raises(UsageError, match=r"^rank 0 failed in its cold start: it ended with exit code 2 .*no licence"):
        measure_startup(config, SoloComm())
    assert list(temporary.iterdir()) == []


def test_a_start_ends_with_whoever_measures_it(temporary: Path) -> None:
    Path("hangs.py").write_text("import time\ntime.sleep(600)\n")
    Path("script.py").write_text(SCRIPT)
    command = Command(json.dumps({"runner": "hangs:Runner"}), "0", module="script")
    try:
        note = command.wait_for(lambda: next(temporary.glob(f"{startup_process.FOLDER_PREFIX}*/phase_0"), None))
        wait_for(lambda: note.read_text() == "config", "the runner to be loaded")
        (child,) = psutil.Process(command.process.pid).children()
        command.send(signal.SIGKILL)
        command.end()
        wait_for(lambda: process_state(child.pid) == "gone", "the end of the start")
    finally:
        command.kill()


def test_those_who_measure_leave_the_gpus_alone() -> None:
    config = make_config("cartpole_classic", **SMALL | {"device": "auto"}, ml_framework="jax", num_devices=3)
    found = coordinator_config(config)
    assert (found.device, found.num_devices, found.enable_multi_devices) == ("cpu", 0, False)
