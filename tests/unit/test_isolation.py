"""One GPU for each rank, before anything can touch CUDA."""

import ctypes
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lockstep.core.errors import UsageError
from lockstep.core.gpu_mask import Gpu
from lockstep.distributed import isolation, kernel_caches
from lockstep.distributed.isolation import Machine, given_gpu, has_gpu_files, isolate, placement_problem
from lockstep.session.make_env import resolve_device
from tests.unit.gpu_fixtures import (
    MIG_UUIDS,
    UUIDS,
    make_gpus,
    rank_environment,
)


@pytest.fixture(autouse=True)
def _caches_let_go(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    held: list[int] = []
    monkeypatch.setattr(kernel_caches, "_held", held)
    yield
    for descriptor in held:
        os.close(descriptor)


def machine(gpus: list[Gpu] | None = None, **changes: Any) -> Machine:
    """Return a machine with four GPUs, no EGL, and a process that has imported nothing."""
    found = make_gpus() if gpus is None else gpus
    defaults: dict[str, Any] = {
        "find_gpus": lambda: found,
        "has_gpu_files": lambda: bool(found),
        "egl_uuids": list,
        "cuda_is_initialised": lambda: False,
        "modules": {},
    }
    return Machine(**(defaults | changes))


def isolated(folder: Path, on: Machine | None = None, /, **changes: str) -> dict[str, str]:
    """Return a rank's variables after its isolation; this process stays on all its cores."""
    environment = rank_environment(folder, LOCKSTEP_PIN="0", **changes)
    isolate(environment, on or machine())
    return environment


@pytest.mark.parametrize(
    ("mask", "by_local_rank"),
    [
        (None, ["0", "1", "2", "3"]),
        ("3,1,2,0", ["3", "1", "2", "0"]),
        ("1,3", ["1", "3"]),
        (f"{UUIDS[3]},{UUIDS[0]}", [UUIDS[3], UUIDS[0]]),
        ("GPU-5a,GPU-1f,GPU-8a", ["GPU-5a", "GPU-1f", "GPU-8a"]),
    ],
)
def test_each_rank_sees_its_own_entry_alone(tmp_path: Path, mask: str | None, by_local_rank: list[str]) -> None:
    changes = {} if mask is None else {"CUDA_VISIBLE_DEVICES": mask}
    for local_rank, entry in enumerate(by_local_rank):
        environment = isolated(
            tmp_path,
            RANK=str(4 + local_rank),  # on the second node the rank within the job is another number
            LOCAL_RANK=str(local_rank),
            LOCAL_WORLD_SIZE=str(len(by_local_rank)),
            **changes,
        )
        assert environment["CUDA_VISIBLE_DEVICES"] == entry
        assert environment["LOCKSTEP_DEVICE"] == entry
        assert given_gpu(environment) == entry
        assert placement_problem(environment) is None


def test_mig_instances_are_devices_like_any_other(tmp_path: Path) -> None:
    on = machine(make_gpus("NVIDIA H200", "NVIDIA H200", mig_of=1))
    for local_rank in (0, 1):
        environment = isolated(
            tmp_path,
            on,
            LOCAL_RANK=str(local_rank),
            LOCAL_WORLD_SIZE="2",
            CUDA_VISIBLE_DEVICES=",".join(MIG_UUIDS),
        )
        assert environment["CUDA_VISIBLE_DEVICES"] == MIG_UUIDS[local_rank]
        assert environment["QD_VISIBLE_DEVICE"] == "1"  # the GPU that is cut up


def test_one_process_keeps_its_environment() -> None:
    for environment in ({}, {"RANK": "0", "WORLD_SIZE": "1", "CUDA_VISIBLE_DEVICES": "2,3"}):
        before = dict(environment)
        isolate(environment, machine())
        assert environment == before


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        ("0,1", "4 ranks on this node but 2 GPUs visible (CUDA_VISIBLE_DEVICES=0,1); use --num_gpus 2 or --device cpu"),
        ("0,1,2,9", "names GPU 9"),
        ("0,1,2,2", "names 2 twice"),
        ("0,1,2,x", "'x'"),
    ],
)
def test_a_placement_that_cannot_be_right_is_refused_when_a_gpu_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mask: str, words: str
) -> None:
    environment = isolated(tmp_path, CUDA_VISIBLE_DEVICES=mask)  # raises nothing: the rank may want the CPU
    assert environment["CUDA_VISIBLE_DEVICES"] == ""
    assert environment["LOCKSTEP_DEVICE"] == "none"
    assert given_gpu(environment) is None
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    for device in ("auto", "cuda", "cuda:0"):
        with pytest.raises(UsageError) as caught:
            resolve_device(device)
        assert words in str(caught.value)
    assert resolve_device("cpu") == torch.device("cpu")


