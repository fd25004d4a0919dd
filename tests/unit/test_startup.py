"""How long starts take: what is made of the figures, and what becomes of a start that fails."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lockstep.benchmark.startup.child import ProcessStart
from lockstep.benchmark.startup.process import (
    FOLDER_PREFIX,
    Meeting,
    choose_meeting,
    environment_of_start,
    folder_for_caches,
    shared_cache,
)
from lockstep.benchmark.startup.starts import by_rank, measure_startup, summarise
from lockstep.core.errors import RunError, UsageError
from lockstep.core.outcome import LOST_A_RANK
from lockstep.distributed.topology import ISOLATED, identity, is_isolated
from lockstep.distributed.torch_comm import SoloComm
from tests.multiproc.commands import OF_TESTS, wait_for
from tests.unit.startup_fixtures import Threads, all_gone, fake_starts, logged, told

__all__ = ["fake_starts"]
OF_RANK = {
    "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0",
    "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True", "LOCKSTEP_ATTEMPT_DIR": "/tmp/attempt", "LOCKSTEP_JOB": "job 7",
    "LOCKSTEP_START": "{}", "CUDA_VISIBLE_DEVICES": "GPU-5", "LOCKSTEP_DEVICE": "GPU-5", "LOCKSTEP_THREADS": "3",
    "WARP_CACHE_PATH": "/home/someone/warp", "HOME": "/home/someone",
}  # fmt: skip
MEETING = Meeting(store_port=4001, coordinator_port=4002, name="lockstep-startup-1")


def start_of(ranks: list[int], **seconds: float) -> ProcessStart:
    places = [{"rank": rank, "host": "here"} for rank in ranks]
    return ProcessStart(ranks, places, seconds, cpu_s=sum(seconds.values()), memory_bytes=100, functions=[])


# --- figures -------------------------------------------------------------------------------------------------------


def test_phases_are_spread_over_ranks_and_repetitions() -> None:
    cold = [start_of([0], imports=4.0, total=5.0), start_of([1], imports=6.0, total=8.0)]
    warm = [
        [start_of([0], imports=1.0, total=2.0), start_of([1], imports=2.0, total=3.0)],
        [start_of([0], imports=3.0, total=4.0), start_of([1], imports=2.0, total=7.0)],
    ]
    found = summarise(cold, warm, [{"phase": "imports", "function": "f", "calls": 1, "own_s": 0.0, "total_s": 0.5}])
    assert found.repetitions == 2
    assert [phase.name for phase in found.phases] == ["imports", "total"]
    imports, total = found.phases
    assert imports.cold_s is not None and imports.warm_s is not None and total.warm_s is not None
    assert (imports.cold_s.num, imports.cold_s.mean, imports.cold_s.most) == (2, 5.0, 6.0)
    # 1, 2, 2, 3: a tenth of the way from 1 to 3 by numpy's rule is 0.3 of the way from the first to the second
    assert (imports.warm_s.num, imports.warm_s.mean, imports.warm_s.median) == (4, 2.0, 2.0)
    assert (imports.warm_s.p10, imports.warm_s.p90) == pytest.approx((1.3, 2.7))
    assert (total.warm_s.least, total.warm_s.most) == (2.0, 7.0)
    # Of the imports both ranks took 2 s in the mean, and the first is named; all in all 3 s against 5 s.
    assert (imports.slowest_rank, total.slowest_rank) == (0, 1)
    assert found.functions[0].total_s == 0.5


def test_without_warm_starts_the_cold_one_tells_the_slowest_rank() -> None:
    found = summarise([start_of([0], total=5.0), start_of([1], total=8.0)], [], [])
    assert found.phases[0].warm_s is None
    assert found.phases[0].slowest_rank == 1


def test_a_process_with_several_ranks_counts_for_each_of_them() -> None:
    cold = [start_of([0, 1], total=6.0), start_of([2], total=3.0)]
    found = summarise(cold, [], [])
    assert found.phases[0].cold_s is not None
    assert (found.phases[0].cold_s.num, found.phases[0].cold_s.mean) == (3, 5.0)
    ranks = by_rank([cold, cold])
    assert [(each.rank, each.process, each.total_s) for each in ranks] == [
        (0, 0, (6.0, 6.0)),
        (1, 0, (6.0, 6.0)),
        (2, 1, (3.0, 3.0)),
    ]
    assert ranks[1].place == {"rank": 1, "host": "here"}


# --- the environment of a start ------------------------------------------------------------------------------------


def test_a_start_has_the_place_of_its_rank_in_a_job_of_its_own() -> None:
    environment = OF_RANK | {"JAX_COORDINATOR_ADDRESS": "[fd00::1]:1234"}
    environment[ISOLATED] = identity(environment)
    found = environment_of_start(environment, MEETING, Path("/tmp/caches"))
    kept = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "CUDA_VISIBLE_DEVICES", "LOCKSTEP_DEVICE", "LOCKSTEP_THREADS", "HOME")
    assert {name: found[name] for name in kept} == {name: environment[name] for name in kept}
    assert found["LOCKSTEP_JOB"] == "job 7"  # by which a launcher finds what it must end
    assert (found["MASTER_PORT"], found["JAX_COORDINATOR_ADDRESS"]) == ("4001", "[fd00::1]:4002")
    assert {name: found[name] for name in found if name.startswith("TORCHELASTIC_")} == {
        "TORCHELASTIC_USE_AGENT_STORE": "False"
    }
    assert not {"LOCKSTEP_ATTEMPT_DIR", "LOCKSTEP_START"} & set(found)
    assert is_isolated(found)
    assert identity(found) != identity(environment)


def test_every_cache_of_a_start_is_its_own() -> None:
    found = environment_of_start(OF_RANK, MEETING, Path("/tmp/caches"))
    names = ("WARP_CACHE_PATH", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH", "XDG_CACHE_HOME")
    assert all(found[name].startswith("/tmp/caches/") for name in names)
    assert len({found[name] for name in names}) == len(names)
    assert "JAX_COMPILATION_CACHE_DIR" not in found  # several processes keep nothing, unless the user says where
    assert not is_isolated(found)


def test_what_jax_compiles_goes_where_the_user_has_said_that_all_processes_see_it() -> None:
    environment = OF_RANK | {"JAX_COMPILATION_CACHE_DIR": "/shared/jax"}
    found = environment_of_start(environment, MEETING, Path("/tmp/caches"))
    assert found["JAX_COMPILATION_CACHE_DIR"] == "/shared/jax/lockstep-startup-1"
    with pytest.raises(UsageError, match="gs://bucket/jax, where no cold start can be made"):
        shared_cache({"JAX_COMPILATION_CACHE_DIR": "gs://bucket/jax"}, "name")


def test_a_process_alone_meets_nobody() -> None:
    found = environment_of_start({"HOME": "/home/someone"}, MEETING, Path("/tmp/caches"))
    assert not {"MASTER_PORT", "RANK", "JAX_COORDINATOR_ADDRESS", ISOLATED} & set(found)


def test_the_ports_of_a_meeting_differ() -> None:
    meeting = choose_meeting("name")
    assert len({meeting.store_port, meeting.coordinator_port} - {0}) == 2


def test_caches_go_when_something_fails(temporary: Path) -> None:
    old = temporary / f"{FOLDER_PREFIX}old"
    old.mkdir()
    os.utime(old, (0, 0))
    (temporary / f"{FOLDER_PREFIX}new").mkdir()
    shared = temporary / "shared"
    with pytest.raises(ZeroDivisionError), folder_for_caches(shared) as folder:
        assert list(folder.iterdir()) == []
        (shared / "kernels").mkdir(parents=True)
        raise ZeroDivisionError
    assert [each.name for each in temporary.iterdir()] == [f"{FOLDER_PREFIX}new"]


# --- starts that are measured --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("fake_starts")
def test_one_cold_start_then_warm_ones_then_one_under_a_profiler() -> None:
    said: list[str] = []
    found, ranks = measure_startup(told(), SoloComm(), repetitions=2, say=said.append)
    assert said == ["cold start", "warm start 1 of 2", "warm start 2 of 2", "start under a profiler"]
    total = found.phases[-1]
    assert total.name == "total" and total.cold_s is not None and total.warm_s is not None
    assert (total.cold_s.mean, total.warm_s.mean, total.warm_s.num) == (4.0, 2.5, 2)  # 9 s under the profiler
    assert [function.function for function in found.functions] == ["torch"]
    assert ranks[0].total_s == (2.0, 3.0)
    assert ranks[0].memory_bytes == (1001, 1002)
    # The first has found nothing in its caches, the others what was there before; nothing is left of them.
    assert [each["seen"] for each in logged()] == [
        [],
        ["kernel_0"],
        ["kernel_0", "kernel_1"],
        ["kernel_0", "kernel_1", "kernel_2"],
    ]
    assert not Path(logged()[0]["folder"]).exists()
    assert list(Path("temporary").iterdir()) == []


@pytest.mark.usefixtures("fake_starts")
def test_all_ranks_get_the_same_figures() -> None:
    configs = [told(ranks=[rank], total_s=[4.0, 2.0 + rank, 9.0]) for rank in range(2)]
    first, second = Threads(2).run(lambda comm: measure_startup(configs[comm.rank], comm, repetitions=1))
    assert first == second
    assert first[0].phases[-1].slowest_rank == 1
    assert [each.total_s for each in first[1]] == [(2.0,), (3.0,)]


def fail(*what: dict[str, Any]) -> list[Any]:
    """Return what each rank raises; what the process of each does is told."""
    configs = [told(ranks=[rank], log=f"log_{rank}.jsonl", **each) for rank, each in enumerate(what)]
    outcomes = Threads(len(what)).run(lambda comm: measure_startup(configs[comm.rank], comm, repetitions=1))
    assert list(Path("temporary").iterdir()) == []
    return outcomes


HANGS = {"fails_at": 1, "how": "hangs"}


@pytest.mark.usefixtures("fake_starts")
def test_a_start_that_dies_is_named_and_ends_those_of_the_others() -> None:
    outcomes = fail(HANGS, {"fails_at": 1, "how": "is killed", "words": "out of luck"})
    for error in outcomes:
        assert type(error) is RunError
        assert error.shared
        assert str(error) == (
            "rank 1 failed in its warm start 1 of 1: it was ended by SIGKILL in phase imports: out of luck"
        )
    assert all_gone("log_0.jsonl")  # the one it has started included


@pytest.mark.usefixtures("fake_starts")
def test_a_start_that_has_lost_another_is_not_to_blame() -> None:
    lost = {"fails_at": 0, "how": 1, "words": f"{LOST_A_RANK} gradients: rank 1 has ended"}
    outcomes = fail(lost, {"fails_at": 0, "how": 1, "words": "no room\n\nOSError: disk full"})
    assert [str(error) for error in outcomes] == [
        "rank 1 failed in its cold start: it ended with exit code 1 in phase imports: no room | OSError: disk full"
    ] * 2


@pytest.mark.usefixtures("fake_starts")
def test_a_start_that_is_refused_is_wrong_usage() -> None:
    words = "[W] socket.cpp\nlockstep: error: device 'cuda' was asked for"
    (error,) = fail({"fails_at": 0, "how": 2, "words": words})
    assert type(error) is UsageError
    assert str(error).endswith("it ended with exit code 2 in phase imports: device 'cuda' was asked for")


@pytest.mark.usefixtures("fake_starts")
def test_a_start_that_hangs_is_given_up() -> None:
    with pytest.raises(RunError, match="rank 0 failed in its warm start 1 of 1: it did not come to its end in 0 s, in"):
        measure_startup(told(**HANGS), SoloComm(), repetitions=1, timeout_s=0.4)
    assert all_gone()
    assert list(Path("temporary").iterdir()) == []


SCRIPT = """
import sys
from lockstep.benchmark.startup import process as startup_process
from lockstep.benchmark.startup.starts import measure_startup
from tests.unit.startup_fixtures import Peer, Threads, told

startup_process.CHILD = "fake_child"
measure_startup(told(fails_at=1, how="hangs"), Peer(Threads(1), 0), repetitions=1)
"""


@pytest.mark.usefixtures("fake_starts")
@pytest.mark.parametrize(
    ("number", "said"), [(signal.SIGINT, r"KeyboardInterrupt$"), (signal.SIGTERM, r"stopped by a signal \(SIGTERM")]
)
def test_a_signal_ends_the_starts_and_takes_their_caches_away(number: signal.Signals, said: str) -> None:
    command, environment = [sys.executable, "-c", SCRIPT], os.environ | OF_TESTS
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    wait_for(lambda: Path("log.jsonl").exists() and len(logged()) == 3)  # the second start, and what that has started
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert re.search(said, errors.strip(), re.MULTILINE), errors
    assert all_gone()
    assert list(Path("temporary").iterdir()) == []
