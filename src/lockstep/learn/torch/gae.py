"""Generalised advantage estimation (Schulman et al. 2016, arXiv:1506.02438, equations 11 to 16)."""

import torch


def generalised_advantages(
    rewards: torch.Tensor,
    values: torch.Tensor,
    next_values: torch.Tensor,
    terminated: torch.Tensor,
    done: torch.Tensor,
    gamma: float,
    lam: float,
) -> torch.Tensor:
    """Return the advantages of a rollout, ``(num_steps, num_envs)`` like every argument.

    Args:
        rewards: of each step.
        values: of the observation each action was chosen at.
        next_values: of the observation each step led to; where the time limit cut an episode, of its final
            observation (not of the next episode's first), so that the limit is bootstrapped.
        terminated: bool, episodes that ended for good: nothing follows them.
        done: bool, episodes that ended for either reason: the estimate does not reach across.
        gamma: discount factor.
        lam: lambda, between one-step differences (0) and Monte-Carlo returns (1).
    """
    deltas = rewards + gamma * next_values.masked_fill(terminated, 0.0) - values
    decay = gamma * lam * (~done).to(rewards.dtype)
    advantages = torch.empty_like(rewards)
    following = torch.zeros_like(rewards[0])
    for step in reversed(range(rewards.shape[0])):
        following = torch.addcmul(deltas[step], decay[step], following, out=advantages[step])
    return advantages
