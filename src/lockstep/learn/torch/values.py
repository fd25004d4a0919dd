"""Values of a whole rollout in few large passes, after it was collected."""

from typing import NamedTuple

import torch

from lockstep.learn.torch.networks import ActorCritic, PolicyState
from lockstep.learn.torch.rollout import Rollout


class RolloutValues(NamedTuple):
    """What the critic says of a rollout."""

    values: torch.Tensor  # (num_steps, num_envs) of each step's observation
    next_values: torch.Tensor  # (num_steps, num_envs) of what the step led to, before any reset
    critic_state: torch.Tensor  # the critic's memory after the rollout


@torch.no_grad()
def rollout_values(
    policy: ActorCritic, rollout: Rollout, last_observations: torch.Tensor, state: PolicyState, chunk_size: int
) -> RolloutValues:
    """Evaluate the critic on a rollout whose observations are normalised.

    Args:
        policy: holds the critic.
        rollout: normalised observations, ``final_critic_observations`` included.
        last_observations: ``(num_envs, num_critic)`` normalised, where the next rollout starts.
        state: memories at the start of the rollout.
        chunk_size: samples per pass.
    """
    truncated = rollout.truncated.flatten().nonzero().squeeze(1)  # the one look at device values per iteration
    final_observations = rollout.final_critic_observations.flatten(0, 1).index_select(0, truncated)
    memory, perceptron = policy.critic.memory, policy.critic.perceptron
    features, critic_state = rollout.critic_observations, state.critic
    last_features, final_features = last_observations, final_observations
    if memory is not None:
        features, states = memory.sequence(features, critic_state, rollout.done)
        # A truncated episode's final observation is seen by the memory as it stood after the step before it.
        before_reset = states.transpose(1, 2).flatten(0, 1).index_select(0, truncated).transpose(0, 1).contiguous()
        final_features, _ = memory.step(final_observations, before_reset)
        critic_state = states[-1] * (~rollout.done[-1]).to(states.dtype).unsqueeze(-1)
        last_features, _ = memory.step(last_observations, critic_state)

    def value_of(inputs: torch.Tensor) -> torch.Tensor:
        flat = inputs.reshape(-1, inputs.shape[-1])
        parts = [perceptron.infer(part).squeeze(-1) for part in flat.split(chunk_size)]
        return torch.cat(parts).reshape(inputs.shape[:-1]).to(rollout.rewards.dtype)

    values = value_of(features)
    next_values = torch.cat((values[1:], value_of(last_features).unsqueeze(0)))
    next_values.view(-1)[truncated] = value_of(final_features)
    return RolloutValues(values, next_values, critic_state)
