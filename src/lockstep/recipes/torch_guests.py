"""Recipes for other people's envs in torch: Gymnasium's and EnvPool's, by what kind of action they take."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from lockstep.core.errors import UsageError
from lockstep.core.registry import load
from lockstep.envs.config import GuestConfig, GymnasiumConfig, ThreadedGuestConfig
from lockstep.learn.config import CheckpointConfig, EvaluationConfig, PpoConfig, TrainConfig

UNLIMITED_STEPS = 1000
"""The time limit of an env whose library gives it none: somewhere an evaluation has to end."""


def gymnasium(env_id: str) -> TrainConfig:
    """PPO on an env of Gymnasium."""
    return _recipe("gymnasium", env_id, GymnasiumConfig())


def envpool(env_id: str) -> TrainConfig:
    """PPO on an env of EnvPool."""
    return _recipe("envpool", env_id, ThreadedGuestConfig())


def time_limit_note(config: TrainConfig) -> str:
    """Return in one line that a config's env ends after a number of steps that is a guess of ours; "" where it isn't.

    Args:
        config: whose task is an env of a suite of torch.
    """
    suite, _, env_id = config.task.partition("/")
    if config.env.max_episode_steps != UNLIMITED_STEPS or _load(suite, "time_limit")(env_id, config.env) is not None:
        return ""
    return (
        f"{config.task} has no time limit of its own, so an episode is cut after {UNLIMITED_STEPS} steps; "
        "--env.max_episode_steps N makes it N"
    )


def _recipe(suite: str, env_id: str, env: GuestConfig) -> TrainConfig:
    """Return the settings for the kind of actions that an env has, and the time limit that its library gives it.

    An env that is not to be had without keyword arguments of its own gets the settings for continuous actions: whether
    it is to be had with them is found out once they are known.
    """
    kind = "continuous"
    with suppress(UsageError):
        kind = _load(suite, "make_task")(env_id, env).action_space.kind
    limit = None
    with suppress(UsageError):
        limit = _load(suite, "time_limit")(env_id, env)
    limited = env.model_copy(update={"max_episode_steps": limit or UNLIMITED_STEPS})
    return (_discrete if kind == "discrete" else _continuous)(f"{suite}/{env_id}", limited)


def _load(suite: str, function: str) -> Any:
    return load(f"lockstep.adapters.{suite}.specs:{function}")


def _discrete(name: str, env: GuestConfig) -> TrainConfig:
    """Many short rollouts: classic control learns in seconds.

    A rate that adapts to the KL divergence falls too low once the policy is sure of most of its choices.
    """
    return TrainConfig(
        task=name,
        num_envs=64,
        max_iterations=80,
        env=env,
        agent=PpoConfig(num_steps_per_env=32, schedule="fixed", activation="tanh"),
        evaluation=EvaluationConfig(interval=20, num_episodes=16),
        checkpoints=CheckpointConfig(interval=20),
    )


def _continuous(name: str, env: GuestConfig) -> TrainConfig:
    """What the literature uses for MuJoCo (Schulman et al. 2017): 2048 steps, 10 passes, minibatches of 64.

    1M env steps in all.
    """
    return TrainConfig(
        task=name,
        num_envs=32,
        max_iterations=489,
        env=env,
        agent=PpoConfig(
            num_steps_per_env=64,
            num_mini_batches=32,
            num_learning_epochs=10,
            learning_rate=3e-4,
            schedule="fixed",
            value_loss_coef=0.5,
            max_grad_norm=0.5,
            activation="tanh",
        ),
        evaluation=EvaluationConfig(interval=100, num_episodes=16),
        checkpoints=CheckpointConfig(interval=100),
    )
