"""Which cores a rank gets, and how many threads it may keep busy."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest
import torch

from lockstep.core.environment import allowed_cores
from lockstep.distributed import cores
from lockstep.distributed.cores import cores_of_rank, in_order, read_numa_of_cores, read_numa_of_gpu, threads_per_rank
from lockstep.distributed.topology import ISOLATED, Topology, identity
from lockstep.recipes.cartpole import cartpole_classic
from lockstep.session import process
from tests.unit.gpu_fixtures import answer, rank_environment

BEFORE = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()

needs_two_cores = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity")
    or len(os.sched_getaffinity(0)) < 2
    or allowed_cores() < len(os.sched_getaffinity(0)),
    reason="needs two cores and no quota",
)


def shares(
    num_ranks: int,
    allowed: list[int],
    quota: int | None = None,
    numa_of_core: dict[int, int] | None = None,
    gpu_nodes: list[int | None] | None = None,
) -> list[tuple[int, ...] | None]:
    """Return the cores of each local rank; the node is the second of two, so its ranks are others."""
    return [
        cores_of_rank(
            Topology(num_ranks + local_rank, local_rank, 2 * num_ranks, num_ranks),
            allowed,
            len(allowed) if quota is None else quota,
            numa_of_core or {},
            gpu_nodes or [None] * num_ranks,
        )
        for local_rank in range(num_ranks)
    ]


TWO_NODES = {0: 0, 1: 0, 2: 0, 3: 0, 4: 1, 5: 1, 6: 1, 7: 1}


class TestCoresOfRank:
    def test_equal_neighbouring_shares(self) -> None:
        assert shares(2, [0, 1, 2, 3]) == [(0, 1), (2, 3)]
        assert shares(3, [8, 9, 10, 4]) == [(8,), (9,), (10, 4)]
        assert shares(3, [0, 1, 2, 3, 4, 5, 6, 7]) == [(0, 1), (2, 3, 4), (5, 6, 7)]
        assert shares(1, [5, 7]) == [(5, 7)]

    def test_no_binding_with_fewer_cores_than_ranks_or_under_a_quota(self) -> None:
        assert shares(3, [0, 1]) == [None, None, None]
        assert shares(2, [0, 1, 2, 3], quota=3) == [None, None]

    def test_cores_come_from_the_gpus_side_of_the_machine(self) -> None:
        # GPU 0 hangs on node 1 and GPU 1 on node 0.
        assert shares(2, list(range(8)), numa_of_core=TWO_NODES, gpu_nodes=[1, 0]) == [(4, 5, 6, 7), (0, 1, 2, 3)]

    def test_ranks_on_one_node_share_it(self) -> None:
        assert shares(3, list(range(8)), numa_of_core=TWO_NODES, gpu_nodes=[1, 0, 1]) == [
            (4, 5),
            (0, 1, 2, 3),
            (6, 7),
        ]

    @pytest.mark.parametrize(
        ("allowed", "gpu_nodes"),
        [
            ([0, 1, 2, 3], [0, None]),  # one is not known
            ([0, 1, 2, 3], [1, 1]),  # no core of that node is allowed
            ([0, 1, 2, 4], [1, 1]),  # one core for two ranks
        ],
    )
    def test_what_cannot_be_near_is_split_evenly(self, allowed: list[int], gpu_nodes: list[int | None]) -> None:
        first, second = shares(2, allowed, numa_of_core=TWO_NODES, gpu_nodes=gpu_nodes)
        assert first == tuple(allowed[:2])
        assert second == tuple(allowed[2:])


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


@pytest.fixture
def system(tmp_path: Path) -> Path:
    """sysfs of two sockets with two cores of two threads each, numbered as servers do: first threads first."""
    write(tmp_path / "devices/system/node/node0/cpulist", "0-1,4-5")
    write(tmp_path / "devices/system/node/node1/cpulist", "2-3,6-7")
    for core in range(8):
        write(tmp_path / f"devices/system/cpu/cpu{core}/topology/thread_siblings_list", f"{core % 4},{core % 4 + 4}")
    write(tmp_path / "bus/pci/devices/0000:17:00.0/numa_node", "1")
    write(tmp_path / "bus/pci/devices/0000:27:00.0/numa_node", "0")
    write(tmp_path / "bus/pci/devices/0000:37:00.0/numa_node", "-1")
    return tmp_path


def test_sysfs_is_read(system: Path) -> None:
    assert read_numa_of_cores(system) == {0: 0, 1: 0, 4: 0, 5: 0, 2: 1, 3: 1, 6: 1, 7: 1}
    assert read_numa_of_gpu("0000:17:00.0", system) == 1
    assert read_numa_of_gpu("0000:37:00.0", system) is None  # the system does not know
    assert read_numa_of_gpu("0000:99:00.0", system) is None


def test_two_threads_of_a_core_are_neighbours(system: Path) -> None:
    # Halved as numbered, two ranks would get one thread each of every core.
    assert in_order(set(range(8)), read_numa_of_cores(system), system) == [0, 4, 1, 5, 2, 6, 3, 7]


def test_without_sysfs_cores_stay_in_their_order(tmp_path: Path) -> None:
    assert read_numa_of_cores(tmp_path) == {}
    assert in_order({3, 1, 2}, {}, tmp_path) == [1, 2, 3]


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch, system: Path) -> Callable[..., tuple[tuple[int, ...] | None, str | None]]:
    """Return a function that settles a rank on a made-up machine: (cores it was bound to, its number of threads)."""

    def settle(
        own: set[int],
        shared: set[int] | None,
        usable: int | None = None,
        local_rank: int = 1,
        num_ranks: int = 2,
        bus_ids: list[str | None] | None = None,
        **variables: str,
    ) -> tuple[tuple[int, ...] | None, str | None]:
        bound: list[tuple[int, ...]] = []

        def bind(to: tuple[int, ...]) -> bool:
            bound.append(to)
            return True

        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(own))
        monkeypatch.setattr(cores, "_bind", bind)
        monkeypatch.setattr(cores, "_cores_of_starter", lambda: shared)
        monkeypatch.setattr(cores, "allowed_cores", lambda: len(own) if usable is None else usable)
        topology = Topology(local_rank, local_rank, num_ranks, num_ranks)
        environment = dict(variables)
        cores.settle(environment, topology, bus_ids or [None] * num_ranks, system)
        return (bound[0] if bound else None), environment.get(cores.THREADS)

    return settle


Settle = Callable[..., tuple[tuple[int, ...] | None, str | None]]
ALL = set(range(8))


def test_a_rank_that_has_all_cores_of_its_starter_takes_its_share(settled: Settle) -> None:
    assert settled(ALL, ALL) == ((2, 6, 3, 7), "4")
    assert settled(ALL, ALL, bus_ids=["0000:17:00.0", "0000:27:00.0"]) == ((0, 4, 1, 5), "4")


def test_pinning_can_be_turned_off(settled: Settle) -> None:
    assert settled(ALL, ALL, LOCKSTEP_PIN="0") == (None, "4")


def test_a_quota_is_shared_without_binding(settled: Settle) -> None:
    assert settled(ALL, ALL, usable=6) == (None, "3")


def test_more_ranks_than_cores_have_a_thread_each(settled: Settle) -> None:
    assert settled({0, 1}, {0, 1}, num_ranks=4) == (None, "1")


def test_cores_that_somebody_gave_this_rank_stay(settled: Settle) -> None:
    assert settled({2, 3}, ALL, num_ranks=4) == (None, "2")  # its own two
    assert settled({0, 1, 4, 5}, ALL, num_ranks=4) == (None, "2")  # a NUMA node that it shares with another rank


def test_where_nothing_is_known_nothing_is_bound(settled: Settle) -> None:
    assert settled(ALL, None) == (None, "4")


class Ancestor:
    """What psutil says of a process: its variables, unless they are another user's."""

    def __init__(self, pid: int, variables: dict[str, str] | None) -> None:
        self.pid = pid
        self.variables = variables

    def environ(self) -> dict[str, str]:
        if self.variables is None:
            raise psutil.AccessDenied(self.pid)
        return self.variables


