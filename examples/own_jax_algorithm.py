"""A learning algorithm of your own in JAX, written once for one device and for many.

    lockstep train cartpole_classic --ml_framework jax --runner own_jax_algorithm:Algorithm --env.action_kind discrete
    lockstep train cartpole_classic --ml_framework jax --runner own_jax_algorithm:Algorithm --env.action_kind discrete \
        --device cpu --num_devices 4 --total_envs 512

The first word of ``--runner`` is a module of the current folder, or an installed one. lockstep compiles ``setup``,
``step`` and ``evaluate`` for all devices, calls ``step`` once per iteration, and takes care of the run directory, the
display, checkpoints, evaluations and signals. Each method sees the envs of one device. What is to be the same on all
devices is reduced with the functions of ``lockstep.distributed.jax``: three lines below say "ranks".

The update is REINFORCE (Williams 1992) with rewards to go.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

import lockstep
from lockstep.core.rng import Stream
from lockstep.core.types import Observations
from lockstep.distributed.jax import Moments, gradient_update, merge_over_ranks, psum
from lockstep.envs.jax_env import EnvNoise, EnvState, JaxEnv
from lockstep.learn.config import TrainConfig
from lockstep.learn.jax.algorithm import Metrics, TrainState
from lockstep.learn.jax.evaluation import run_episodes, summarise

HIDDEN = 32
Parameters = dict[str, jax.Array]


class Learned(NamedTuple):
    """What is the same on every device."""

    parameters: Parameters
    optimizer: optax.OptState
    num_steps: jax.Array  # () int32 steps that each env has made


class Samples(NamedTuple):
    """A rollout; every array leads with (num_steps, num_envs)."""

    observations: jax.Array
    actions: jax.Array
    rewards: jax.Array
    done: jax.Array


class Algorithm:
    def __init__(self, config: TrainConfig, env: JaxEnv, evaluation_env: JaxEnv | None) -> None:
        self.env, self.evaluation_env = env, evaluation_env
        self.num_steps, self.gamma = config.agent.num_steps_per_env, config.agent.gamma
        self.action_noise = Stream(config.seed, "own/action", jnp)  # numbers for each env by its id, whoever steps it
        optimizer = optax.adam(0.01)
        self.optimizer = optimizer
        self.update = gradient_update(loss, optimizer, max_grad_norm=1.0)  # ranks: the mean over the samples of all

    def setup(self, key: jax.Array, env_ids: jax.Array) -> TrainState:
        sizes = (self.env.task.num_observations["actor"], HIDDEN, self.env.task.action_space.size)
        keys = jax.random.split(key, 2)
        parameters = {
            f"weight_{layer}": jax.random.normal(keys[layer], sizes[layer : layer + 2], self.env.dtype) * 0.3
            for layer in range(2)
        }
        learned = Learned(parameters, self.optimizer.init(parameters), jnp.zeros((), jnp.int32))
        return TrainState(replicated=learned, sharded=self.env.reset(env_ids))

    def step(self, state: TrainState) -> tuple[TrainState, Metrics]:
        learned: Learned = state.replicated
        envs, samples, finished = self.collect(learned, state.sharded)
        is_real = jnp.broadcast_to(envs.env_ids >= 0, samples.done.shape)  # one device may have fewer envs than others
        returns = rewards_to_go(samples, self.gamma)
        (moments,) = merge_over_ranks([Moments.of(returns[..., None], is_real)])  # ranks: over the samples of all
        advantages = (returns - moments.mean.astype(returns.dtype)) / (moments.std() + 1e-6).astype(returns.dtype)
        weights = is_real.astype(returns.dtype)
        value, parameters, optimizer = self.update(
            learned.parameters, learned.optimizer, samples, advantages, weights, num_samples=weights.sum()
        )
        # ranks: sums over all, of this iteration's steps and of the episodes that ended in it
        num_steps, sums = psum((is_real.sum(dtype=jnp.int64), finished))
        # Mean return, length and the like: NaN, which stands for no value, if no episode ended.
        metrics = {"num_steps": num_steps, **self.env.summarise(sums), "loss/policy": value}
        return TrainState(Learned(parameters, optimizer, learned.num_steps + self.num_steps), envs), metrics

    def evaluate(self, state: TrainState, env_ids: jax.Array) -> Metrics:
        assert self.evaluation_env is not None
        env = self.evaluation_env

        def act(observations: Observations, memory: jax.Array) -> tuple[jax.Array, jax.Array]:
            return self.act(state.replicated, observations, memory)

        episodes = run_episodes(env, act, self.initial_memory(env_ids.shape[0]), env_ids)
        return summarise(episodes, env_ids, env)

    def collect(self, learned: Learned, envs: EnvState) -> tuple[EnvState, Samples, jax.Array]:
        """Step this device's envs; return them, what they met, and sums over the episodes that ended."""
        first = learned.num_steps + 1
        noise = self.env.noise(envs.env_ids, first, self.num_steps)
        counters = self.action_noise.counters(first, self.num_steps)
        draws = self.action_noise.uniform(counters, envs.env_ids, 1, self.env.dtype)

        def one_step(envs: EnvState, now: tuple[EnvNoise, jax.Array]) -> tuple[EnvState, tuple[Samples, jax.Array]]:
            noise, draw = now
            observations = envs.observations["actor"]
            probabilities = jax.nn.softmax(logits_of(learned.parameters, observations))
            actions = (draw > probabilities.cumsum(-1)[:, :-1]).sum(-1, dtype=jnp.int32)
            after, transition = self.env.step(envs, actions, noise)
            # The step that fails is worth nothing.
            rewards = transition.reward - transition.terminated.astype(transition.reward.dtype)
            return after, (Samples(observations, actions, rewards, transition.done), transition.finished)

        envs, (samples, finished) = jax.lax.scan(one_step, envs, (noise, draws))
        return envs, samples, finished.sum(0)

    # For play, load_policy and --checkpoint.

    def act(self, learned: Learned, observations: Observations, memory: jax.Array) -> tuple[jax.Array, jax.Array]:
        return logits_of(learned.parameters, observations["actor"]).argmax(-1).astype(jnp.int32), memory

    def initial_memory(self, num_envs: int) -> jax.Array:
        return jnp.zeros((num_envs, 0), jnp.float32)

    def weights(self, learned: Learned) -> Parameters:
        return learned.parameters

    def with_weights(self, learned: Learned, weights: Parameters) -> Learned:
        return learned._replace(parameters=weights)


