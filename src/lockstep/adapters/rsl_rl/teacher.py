"""The teacher of a distillation: the actor of a run of rsl_rl's PPO, read on rank 0 and sent to all."""

from pathlib import Path
from typing import Any, NamedTuple

from lockstep.core.errors import UsageError
from lockstep.core.run_directory import latest_checkpoint
from lockstep.core.types import Comm
from lockstep.distributed.torch_state import broadcast_value
from lockstep.learn.agent_config import DistillationConfig
from lockstep.learn.config import TrainConfig
from lockstep.learn.resuming import require_task
from lockstep.learn.torch import checkpoint


class Teacher(NamedTuple):
    """An actor of RSL-RL, or why there is none."""

    settings: dict[str, Any]
    """Its class and arguments."""
    groups: list[str]
    """The observation groups that it looks at."""
    weights: dict[str, Any]
    problem: str = ""
    """In one line; "" if there is none."""


def read_teacher(config: TrainConfig, comm: Comm) -> Teacher:
    """Return what ``agent.teacher`` names, the same on every rank; only rank 0 needs the file.

    A training that goes on has its teacher in its own checkpoint, so one that can't be read is no error yet.
    """
    found: list[Teacher] = []

    def read() -> str:
        try:
            found.append(_read(config))
        except UsageError as error:
            return str(error)
        return ""

    problem = comm.on_main(read, "teacher")
    if problem:
        return Teacher({}, [], {}, problem)
    return Teacher(*broadcast_value(list(next(iter(found), ())), comm=comm))


def _read(config: TrainConfig) -> Teacher:
    named = config.agent_as(DistillationConfig).teacher
    if not named:
        raise UsageError(
            "algorithm distillation needs a teacher; name a run or a checkpoint of rl_library rsl_rl with "
            "--agent.teacher PATH"
        )
    path = Path(named)
    try:
        if path.is_dir():
            path = latest_checkpoint(path)
        content = checkpoint.load(path)
        require_task(content, config.task, path)
    except UsageError as error:
        raise UsageError(f"agent.teacher: {error}") from None
    made_by = content["config"]
    if (made_by.get("rl_library"), made_by.get("algorithm")) != ("rsl_rl", "ppo"):
        raise UsageError(
            f"agent.teacher {named} is a policy of rl_library {made_by.get('rl_library', 'lockstep')}, algorithm "
            f"{made_by.get('algorithm', 'ppo')}; a teacher is one of rl_library rsl_rl, algorithm ppo"
        )
    state = content["state"]
    return Teacher(
        state["settings"]["actor"], state["settings"]["obs_groups"]["actor"], state["algorithm"]["actor_state_dict"]
    )