@pytest.mark.parametrize(
    ("ancestors", "expected"),
    [
        # The nearest first: a shell that bound this rank, torchrun's agent, a login shell.
        ([Ancestor(30, {"RANK": "1"}), Ancestor(20, {"HOME": "/"}), Ancestor(10, {})], {20, 21}),
        ([Ancestor(20, None), Ancestor(10, {})], {20, 21}),  # srun's daemon is root's
        ([Ancestor(30, {"RANK": "1"})], None),
        ([], None),
    ],
)
def test_the_ranks_starter_is_the_nearest_process_that_is_no_rank(
    monkeypatch: pytest.MonkeyPatch, ancestors: list[Ancestor], expected: set[int] | None
) -> None:
    class Own:
        def parents(self) -> list[Ancestor]:
            return ancestors

    monkeypatch.setattr(psutil, "Process", Own)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {pid, pid + 1})
    assert cores._cores_of_starter() == expected


REPORT = """
import json, os, lockstep
from lockstep.distributed.cores import threads_per_rank
print(json.dumps([sorted(os.sched_getaffinity(0)), threads_per_rank()]))
"""


def job_of_two(folder: Path, local_rank: str, **changes: str) -> dict[str, str]:
    """Return the variables of a rank that computes on the CPU, beside one other."""
    job = {"RANK": local_rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    return rank_environment(folder, LOCKSTEP_DEVICE="cpu", **(job | changes))


@needs_two_cores
class TestRealProcesses:
    def test_ranks_have_disjoint_cores(self, tmp_path: Path) -> None:
        seen = []
        for local_rank in ("0", "1"):
            own, threads = answer(REPORT, job_of_two(tmp_path, local_rank))
            assert threads == len(own)
            seen += own
        assert sorted(seen) == sorted(os.sched_getaffinity(0))

    def test_shells_in_between_and_children_change_nothing(self, tmp_path: Path) -> None:
        expected = answer(REPORT, job_of_two(tmp_path, "1"))
        assert len(expected[0]) < len(os.sched_getaffinity(0))
        child = f"import lockstep, subprocess, sys\nsubprocess.run([sys.executable, '-c', {REPORT!r}], check=True)"
        shell = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {child!r}], check=True)"
        assert answer(shell, job_of_two(tmp_path, "1")) == expected

    def test_turned_off(self, tmp_path: Path) -> None:
        own, threads = answer(REPORT, job_of_two(tmp_path, "1", LOCKSTEP_PIN="0"))
        assert own == sorted(os.sched_getaffinity(0))
        assert threads == len(own) // 2

    def test_a_rank_that_is_bound_already_keeps_its_core(self, tmp_path: Path) -> None:
        last = max(os.sched_getaffinity(0))
        options: dict[str, Any] = {"preexec_fn": lambda: os.sched_setaffinity(0, {last})}
        assert answer(REPORT, job_of_two(tmp_path, "0"), **options) == [[last], 1]

    def test_threads_that_run_already_are_bound_too(self, tmp_path: Path) -> None:
        code = f"""
import threading
over, tid = threading.Event(), []
thread = threading.Thread(target=lambda: (tid.append(threading.get_native_id()), over.wait()))
thread.start()
while not tid: pass
{REPORT}
print(json.dumps(sorted(os.sched_getaffinity(tid[0])) == sorted(os.sched_getaffinity(0))))
over.set()
"""
        assert answer(code, job_of_two(tmp_path, "1")) is True

    def test_this_process_is_where_it_was(self) -> None:
        assert os.sched_getaffinity(0) == BEFORE


class TestThreadsPerRank:
    @pytest.fixture(autouse=True)
    def _eight_cores(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cores, "allowed_cores", lambda: 8)

    def test_one_process_has_all_cores(self) -> None:
        assert threads_per_rank({}) == 8

    def test_ranks_share_their_own_node_not_the_job(self) -> None:
        job = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "2"}
        assert threads_per_rank(job) == 4
        assert threads_per_rank(job | {"LOCAL_WORLD_SIZE": "16"}) == 1

    def test_an_isolated_rank_knows_its_number(self) -> None:
        job = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", cores.THREADS: "3"}
        assert threads_per_rank(job | {ISOLATED: identity(job)}) == 3
        # The number was another rank's, whose child started this job.
        assert threads_per_rank(job | {ISOLATED: identity(job | {"RANK": "0"})}) == 4

    def test_torch_gets_that_many(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
            monkeypatch.setenv(name, value)
        asked: list[int] = []
        monkeypatch.setattr(torch, "set_num_threads", asked.append)
        recipe = cartpole_classic()
        wide = recipe.agent.model_copy(update={"actor_hidden_dims": [512]})
        process.prepare(recipe.model_copy(update={"agent": wide}), rank=1)
        assert asked == [4]
