"""Envs that can't be saved begin new episodes where a run goes on: no policy remembers anything of the old ones."""

from typing import Any

import pytest
import torch

from lockstep.distributed.torch_comm import SoloComm
from lockstep.session.make_config import make_config
from lockstep.session.make_env import build_share
from lockstep.session.runner import SessionRunner, make_runner
from tests.unit.guest_fixtures import counting as counting
from tests.unit.learner_fixtures import round_trip


def memories(training: Any) -> list[torch.Tensor]:
    """Return what actor and critic remember of each env."""
    if training.config.rl_library == "rsl_rl":
        found: dict[str, torch.Tensor] = training.learner._memory()
        return [*found.values()]
    return [*training.memory]


@pytest.mark.parametrize("kind", ["gru", "lstm"])
@pytest.mark.parametrize("library", ["lockstep", "rsl_rl"])
def test_nothing_is_remembered_of_episodes_that_are_no_more(library: str, kind: str, counting: str) -> None:
    small = {"actor_hidden_dims": (8,), "critic_hidden_dims": (8,), "num_steps_per_env": 5, "num_mini_batches": 2}
    memory = {"recurrent": kind, "recurrent_hidden_dim": 6}
    config = make_config(
        counting, rl_library=library, device="cpu", num_envs=4, agent=small | memory, env={"vectorization": "sync"}
    )

    def new() -> SessionRunner:
        return make_runner(config, build_share(config, (4,), 0), SoloComm())

    training: Any = new()
    training.iterate()
    assert len(memories(training)) == 2 and all(memory.abs().max() > 0 for memory in memories(training))
    resumed: Any = new()
    resumed.load_state_dict(round_trip(training.state_dict()), "model_1.pt")
    assert all(memory.shape[-1] == 6 and not memory.any() for memory in memories(resumed))
    resumed.iterate()
