"""Recipes for other people's envs in JAX: Brax's, gymnax's and MuJoCo Playground's, for PPO and for SAC.

The time limit is what the library gives an env; to ask the library for it here would be too early: it would occupy
JAX's devices before the processes of a job have met.
"""

from lockstep.envs.config import BraxConfig, JaxGuestConfig, PlaygroundConfig
from lockstep.learn.config import CheckpointConfig, EvaluationConfig, PpoConfig, SacConfig, TrainConfig

_EVALUATION = EvaluationConfig(interval=50, num_episodes=32)
_CHECKPOINTS = CheckpointConfig(interval=50)

# Brax's own training of ant (github.com/google/brax, notebooks/training.ipynb) takes 50M steps of 4096 envs with this
# discount, rate, weight of the entropy and number of passes; here are fewer envs, for a machine without a GPU.
_BRAX = PpoConfig(
    num_steps_per_env=20,
    num_mini_batches=8,
    num_learning_epochs=4,
    learning_rate=3e-4,
    gamma=0.97,
    entropy_coef=0.01,
    actor_hidden_dims=(128, 128),
    critic_hidden_dims=(128, 128),
    activation="silu",
)

# Playground's own config of its control suite (mujoco_playground/config/dm_control_suite_params.py) has this discount,
# rate, weight of the entropy and length of rollouts, for 2048 envs and 16 passes.
_PLAYGROUND = PpoConfig(
    num_steps_per_env=30,
    num_mini_batches=8,
    num_learning_epochs=8,
    learning_rate=1e-3,
    gamma=0.995,
    entropy_coef=0.01,
    actor_hidden_dims=(128, 128),
    critic_hidden_dims=(128, 128),
    activation="silu",
)

# A rate that adapts to the KL divergence falls too low once a policy is sure of most of its choices.
_GYMNAX = PpoConfig(num_steps_per_env=32, schedule="fixed", activation="tanh")

_SAC = SacConfig(
    num_steps_per_env=8,
    num_updates=32,
    batch_size=256,
    replay_size=1_000_000,
    learning_starts=8_192,
    learning_rate=6e-4,
    temperature_learning_rate=6e-4,
    actor_hidden_dims=(256, 256),
    critic_hidden_dims=(256, 256),
)


def brax(env_id: str) -> TrainConfig:
    """PPO on an env of Brax."""
    return _ppo(f"brax/{env_id}", BraxConfig(randomize_initial_episode_length=True), _BRAX, 512, 1000)


def gymnax(env_id: str) -> TrainConfig:
    """PPO on an env of gymnax: classic control learns in seconds."""
    return _ppo(f"gymnax/{env_id}", JaxGuestConfig(), _GYMNAX, 64, 150)


def playground(env_id: str) -> TrainConfig:
    """PPO on an env of MuJoCo Playground."""
    env = PlaygroundConfig(randomize_initial_episode_length=True)
    return _ppo(f"playground/{env_id}", env, _PLAYGROUND, 256, 400)


def brax_sac(env_id: str) -> TrainConfig:
    """SAC on an env of Brax."""
    return _sac(f"brax/{env_id}", BraxConfig(randomize_initial_episode_length=True))


def gymnax_sac(env_id: str) -> TrainConfig:
    """SAC on an env of gymnax that has continuous actions."""
    return _sac(f"gymnax/{env_id}", JaxGuestConfig())


def playground_sac(env_id: str) -> TrainConfig:
    """SAC on an env of MuJoCo Playground."""
    return _sac(f"playground/{env_id}", PlaygroundConfig(randomize_initial_episode_length=True))


def _ppo(task: str, env: JaxGuestConfig, agent: PpoConfig, num_envs: int, max_iterations: int) -> TrainConfig:
    return TrainConfig(
        task=task,
        ml_framework="jax",
        num_envs=num_envs,
        max_iterations=max_iterations,
        env=env,
        agent=agent,
        evaluation=_EVALUATION,
        checkpoints=_CHECKPOINTS,
    )


def _sac(task: str, env: JaxGuestConfig) -> TrainConfig:
    return TrainConfig(
        task=task,
        ml_framework="jax",
        algorithm="sac",
        num_envs=64,
        max_iterations=1000,
        env=env,
        agent=_SAC,
        evaluation=EvaluationConfig(interval=100, num_episodes=32),
        checkpoints=CheckpointConfig(interval=100),
    )
