"""Benchmarks on a GPU: which one it was, what it used, and how long exchanges took there."""

from pathlib import Path

import pytest
import torch

from lockstep.benchmark.bundle import read_bundle
from lockstep.cli.main import main
from lockstep.core.gpu_mask import find_gpus

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU that torch can use"),
]

SMALL = ("cartpole_classic", "--device", "cuda", "--num_envs", "512", "--warm_up", "2", "--iterations", "10")


@pytest.mark.parametrize("kind", ["training", "runtime"])
def test_what_a_gpu_did_is_told_of_the_right_one(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["benchmark", kind, *SMALL, "--output", "b.json"]) == 0
    bundle = read_bundle(Path("b.json"))
    (rank,) = bundle.ranks
    assert bundle.gpu_measurement_scope == "own_device"
    assert rank.device.startswith("cuda")
    assert rank.gpu_uuid in {gpu.uuid for gpu in find_gpus()}
    assert rank.gpu_uuid in {gpu.uuid for gpu in bundle.hardware[0].gpus}
    assert rank.gpu_memory_bytes is not None and rank.gpu_memory_bytes.mean > 2**20
    assert {each.kind for each in bundle.resources} == {"gpu", "cpu"}
    assert bundle.versions.driver is not None and bundle.versions.cuda is not None


def test_a_start_on_a_gpu_is_the_childs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("cartpole_classic", "--device", "cuda", "--num_envs", "64", "--repetitions", "1", "--output", "b.json")
    assert main(["benchmark", "startup", *words]) == 0
    bundle = read_bundle(Path("b.json"))
    assert bundle.ranks[0].device.startswith("cuda")
    assert bundle.ranks[0].gpu_uuid is not None
    assert bundle.gpu_measurement_scope == "not_measured"
