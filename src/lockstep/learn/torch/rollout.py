"""A rollout: buffers for what the envs gave, and the phase that fills them."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, cast

import array_api_compat.torch as xp
import torch

from lockstep.core import beats
from lockstep.core.rng import Stream
from lockstep.envs.batch_env import BatchEnv
from lockstep.learn.torch.networks import ActorCritic, PolicyState


class Rollout(NamedTuple):
    """``num_steps`` steps of ``num_envs`` envs; buffers are filled anew every iteration.

    ``observations`` are raw while they are collected and normalised before the update.
    """

    actor_observations: torch.Tensor  # (num_steps, num_envs, num_observations["actor"])
    critic_observations: torch.Tensor  # (num_steps, num_envs, num_observations["critic"])
    final_critic_observations: torch.Tensor  # the same, of what each step led to before any reset
    actions: torch.Tensor  # (num_steps, num_envs[, size])
    log_probs: torch.Tensor  # (num_steps, num_envs)
    distributions: torch.Tensor  # (num_steps, num_envs, num_parameters) as Distribution.pack gives them
    rewards: torch.Tensor  # (num_steps, num_envs)
    terminated: torch.Tensor  # (num_steps, num_envs) bool
    truncated: torch.Tensor  # (num_steps, num_envs) bool

    @property
    def done(self) -> torch.Tensor:
        """``(num_steps, num_envs)`` bool: an episode ended with this step."""
        return self.terminated | self.truncated


def allocate(num_steps: int, env: BatchEnv) -> Rollout:
    """Return empty buffers for ``num_steps`` steps of the env."""
    space, sizes = env.task.action_space, env.task.num_observations
    continuous = space.kind == "continuous"

    def zeros(*shape: int, dtype: torch.dtype = env.dtype) -> torch.Tensor:
        return torch.zeros((num_steps, env.num_envs, *shape), dtype=dtype, device=env.device)

    return Rollout(
        actor_observations=zeros(sizes["actor"]),
        critic_observations=zeros(sizes["critic"]),
        final_critic_observations=zeros(sizes["critic"]),
        actions=zeros(space.size) if continuous else zeros(dtype=torch.int64),
        log_probs=zeros(),
        distributions=zeros(2 * space.size if continuous else space.size),
        rewards=zeros(),
        terminated=zeros(dtype=torch.bool),
        truncated=zeros(dtype=torch.bool),
    )


class ActionNoise:
    """The noise that actions are sampled with, keyed by global env id and env step, drawn per rollout."""

    def __init__(self, env: BatchEnv, seed: int) -> None:
        self._env = env
        self._stream = Stream(seed, "train/action", xp, env.device)

    def draw(self, num_steps: int) -> torch.Tensor:
        """Return ``(num_steps, num_envs, num_noise)`` for the env's next steps: normals, or uniforms if discrete."""
        env, space = self._env, self._env.task.action_space
        counters = self._stream.counters(env.num_steps, num_steps)
        if space.kind == "continuous":
            noise = self._stream.normal(counters, env.env_ids, space.size, env.dtype)
        else:
            noise = self._stream.uniform(counters, env.env_ids, 1, env.dtype)
        return cast(torch.Tensor, noise)


@torch.no_grad()
def collect(
    env: BatchEnv,
    policy: ActorCritic,
    state: PolicyState,
    noise: torch.Tensor,
    rollout: Rollout,
    precision: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> PolicyState:
    """Fill the rollout with the policy's next steps; return the actor's state after them (the critic's is as before).

    ``precision`` makes the context that the policy, but not the env, runs in. Nothing here asks the device for a value.
    """
    actor_state = state.actor
    observations = env.observations
    for step in range(rollout.rewards.shape[0]):
        beats.enter("rollout")
        rollout.actor_observations[step] = observations["actor"]
        rollout.critic_observations[step] = observations["critic"]
        with precision():
            distribution, actor_state = policy.act(observations, actor_state)
        action = distribution.sample(noise[step])
        transition = env.step(action)
        rollout.actions[step] = action
        rollout.log_probs[step] = distribution.log_prob(action)
        rollout.distributions[step] = distribution.pack()
        rollout.rewards[step] = transition.reward
        rollout.terminated[step] = transition.terminated
        rollout.truncated[step] = transition.truncated
        rollout.final_critic_observations[step] = transition.final_observations["critic"]
        if policy.recurrent:
            actor_state = actor_state * (~transition.done).to(actor_state.dtype).unsqueeze(-1)
        observations = transition.observations
    return PolicyState(actor_state, state.critic)
