"""Rows of envs as bytes: whatever a tensor's memory looks like."""

import numpy as np
import pytest
import torch

from lockstep.distributed.torch_comm import SoloComm
from lockstep.learn.torch import sharding

CPU = torch.device("cpu")
LAYOUTS = {
    "none of numpy's": torch.from_numpy(np.zeros(0, dtype=np.int32)),
    "none of numpy's, wide": torch.from_numpy(np.zeros((0, 3), dtype=np.float64)),
    "none, expanded": torch.tensor(3).expand(0),
    "none of a part": torch.zeros(4, 3)[:0, 0],
    "rows of nothing": torch.zeros(2, 0),
    "one, expanded": torch.tensor(3).expand(1),
    "one of a column": torch.arange(12.0).reshape(4, 3)[:1, 1],
    "one of a column of numpy's": torch.from_numpy(np.arange(12).reshape(4, 3)[2:3, 1]),
    "several of a column": torch.arange(12).reshape(4, 3)[:, 1],
    "several, turned round": torch.arange(6.0).reshape(3, 2).t(),
    "several alike": torch.tensor([True]).expand(5),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_of_any_layout_travel(layout: str) -> None:
    rows = LAYOUTS[layout]
    nest = {"env": {"rows": rows}}

    gathered = sharding.gather(nest, SoloComm(), CPU)["env"]["rows"]
    dealt = sharding.deal(nest, nest, rows.shape[0], 0, SoloComm(), CPU)["env"]["rows"]

    for arrived in (gathered, dealt):
        assert (arrived.dtype, arrived.shape) == (rows.dtype, rows.shape)
        assert torch.equal(arrived, rows)
