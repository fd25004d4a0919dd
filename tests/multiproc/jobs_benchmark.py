"""What the ranks of a pool do in the tests of benchmarks with torch."""

import dataclasses
from contextlib import ExitStack, nullcontext
from typing import Any

import numpy as np

from lockstep.benchmark.runtime.steps import time_steps
from lockstep.core.types import Comm
from lockstep.session.framework import Team
from lockstep.session.torch_session import TORCH
from tests.multiproc.jobs_training import config_of


def runtime(comm: Comm, settings: dict[str, Any], task: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return what this rank measures in 1 + 4 iterations, and its envs after them."""
    team, config = Team(comm, [], "", "cpu"), config_of(settings, task)
    with ExitStack() as resources:
        own = TORCH.make_stepper(config, team, resources)
        measured = time_steps(own, comm, config.agent.num_steps_per_env, 1, 4, nullcontext())
        stepper = TORCH.make_stepper(config, team, resources)
        for _ in range(5):
            stepper.step(config.agent.num_steps_per_env)
        return dataclasses.asdict(measured), stepper.states()
