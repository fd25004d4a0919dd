"""Recipes of the cart-poles: everything that makes each of them learn fast on a few CPU cores."""

from lockstep.learn.config import CheckpointConfig, EvaluationConfig, PpoConfig, TrainConfig
from lockstep.tasks.cartpole_balance.config import CartpoleBalanceConfig
from lockstep.tasks.cartpole_classic.config import CartpoleClassicConfig
from lockstep.tasks.cartpole_swingup.config import CartpoleSwingupConfig


def cartpole_classic() -> TrainConfig:
    """The toy: learns in seconds."""
    return TrainConfig(
        task="cartpole_classic",
        num_envs=1024,
        max_iterations=60,
        env=CartpoleClassicConfig(),
        agent=PpoConfig(num_steps_per_env=16),
        evaluation=EvaluationConfig(interval=20, num_episodes=64),
        checkpoints=CheckpointConfig(interval=20),
    )


def cartpole_balance() -> TrainConfig:
    """Balance in MuJoCo."""
    return TrainConfig(
        task="cartpole_balance",
        num_envs=512,
        max_iterations=60,
        env=CartpoleBalanceConfig(),
        agent=PpoConfig(num_steps_per_env=32),
        evaluation=EvaluationConfig(interval=20, num_episodes=64),
        checkpoints=CheckpointConfig(interval=20),
    )


def cartpole_swingup() -> TrainConfig:
    """Swing-up in MuJoCo."""
    return TrainConfig(
        task="cartpole_swingup",
        num_envs=512,
        max_iterations=200,
        env=CartpoleSwingupConfig(),
        agent=PpoConfig(num_steps_per_env=32),
        evaluation=EvaluationConfig(interval=50, num_episodes=64),
        checkpoints=CheckpointConfig(interval=50),
    )
