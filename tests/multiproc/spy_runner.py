"""A runner that learns nothing: it notes, for each rank, what the session has prepared for it.

Tests copy it into the working folder and name it as a user would: ``--runner spy_runner:Spy``.
"""

import json
import random
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn

from lockstep.core.types import Comm
from lockstep.distributed import DistributedMixin
from lockstep.envs.torch_env import TorchEnv
from lockstep.learn.config import TrainConfig
from lockstep.learn.torch.loop import Observer, Status


def draws() -> dict[str, Any]:
    """Return what the generators that are not lockstep's own give next, which is too much to agree by chance."""
    return {
        "python": random.getrandbits(64),
        "numpy": numpy.random.random(2).tolist(),  # noqa: NPY002 - the global generator is meant
        "torch": torch.rand(2, dtype=torch.float64).tolist(),
        "torch seed": torch.initial_seed(),
    }


class Spy(DistributedMixin):
    def __init__(self, config: TrainConfig, env: TorchEnv, comm: Comm) -> None:
        self.drawn = draws()  # before lockstep gives this rank anything of rank 0's
        self.env, self.comm = env, comm
        self.model = nn.Linear(1, 1)

    def train(self, observer: Observer, evaluation_env: TorchEnv | None) -> Status:
        assert evaluation_env is not None
        found = {
            "draws": self.drawn,
            "env_ids": self.env.env_ids.tolist(),
            "evaluation_env_ids": evaluation_env.env_ids.tolist(),
        }
        Path(f"spy_{self.comm.rank}.json").write_text(json.dumps(found))
        return "finished"
