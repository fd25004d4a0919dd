"""Whole episodes under the deterministic policy."""

from typing import NamedTuple

import torch

from lockstep.core import beats
from lockstep.core.types import Comm
from lockstep.envs.torch_env import TorchEnv
from lockstep.learn.torch.networks import ActorCritic

STEPS_BETWEEN_LOOKS = 20  # a look at the device's "all done" costs a wait, going on too long costs steps


class Episodes(NamedTuple):
    """One finished episode per env, on the host."""

    returns: torch.Tensor  # (num_episodes,) float64
    lengths: torch.Tensor  # (num_episodes,) int64 in env steps
    term_returns: dict[str, torch.Tensor]  # reward term -> (num_episodes,) float64; their sum is ``returns``


@torch.no_grad()
def evaluate(policy: ActorCritic, env: TorchEnv) -> Episodes:
    """Run every env from a reset to the end of its first episode, with the most likely actions.

    The env is reset to the start of its streams, so every evaluation meets the same episodes.
    """
    beats.enter("evaluate")
    observations = env.reset()
    state = policy.initial_state(env.num_envs).actor
    num_terms = len(env.task.reward_terms)
    totals = torch.zeros((env.num_envs, num_terms + 1), dtype=torch.float64, device=env.device)
    running = torch.ones(env.num_envs, dtype=torch.bool, device=env.device)
    for step in range(env.config.max_episode_steps):
        beats.enter("evaluate")
        distribution, state = policy.act(observations, state)
        transition = env.step(distribution.mode())
        totals[:, :-1] += torch.where(running.unsqueeze(1), transition.reward_terms, 0.0)
        totals[:, -1] += running
        running &= ~transition.done
        observations = transition.observations
        if step % STEPS_BETWEEN_LOOKS == 0 and not running.any():
            break
    terms, lengths = totals[:, :-1].cpu(), totals[:, -1].cpu().long()
    return Episodes(terms.sum(1), lengths, dict(zip(env.task.reward_terms, terms.unbind(1), strict=True)))


def summarise(episodes: Episodes, comm: Comm) -> dict[str, float]:
    """Return the metrics of an evaluation whose episodes the ranks have shared out, for a log line on every rank.

    Means are taken over all episodes in the order of their envs, so they don't depend on the number of ranks.
    """
    columns = (episodes.returns, episodes.lengths.double(), *episodes.term_returns.values())
    means = comm.gather_rows(torch.stack(columns, dim=1), "evaluation").mean(0)
    comm.broadcast_({"means": means}, "evaluation")
    names = ("mean_return", "mean_episode_length", *(f"reward/{name}" for name in episodes.term_returns))
    return {f"eval/{name}": mean for name, mean in zip(names, means.tolist(), strict=True)}