def test_a_gpu_that_torch_cannot_use_is_no_reason_to_compute_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in isolated(tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(UsageError, match="this rank has GPU 1, which torch can't use"):
        resolve_device("auto")
    monkeypatch.setattr(torch.version, "cuda", None)  # a torch for CPUs only is what the user installed
    assert resolve_device("auto") == torch.device("cpu")


@pytest.mark.parametrize("mask", ["", "-1", "NoDevFiles"])
def test_who_hides_all_gpus_gets_the_cpu(tmp_path: Path, mask: str) -> None:
    environment = isolated(tmp_path, CUDA_VISIBLE_DEVICES=mask)
    assert (environment["CUDA_VISIBLE_DEVICES"], environment["LOCKSTEP_DEVICE"]) == ("", "cpu")
    assert placement_problem(environment) is None


def test_the_launchers_word_for_the_cpu_is_obeyed_without_a_look_at_gpus(tmp_path: Path) -> None:
    def fail() -> list[Gpu]:
        raise AssertionError("nobody should ask")

    on = machine(find_gpus=fail, modules={"torch": SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: True))})
    environment = isolated(tmp_path, on, LOCKSTEP_DEVICE="cpu", CUDA_VISIBLE_DEVICES="0,1,nonsense")
    assert (environment["CUDA_VISIBLE_DEVICES"], environment["LOCKSTEP_DEVICE"]) == ("", "cpu")
    assert placement_problem(environment) is None


def test_a_machine_without_gpus_computes_on_the_cpu(tmp_path: Path) -> None:
    environment = isolated(tmp_path, machine([]), CUDA_VISIBLE_DEVICES="0")
    assert (environment["CUDA_VISIBLE_DEVICES"], environment["LOCKSTEP_DEVICE"]) == ("", "cpu")
    assert "QD_VISIBLE_DEVICE" not in environment
    assert placement_problem(environment) is None


def test_gpus_that_nvml_does_not_list_must_be_named(tmp_path: Path) -> None:
    on = machine([], has_gpu_files=lambda: True)
    problem = placement_problem(isolated(tmp_path, on))
    assert problem is not None
    assert "name the GPUs in CUDA_VISIBLE_DEVICES" in problem
    environment = isolated(tmp_path, on, CUDA_VISIBLE_DEVICES="4,5,6,7")
    assert environment["CUDA_VISIBLE_DEVICES"] == "5"
    assert "QD_VISIBLE_DEVICE" not in environment  # which GPU that is nobody knows


def test_gpus_are_noticed_by_their_files(tmp_path: Path) -> None:
    (tmp_path / "nvidia-caps").mkdir()
    assert not has_gpu_files(tmp_path)
    (tmp_path / "nvidia0").touch()
    assert has_gpu_files(tmp_path)


def test_the_second_time_nothing_happens(tmp_path: Path) -> None:
    environment = isolated(tmp_path, CUDA_VISIBLE_DEVICES="3,1,2,0")
    before = dict(environment)
    isolate(environment, machine(cuda_is_initialised=lambda: True))  # which is right by now
    assert environment == before


@pytest.mark.parametrize("change", [{"TORCHELASTIC_RUN_ID": "b"}, {"MASTER_PORT": "29512"}, {"RANK": "6"}])
def test_a_job_inside_a_rank_does_not_put_all_its_ranks_on_that_ranks_gpu(
    tmp_path: Path, change: dict[str, str]
) -> None:
    environment = isolated(tmp_path) | change
    assert placement_problem(environment) is None
    isolate(environment, machine())
    assert placement_problem(environment) == (
        "4 ranks on this node but 1 GPU visible (CUDA_VISIBLE_DEVICES=1); use --num_gpus 1 or --device cpu"
    )
    # One rank on it is fine, and what was wrong before is forgotten.
    environment |= {"CUDA_VISIBLE_DEVICES": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    isolate(environment, machine())
    assert environment["CUDA_VISIBLE_DEVICES"] == "1"
    assert placement_problem(environment) is None


@pytest.mark.parametrize(
    ("order", "mask", "expected"),
    [
        (None, None, None),
        ("PCI_BUS_ID", None, "1"),
        (None, f"{UUIDS[1]},{UUIDS[0]}", "0"),
    ],
)
def test_simulators_get_nvmls_index_where_it_is_known(
    tmp_path: Path, order: str | None, mask: str | None, expected: str | None
) -> None:
    changes = {} if order is None else {"CUDA_DEVICE_ORDER": order}
    changes |= {} if mask is None else {"CUDA_VISIBLE_DEVICES": mask}
    on = machine(make_gpus("NVIDIA T4", "NVIDIA H200"))
    environment = isolated(tmp_path, on, LOCAL_WORLD_SIZE="2", **changes)
    assert environment.get("QD_VISIBLE_DEVICE") == environment.get("TI_VISIBLE_DEVICE") == expected


def test_renderers_get_egls_position_of_the_gpu(tmp_path: Path) -> None:
    # EGL lists the GPUs in an order of its own, and a software renderer without a UUID among them.
    on = machine(egl_uuids=lambda: [UUIDS[3], None, UUIDS[1], UUIDS[0], UUIDS[2]])
    environment = isolated(tmp_path, on)
    assert environment["CUDA_VISIBLE_DEVICES"] == "1"
    assert environment["MUJOCO_EGL_DEVICE_ID"] == environment["EGL_DEVICE_ID"] == "2"


@pytest.mark.parametrize(("uuids", "mujoco", "others"), [([], "7", "7"), ([None] * 10 + [UUIDS[1]], "7", "10")])
def test_renderers_are_left_alone_where_they_could_not_find_it(
    tmp_path: Path, uuids: list[str | None], mujoco: str, others: str
) -> None:
    on = machine(egl_uuids=lambda: uuids)
    environment = isolated(tmp_path, on, MUJOCO_EGL_DEVICE_ID="7", EGL_DEVICE_ID="7")
    assert (environment["MUJOCO_EGL_DEVICE_ID"], environment["EGL_DEVICE_ID"]) == (mujoco, others)


def torch_module(initialised: bool) -> Any:
    return SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: initialised))


