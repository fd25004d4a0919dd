"""Recipes of the cart-poles for soft actor-critic, on JAX: fewer envs than PPO has, each step used many times."""

from lockstep.envs.config import EnvConfig
from lockstep.learn.config import CheckpointConfig, EvaluationConfig, SacConfig, TrainConfig
from lockstep.tasks.cartpole_balance.config import CartpoleBalanceConfig
from lockstep.tasks.cartpole_classic.config import CartpoleClassicConfig
from lockstep.tasks.cartpole_swingup.config import CartpoleSwingupConfig

# A gradient step for every 8 env steps, a high learning rate, and target critics that follow fast: values must travel
# back over 100 steps. Until they have, the pole is balanced wherever the cart happens to be: what one step towards
# the middle is worth is little beside the errors of the critics.
_AGENT = SacConfig(
    num_steps_per_env=8,
    num_updates=32,
    batch_size=256,
    replay_size=300_000,
    learning_starts=2_000,
    learning_rate=1e-3,
    temperature_learning_rate=1e-3,
    init_temperature=0.1,
    polyak=0.05,
    actor_hidden_dims=(128, 128),
    critic_hidden_dims=(128, 128),
)


# The toy fails late, off its track, and evaluations swing between 110 and 500 until critics know values of 100 steps:
# for some 6000 gradient steps, which are half of its iterations this way.
_CLASSIC_AGENT = _AGENT.model_copy(update={"num_updates": 64})


def cartpole_classic() -> TrainConfig:
    """The toy, with continuous actions."""
    return _recipe("cartpole_classic", CartpoleClassicConfig(), _CLASSIC_AGENT, max_iterations=200, interval=50)


def cartpole_balance() -> TrainConfig:
    """Balance in MuJoCo."""
    return _recipe("cartpole_balance", CartpoleBalanceConfig(), _AGENT, max_iterations=300, interval=50)


def cartpole_swingup() -> TrainConfig:
    """Swing-up in MuJoCo."""
    return _recipe("cartpole_swingup", CartpoleSwingupConfig(), _AGENT, max_iterations=700, interval=100)


def _recipe(task: str, env: EnvConfig, agent: SacConfig, *, max_iterations: int, interval: int) -> TrainConfig:
    """Return what all have alike, evaluated and saved every ``interval`` iterations."""
    return TrainConfig(
        task=task,
        ml_framework="jax",
        algorithm="sac",
        num_envs=32,
        max_iterations=max_iterations,
        env=env,
        agent=agent,
        evaluation=EvaluationConfig(interval=interval, num_episodes=64),
        checkpoints=CheckpointConfig(interval=interval),
    )
