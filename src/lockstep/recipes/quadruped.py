"""Recipes of the quadruped."""

from lockstep.learn.config import CheckpointConfig, EvaluationConfig, PpoConfig, TrainConfig
from lockstep.tasks.quadruped_velocity_flat.config import QuadrupedVelocityFlatConfig


def quadruped_velocity_flat() -> TrainConfig:
    """Walking on flat ground: half an hour on two CPU cores."""
    return TrainConfig(
        task="quadruped_velocity_flat",
        num_envs=1024,
        max_iterations=1300,
        env=QuadrupedVelocityFlatConfig(),
        agent=PpoConfig(
            num_steps_per_env=24,
            actor_hidden_dims=(128, 128),
            critic_hidden_dims=(128, 128),
            entropy_coef=0.005,
        ),
        evaluation=EvaluationConfig(interval=100, num_episodes=128),
        checkpoints=CheckpointConfig(interval=100),
    )
