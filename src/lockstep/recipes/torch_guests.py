"""Recipes for other people's envs in torch: Gymnasium's and EnvPool's, by what kind of action they take."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.core.registry import load
from lockstep.envs.config import GuestConfig, GymnasiumConfig, ThreadedGuestConfig
from lockstep.learn.config import CheckpointConfig, EvaluationConfig, PpoConfig, TrainConfig

if TYPE_CHECKING:
    from lockstep.envs.guest_task import GuestTask

_UNLIMITED_STEPS = 1000
"""The time limit of an env whose library gives it none: somewhere an evaluation has to end."""


def gymnasium(env_id: str) -> TrainConfig:
    """PPO on an env of Gymnasium."""
    limit = load("lockstep.adapters.gymnasium.specs:spec_of")(env_id).max_episode_steps
    env = GymnasiumConfig(max_episode_steps=limit or _UNLIMITED_STEPS)
    return _recipe(f"gymnasium/{env_id}", env, load("lockstep.adapters.gymnasium.specs:make_task")(env_id, env))


def envpool(env_id: str) -> TrainConfig:
    """PPO on an env of EnvPool."""
    limit = load("lockstep.adapters.envpool.specs:facts_of")(env_id, {}).max_episode_steps
    # EnvPool writes the largest int32 where there is no limit.
    env = ThreadedGuestConfig(max_episode_steps=limit if 0 < limit < 10**6 else _UNLIMITED_STEPS)
    return _recipe(f"envpool/{env_id}", env, load("lockstep.adapters.envpool.specs:make_task")(env_id, env))


def _recipe(name: str, env: GuestConfig, task: GuestTask) -> TrainConfig:
    if task.action_space.kind == "discrete":
        return _discrete(name, env)
    return _continuous(name, env)


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
