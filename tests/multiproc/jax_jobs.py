"""Trainings with JAX as a user starts them, small enough that compiling takes most of their time."""

import shutil
from pathlib import Path
from typing import Any

from lockstep.session import train as session
from lockstep.session.make_config import make_config
from tests.multiproc.commands import attempts_of, lockstep, only_run

TASK = "cartpole_classic"
JAX = (
    "--ml_framework",
    "jax",
    "--device",
    "cpu",
    "--dtype",
    "float64",
    "--logger",
    "none",
    "--evaluation.interval",
    "0",
)
PPO = (
    TASK, *JAX, "--total_envs", "32", "--agent.num_steps_per_env", "8", "--agent.num_learning_epochs", "2",
    "--agent.actor_hidden_dims", "16", "--agent.critic_hidden_dims", "16", "--agent.schedule", "fixed",
    "--env.max_episode_steps", "20", "--checkpoints.interval", "19",
)  # fmt: skip
OWN = (
    TASK, *JAX, "--total_envs", "32", "--agent.num_steps_per_env", "8", "--env.max_episode_steps", "20",
    "--env.action_kind", "discrete", "--runner", "own_jax_algorithm:Algorithm", "--checkpoints.interval", "2",
)  # fmt: skip
FIVE_ITERATIONS: dict[str, Any] = {
    "ml_framework": "jax", "device": "cpu", "dtype": "float64", "max_iterations": 5,
    "logger": "none", "evaluation": {"interval": 0}, "env": {"max_episode_steps": 20},
}  # fmt: skip
"""What ``make_config`` takes, but for the algorithm and the envs of each rank."""
_SMALL = {"num_steps_per_env": 4, "actor_hidden_dims": (16,), "critic_hidden_dims": (16,)}
SAC = FIVE_ITERATIONS | {
    "algorithm": "sac",
    "agent": _SMALL | {"num_updates": 3, "batch_size": 32, "replay_size": 1024, "learning_starts": 100},
}
"""16 envs of all ranks learn from the second iteration on."""
ADAPTIVE = FIVE_ITERATIONS | {"agent": _SMALL | {"schedule": "adaptive", "desired_kl": 1e-4}}
"""PPO whose rate changes."""
EXAMPLE = Path(__file__).parents[2] / "examples" / "own_jax_algorithm.py"
TIMEOUT_S = 240.0


def with_example() -> None:
    """Put the example of an algorithm into the current folder, where ``OWN`` finds it."""
    shutil.copy(EXAMPLE, EXAMPLE.name)


def train(*arguments: str) -> Path:
    """Train in one process to the end; return the one run directory."""
    done = lockstep("train", *arguments, timeout_s=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    return only_run(TASK)


def train_here(**settings: Any) -> Path:
    """Train in this process, on as many of its devices as is said; return the run directory."""
    return session.train(make_config(TASK, **settings)).run_path


def ranks_of(run: Path) -> list[tuple[int, int, str]]:
    """Return rank, process and device of every rank of the newest attempt."""
    return [(rank["rank"], rank["process"], rank["device"]) for rank in attempts_of(run)[-1]["ranks"]]


def pid_of(run: Path, process: int) -> int:
    """Return the id of one of the processes of the newest attempt."""
    return int(next(rank["pid"] for rank in attempts_of(run)[-1]["ranks"] if rank["process"] == process))
