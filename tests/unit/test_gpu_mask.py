"""Which GPUs a CUDA_VISIBLE_DEVICES shows, and to which rank."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from lockstep.core.environment import gpus as describe_gpus
from lockstep.core.errors import UsageError
from lockstep.core.gpu_mask import device_of_rank, find_gpus, gpu_of_entry, visible_devices
from tests.unit.gpu_fixtures import MIG_UUIDS, UUIDS, make_gpus

FOUR = make_gpus()


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (None, ["0", "1", "2", "3"]),
        ("1,3", ["1", "3"]),
        ("3,1,2,0", ["3", "1", "2", "0"]),
        (" 2 , 0 ", ["2", "0"]),
        ("0,", ["0"]),
        ("02", ["2"]),
        ("", []),
        ("  ", []),
        ("-1", []),
        ("NoDevFiles", []),
        (f"{UUIDS[2]},{UUIDS[0]}", [UUIDS[2], UUIDS[0]]),
        ("GPU-1f,GPU-8a", ["GPU-1f", "GPU-8a"]),  # the beginnings of two UUIDs
    ],
)
def test_what_a_mask_shows(mask: str | None, expected: list[str]) -> None:
    assert visible_devices(mask, FOUR) == expected


def test_mig_instances() -> None:
    gpus = make_gpus("NVIDIA H200", "NVIDIA H200", mig_of=1)
    assert visible_devices(f"{MIG_UUIDS[1]},{MIG_UUIDS[0]}", gpus) == [MIG_UUIDS[1], MIG_UUIDS[0]]
    assert visible_devices(f"MIG-{UUIDS[1]}/7/0", gpus) == [f"MIG-{UUIDS[1]}/7/0"]


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        ("0,4", ["names GPU 4", "GPUs 0 to 3"]),
        ("0,1,0", ["names 0 twice"]),
        ("1,01", ["names 1 twice"]),
        (f"GPU-1f,{UUIDS[2]}", ["one GPU twice", "GPU-1f and GPU-1f2e3d4c-"]),
        ("GPU-8", ["beginning of 2 UUIDs", "more of it"]),
        ("GPU-77", ["GPU-77", "GPU-8932f937, GPU-8a11b2c3, GPU-1f2e3d4c, GPU-5a5a5a5a"]),
        ("GPU-", ["'GPU-'"]),
        (MIG_UUIDS[0], [MIG_UUIDS[0], "no MIG instance"]),
        ("MIG-GPU-77/1/0", ["MIG-GPU-77/1/0", "no MIG instance"]),
        (f"0,{UUIDS[1]}", ["mixes GPU ids and indices"]),
        ("0,-1", ["'-1'", "by index (0,1)"]),
        ("0,,1", ["''"]),
        (",", ["''"]),
        ("0 1", ["'0 1'"]),
        ("0;1", ["'0;1'"]),
        ("cuda:0", ["'cuda:0'"]),
        ("all", ["'all'"]),
        ("1.0", ["'1.0'"]),
        ("+1", ["'+1'"]),
        ("0x1", ["'0x1'"]),
        ("١", ["'١'"]),  # a digit, but not for CUDA
    ],
)
def test_where_cuda_would_silently_cut_the_list_the_mask_is_refused(mask: str, words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        visible_devices(mask, FOUR)
    message = str(caught.value)
    assert message.startswith("CUDA_VISIBLE_DEVICES=")
    assert "\n" not in message
    assert [word for word in words if word not in message] == []


def test_a_machine_with_one_gpu_says_so() -> None:
    with pytest.raises(UsageError, match="names GPU 1, but this machine has GPU 0; "):
        visible_devices("1", make_gpus("NVIDIA H200"))


@pytest.mark.parametrize("mask", ["7,5", "GPU-77,GPU-78", "MIG-77,MIG-78", "MIG-GPU-77/1/0"])
def test_where_nvml_knows_no_gpu_only_the_syntax_counts(mask: str) -> None:
    assert visible_devices(mask, []) == mask.split(",")


@pytest.mark.parametrize("mask", ["7,7", "GPU-77,GPU-77", "x", "0,GPU-77"])
def test_where_nvml_knows_no_gpu_the_syntax_does_count(mask: str) -> None:
    with pytest.raises(UsageError):
        visible_devices(mask, [])


def test_where_nvml_knows_no_gpu_none_is_visible_without_a_mask() -> None:
    assert visible_devices(None, []) == []


def test_each_rank_gets_its_entry() -> None:
    assert [device_of_rank(rank, 4, ["3", "1", "2", "0"]) for rank in range(4)] == ["3", "1", "2", "0"]
    assert device_of_rank(1, 2, ["3", "1", "2", "0"]) == "1"


@pytest.mark.parametrize(
    ("ranks", "devices", "message"),
    [
        (
            4,
            ["0", "1"],
            "4 ranks on this node but 2 GPUs visible (CUDA_VISIBLE_DEVICES=0,1); use --num_gpus 2 or --device cpu",
        ),
        (
            2,
            ["3"],
            "2 ranks on this node but 1 GPU visible (CUDA_VISIBLE_DEVICES=3); use --num_gpus 1 or --device cpu",
        ),
        (2, [], "2 ranks on this node but no GPU visible; use --device cpu"),
    ],
)
def test_more_ranks_than_devices_are_refused_on_every_rank(ranks: int, devices: list[str], message: str) -> None:
    for rank in range(ranks):  # the ranks that would have had a device are no exception
        with pytest.raises(UsageError) as caught:
            device_of_rank(rank, ranks, devices)
        assert str(caught.value) == message


@pytest.mark.parametrize(
    ("entry", "index"),
    [
        ("2", 2),
        (UUIDS[3], 3),
        ("GPU-8a", 1),
        ("GPU-8", None),
        ("4", None),
        (MIG_UUIDS[1], 0),
        (f"MIG-{UUIDS[1]}/7/0", 1),
    ],
)
def test_the_gpu_that_an_entry_names(entry: str, index: int | None) -> None:
    gpu = gpu_of_entry(entry, make_gpus(mig_of=0), None)
    assert (None if gpu is None else gpu.index) == index


def test_cuda_may_count_different_gpus_in_another_order_than_nvml() -> None:
    # CUDA's default is the fastest first: its 0 may well be NVML's 1.
    mixed = make_gpus("NVIDIA T4", "NVIDIA H200")
    for order in (None, "FASTEST_FIRST"):
        assert gpu_of_entry("0", mixed, order) is None
    assert gpu_of_entry("0", mixed, "PCI_BUS_ID") == mixed[0]
    assert gpu_of_entry(UUIDS[1], mixed, None) == mixed[1]


class Nvml(ModuleType):
    """pynvml on a machine with three GPUs: one in order, one that has fallen off the bus, one cut into instances."""

    class NVMLError(Exception):
        pass

    NVML_DEVICE_MIG_ENABLE = 1
    num_open = 0

    def nvmlInit(self) -> None:  # noqa: N802
        self.num_open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.num_open -= 1

    def nvmlSystemGetDriverVersion(self) -> bytes:  # noqa: N802
        return b"580.0"  # bytes in older versions

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 3

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        if index == 1:
            raise self.NVMLError
        return index

    def nvmlDeviceGetPciInfo(self, handle: int) -> Any:  # noqa: N802
        return SimpleNamespace(domain=handle, bus=0xC7, device=0)

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:  # noqa: N802
        if handle == 2:
            raise self.NVMLError
        return SimpleNamespace(total=1 << 34)

    def nvmlDeviceGetUUID(self, handle: int) -> str:  # noqa: N802
        return UUIDS[handle] if handle < 3 else MIG_UUIDS[handle - 10]

    def nvmlDeviceGetName(self, handle: int) -> str:  # noqa: N802
        return "NVIDIA T4" if handle == 0 else "NVIDIA H200"

    def nvmlDeviceGetMigMode(self, handle: int) -> list[int]:  # noqa: N802
        if handle == 0:
            raise self.NVMLError
        return [1, 1]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: int) -> int:  # noqa: N802
        return 3

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: int, index: int) -> int:  # noqa: N802
        if index == 1:  # this place is free
            raise self.NVMLError
        return 10 + index // 2


def test_gpus_are_found_through_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = Nvml("pynvml")
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    first, last = find_gpus()
    assert (first.index, first.uuid, first.name) == (0, UUIDS[0], "NVIDIA T4")
    assert (first.pci_bus_id, first.memory_bytes, first.driver) == ("0000:c7:00.0", 1 << 34, "580.0")
    assert first.mig_uuids == ()
    assert (last.index, last.pci_bus_id, last.memory_bytes) == (2, "0002:c7:00.0", 0)
    assert last.mig_uuids == MIG_UUIDS
    assert describe_gpus() == [
        {"name": "NVIDIA T4", "uuid": UUIDS[0], "memory_bytes": 1 << 34, "driver": "580.0"},
        {"name": "NVIDIA H200", "uuid": UUIDS[2], "memory_bytes": None, "driver": "580.0"},
    ]
    assert nvml.num_open == 0


def test_without_a_driver_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = Nvml("pynvml")

    def refuse() -> None:
        raise nvml.NVMLError

    monkeypatch.setattr(nvml, "nvmlInit", refuse)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert find_gpus() == []