class TestImportOrder:
    @pytest.mark.parametrize(
        ("user", "changes"),
        [
            ("torch", {"modules": {"torch": torch_module(True)}}),
            ("jax", {"modules": {"jax._src.xla_bridge": SimpleNamespace(_backends={"cpu": 1, "cuda": 2})}}),
            ("warp", {"modules": {"warp._src.context": SimpleNamespace(runtime=SimpleNamespace(cuda_devices=[0]))}}),
            ("warp", {"modules": {"warp.context": SimpleNamespace(runtime=SimpleNamespace(cuda_devices=[0]))}}),
            # torch.cuda.is_available() initialises the driver but not what torch calls CUDA.
            ("an imported library", {"modules": {"torch": torch_module(False)}, "cuda_is_initialised": lambda: True}),
        ],
    )
    def test_cuda_that_is_initialised_is_an_error(self, tmp_path: Path, user: str, changes: dict[str, Any]) -> None:
        environment = rank_environment(tmp_path, LOCKSTEP_PIN="0")
        before = dict(environment)
        with pytest.raises(UsageError) as caught:
            isolate(environment, machine(**changes))
        assert str(caught.value) == (
            f"{user} has initialised CUDA, which can't be given this rank's own GPU any more; import lockstep before "
            "anything that uses CUDA"
        )
        assert environment == before  # the next attempt says the same

    @pytest.mark.parametrize(
        "modules",
        [
            {"torch": torch_module(False)},
            {"torch": None},  # an import that is going on
            {"jax": 1, "jax._src.xla_bridge": SimpleNamespace(_backends={"cpu": 1})},
            {"warp": 1, "warp._src.context": SimpleNamespace(runtime=None)},
            {"warp": 1, "warp._src.context": SimpleNamespace(runtime=SimpleNamespace(cuda_devices=[]))},
            {"genesis": 1},
            {"mujoco": 1, "mujoco.egl": 1},
        ],
    )
    def test_cuda_untouched_is_a_warning_of_one_line(self, tmp_path: Path, modules: dict[str, Any]) -> None:
        with pytest.warns(UserWarning) as caught:
            environment = isolated(tmp_path, machine(modules=modules))
        (warning,) = caught
        assert next(iter(modules)) in str(warning.message)
        assert "\n" not in str(warning.message)
        assert environment["CUDA_VISIBLE_DEVICES"] == "1"

    @pytest.mark.parametrize(
        ("modules", "gpus", "changes"),
        [
            ({"numpy": 1, "mujoco": 1}, make_gpus(), {}),
            ({"torch": torch_module(False)}, [], {}),  # no GPU to be wrong about
            # What CUDA saw is what it should see.
            ({"torch": torch_module(True)}, make_gpus(), {"CUDA_VISIBLE_DEVICES": "1", "WORLD_SIZE": "8"}),
        ],
    )
    def test_there_is_nothing_to_say(
        self, tmp_path: Path, modules: dict[str, Any], gpus: list[Gpu], changes: dict[str, str]
    ) -> None:
        if changes:
            changes = changes | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            isolated(tmp_path, machine(gpus, modules=modules), **changes)


@pytest.mark.parametrize(("answer_of_cuda", "expected"), [(0, True), (3, False)])
def test_the_driver_is_asked_whether_it_is_initialised(
    monkeypatch: pytest.MonkeyPatch, answer_of_cuda: int, expected: bool
) -> None:
    asked: list[tuple[str, int]] = []

    def load(name: str, mode: int) -> Any:
        asked.append((name, mode))
        return SimpleNamespace(cuDeviceGetCount=lambda count: answer_of_cuda)

    monkeypatch.setattr(ctypes, "CDLL", load)
    assert isolation.cuda_is_initialised() is expected
    ((name, mode),) = asked
    assert name == "libcuda.so.1"
    assert mode & os.RTLD_NOLOAD  # a driver that nobody has loaded stays so


def test_without_a_driver_nothing_is_initialised() -> None:
    if has_gpu_files():
        pytest.skip("this machine has a driver")
    assert not isolation.cuda_is_initialised()


def test_nothing_of_this_test_reached_its_own_process() -> None:
    assert "LOCKSTEP_ISOLATED" not in os.environ
    assert "torch" in sys.modules
