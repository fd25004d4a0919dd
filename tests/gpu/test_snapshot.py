"""Checkpoints of tensors on a GPU: copies that are only queued hold what was there when they were asked for."""

from pathlib import Path

import pytest
import torch

from lockstep.learn.torch.checkpoint import snapshot

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU that torch can use"),
]

NUM_MIB = 256


def test_a_snapshot_holds_what_was_there_though_the_gpu_works_on(tmp_path: Path) -> None:
    weights = torch.arange(NUM_MIB * 2**18, dtype=torch.float32, device="cuda").reshape(NUM_MIB, -1)
    expected = weights.cpu()
    torch.cuda.synchronize()
    busy = torch.randn(4096, 4096, device="cuda")
    for _ in range(50):
        busy = busy @ busy / 64.0  # so that the copy has to wait for its turn
    write = snapshot({"weights": weights, "view": weights[3], "on the CPU": torch.ones(2)})
    weights.zero_()
    write(tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=True)
    assert all(tensor.device.type == "cpu" for tensor in loaded.values())
    assert torch.equal(loaded["weights"], expected)
    assert torch.equal(loaded["view"], expected[3])