def logits_of(parameters: Parameters, observations: jax.Array) -> jax.Array:
    """Return a number for each action, ``(..., num_actions)``."""
    return jnp.tanh(observations @ parameters["weight_0"]) @ parameters["weight_1"]


def loss(parameters: Parameters, samples: Samples, advantages: jax.Array, weights: jax.Array) -> jax.Array:
    """Return the mean over this device's samples; those of weight 0 do not count."""
    log_probs = jax.nn.log_softmax(logits_of(parameters, samples.observations))
    chosen = jnp.take_along_axis(log_probs, samples.actions[..., None], axis=-1)[..., 0]
    return -(chosen * advantages * weights).sum() / jnp.maximum(weights.sum(), 1)


def rewards_to_go(samples: Samples, gamma: float) -> jax.Array:
    """Return, for each step, the rewards up to the end of its episode or of the rollout, ``(num_steps, num_envs)``."""

    def one_step(following: jax.Array, now: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        reward, done = now
        following = reward + gamma * jnp.where(done, 0, following)
        return following, following

    start = jnp.zeros_like(samples.rewards[0])
    return jax.lax.scan(one_step, start, (samples.rewards, samples.done), reverse=True)[1]


def main() -> None:
    config = lockstep.make_config(
        "cartpole_classic",
        ml_framework="jax",
        runner="own_jax_algorithm:Algorithm",
        num_envs=128,
        max_iterations=60,
        env={"action_kind": "discrete"},
        agent={"num_steps_per_env": 64, "gamma": 0.95},
        log_root="logs/examples",
    )
    lockstep.train(config)


if __name__ == "__main__":
    main()
