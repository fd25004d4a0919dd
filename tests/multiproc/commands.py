"""Running the command line as a user does: a process of its own, with few envs so that it is quick."""

import os
import subprocess
import sys
from pathlib import Path

SMALL = (
    "--num_envs", "16", "--agent.num_steps_per_env", "8", "--agent.num_learning_epochs", "2",
    "--agent.actor_hidden_dims", "16", "--agent.critic_hidden_dims", "16", "--agent.recurrent_hidden_dim", "8",
    "--evaluation.interval", "0", "--logger", "none", "--device", "cpu",
)  # fmt: skip


def lockstep(*arguments: str, timeout_s: float = 120.0, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``lockstep`` with the arguments to its end."""
    return subprocess.run(
        [sys.executable, "-m", "lockstep", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=os.environ | environment,
        check=False,
    )


def train_small(task: str, *arguments: str) -> Path:
    """Train with few envs in ``logs``; return the run directory, which must be the only one of its task."""
    finished = lockstep("train", task, *SMALL, *arguments)
    assert finished.returncode == 0, finished.stderr
    return only_run(task)


def only_run(task: str) -> Path:
    """Return the one run directory of a task below ``logs``."""
    (run,) = [path for path in Path("logs", task).iterdir() if not path.name.startswith(".")]
    return run
