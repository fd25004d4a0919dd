"""What a process uses: counted by the system, not by the process."""

import os
import threading
import time
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from lockstep.benchmark.hardware import cores_of_job, gpu_of, own_cores, own_node
from lockstep.benchmark.resources import Sample, Sampler, Threads
from lockstep.core.environment import allowed_cores
from lockstep.core.gpu_mask import Gpu

LINUX = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="the system keeps no such counts")


def thread(folder: Path, name: str, on_core_ns: int, delay_ns: int, command: str = "python") -> None:
    (folder / name).mkdir(exist_ok=True)
    (folder / name / "comm").write_text(f"{command}\n")
    (folder / name / "schedstat").write_text(f"{on_core_ns} {delay_ns} 7\n")


def test_times_of_all_threads_are_summed_and_those_that_have_ended_count_on(tmp_path: Path) -> None:
    threads = Threads(tmp_path)
    thread(tmp_path, "9", 5_000_000_000, 7_000_000_000, "gloo_tcp_loop")
    thread(tmp_path, "1", 2_000_000_000, 500_000_000)
    thread(tmp_path, "2", 1_000_000_000, 0)
    assert threads.read() == (0.5, 7.0)
    (tmp_path / "2" / "schedstat").unlink()
    thread(tmp_path, "1", 3_000_000_000, 500_000_000)
    thread(tmp_path, "3", 0, 250_000_000)
    assert threads.read() == (0.75, 7.0)


def test_a_system_that_keeps_no_such_counts(tmp_path: Path) -> None:
    assert Threads(tmp_path / "missing").read() is None
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "schedstat").write_text("what?")
    (tmp_path / "1" / "comm").write_text("python")
    assert Threads(tmp_path).read() is None


@LINUX
def test_a_busy_thread_is_seen_and_its_core_is_busy() -> None:
    sampler = Sampler(own_cores())
    with sampler:
        began = time.process_time()
        while time.process_time() - began < 0.3:
            pass
    (used,) = [
        (sum(each.cpu_s for each in intervals), sum(each.busy_s for each in intervals))
        for intervals in [sampler.intervals()]
    ]
    assert 0.3 <= used[0] < 3.0
    assert used[1] > 0.15  # the system counts in hundredths of seconds
    assert all(each.memory_bytes > 2**20 and each.delay_s is not None for each in sampler.intervals())


@LINUX
def test_a_thread_without_a_core_is_delayed() -> None:
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        with Sampler((min(cores),)) as sampler:
            other = psutil.Popen(["python3", "-c", "while True: pass"])
            try:
                began = time.process_time()
                while time.process_time() - began < 0.3:
                    pass
            finally:
                other.kill()
                other.wait()
    finally:
        os.sched_setaffinity(0, cores)
    assert sum(each.delay_s or 0.0 for each in sampler.intervals()) > 0.05


def test_samples_are_taken_in_between_and_no_thread_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.benchmark.resources.INTERVAL_S", 0.01)
    monkeypatch.setattr("lockstep.benchmark.resources._MAX_SHARE", 1.0)
    before = threading.active_count()
    with Sampler(own_cores()) as sampler:
        deadline = time.monotonic() + 20
        while len(sampler.samples) < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert len(sampler.intervals()) >= 4
    assert threading.active_count() == before


def test_a_short_interval_at_the_end_is_part_of_the_one_before() -> None:
    sampler = Sampler(None)
    sampler.samples = [Sample(at_s, at_s, 0.0, 0.0, 0.0, 1, ()) for at_s in (0.0, 0.5, 1.0, 1.01)]
    assert [each.seconds for each in sampler.intervals()] == [0.5, pytest.approx(0.51)]
    sampler.samples = [Sample(at_s, at_s, 0.0, 0.0, 0.0, 1, ()) for at_s in (0.0, 0.01)]
    assert [each.seconds for each in sampler.intervals()] == [0.01]


# --- the GPU behind a device ---------------------------------------------------------------------------------------


def gpus(*names: str) -> list[Gpu]:
    return [
        Gpu(index, f"GPU-{index:08x}-0000-0000-0000-000000000000", name, f"0000:0{index}:00.0", 2**34, "570")
        for index, name in enumerate(names)
    ]


@pytest.mark.parametrize(
    ("device", "mask", "expected"),
    [
        ("cuda", None, 0),
        ("cuda:1", None, 1),
        ("cuda:0", "2", 2),
        ("cuda:1", "2,0", 0),
        ("cuda:0 (NVIDIA H100)", "1", 1),
        ("cuda:0", "GPU-00000002", 2),
        ("cuda:2", "0,1", None),
        ("cuda:0", "", None),
        ("cuda:0", "9", None),
        ("cpu", None, None),
        ("cpu:0", None, None),
    ],
)
def test_the_gpu_of_a_device_is_found_through_the_mask(device: str, mask: str | None, expected: int | None) -> None:
    found = gpu_of(device, gpus("A", "A", "A"), mask)
    assert (None if found is None else found.index) == expected


def test_an_index_says_nothing_where_cuda_counts_in_an_order_of_its_own() -> None:
    assert gpu_of("cuda:0", gpus("A", "B"), None) is None
    found = gpu_of("cuda:0", gpus("A", "B"), None, "PCI_BUS_ID")
    assert found is not None and found.index == 0


def test_this_node() -> None:
    node = own_node(gpus("A"))
    assert node.num_cores == os.cpu_count()
    assert node.num_allowed_cores == cores_of_job() >= allowed_cores()
    assert node.gpus[0].pci_bus_id == "0000:00:00.0"
