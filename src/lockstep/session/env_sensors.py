"""What the sensors of a few envs gave while a trained policy was at work, kept in a file to be looked into."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lockstep.core.config import merge
from lockstep.core.files import replace_atomic
from lockstep.session.make_env import build_env
from lockstep.session.policy import load_policy

if TYPE_CHECKING:
    from lockstep.envs.batch_env import BatchEnv
    from lockstep.session.policy import Policy

NUM_ENVS = 4
MAX_STEPS = 500


def capture_env_sensors(checkpoint: Path, path: Path) -> None:
    """Write what the envs of a policy give, step by step, to a ``.npz`` file.

    The arrays, each ``(num_steps, num_envs, ...)``: ``observations/<group>``, ``sensordata`` (MuJoCo's, of the state
    that the step led to; other people's envs tell none), ``action``, ``done``, and a ``(num_steps, num_envs)`` each
    for ``reward/<term>`` and ``metric/<name>``. There are ``MAX_STEPS`` steps of ``NUM_ENVS`` envs, or one episode
    where that is shorter.

    Args:
        checkpoint: of a run.
        path: of the file.

    Raises:
        UsageError: the policy can't be loaded.
        RunError: the disk refuses.
    """
    policy = load_policy(checkpoint, "cpu")
    # The task is the same in every framework; the CPU's engine starts without compiling.
    settings = {"ml_framework": "torch", "device": "cpu", "engine": "auto"}
    with closing(build_env(merge(policy.config, settings), num_envs=NUM_ENVS, streams="evaluation")) as env:
        steps = list(_steps(policy, env, min(MAX_STEPS, env.config.max_episode_steps)))
    columns = {name: np.stack([step[name] for step in steps]) for name in steps[0]}

    def write(temporary: Path) -> None:
        with temporary.open("wb") as file:  # numpy would add .npz to a name
            np.savez_compressed(file, allow_pickle=False, **columns)

    replace_atomic(path, write)


def _steps(policy: Policy, env: BatchEnv, num_steps: int) -> Iterator[dict[str, np.ndarray]]:
    import torch

    from lockstep.envs.torch_env import TorchEnv

    policy.reset()
    names = [f"reward/{name}" for name in env.task.reward_terms] + [f"metric/{name}" for name in env.task.metric_terms]
    for _ in range(num_steps):
        observations = {name: group.numpy() for name, group in env.observations.items()}
        action = torch.as_tensor(np.asarray(policy(observations)).copy())
        transition = env.step(action)
        policy.reset(transition.done)
        yield {
            **{f"observations/{name}": group for name, group in observations.items()},
            **({"sensordata": env.state.sensordata.numpy()} if isinstance(env, TorchEnv) else {}),
            "action": action.numpy(),
            "done": transition.done.numpy(),
            **{name: transition.terms[:, index].numpy() for index, name in enumerate(names)},
        }
