"""Whole episodes under the deterministic policy."""

from typing import NamedTuple, Protocol

import torch

from lockstep.core import beats
from lockstep.core.types import Comm, Observations
from lockstep.envs.batch_env import BatchEnv

STEPS_BETWEEN_LOOKS = 20  # a look at the device's "all done" costs a wait, going on too long costs steps


class Episodes(NamedTuple):
    """One finished episode per env, on the host."""

    returns: torch.Tensor  # (num_episodes,) float64
    lengths: torch.Tensor  # (num_episodes,) int64 in env steps
    term_returns: dict[str, torch.Tensor]  # reward term -> (num_episodes,) float64; their sum is ``returns``
    metric_sums: dict[str, torch.Tensor]  # metric -> (num_episodes,) float64, the sum over the episode's env steps


class DecidesAlone(Protocol):
    """A policy as it is evaluated, played and deployed: what it does is decided by what it sees and remembers."""

    def initial_memory(self, num_envs: int) -> torch.Tensor:
        """Return the memory in which episodes start, ``(num_parts, num_envs, size)``; without one ``(0, ...)``."""

    def most_likely(self, observations: Observations, memory: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return actions ``(num_envs, size)``, discrete ``(num_envs,)``, for raw observations; and the new memory."""


@torch.no_grad()
def evaluate(policy: DecidesAlone, env: BatchEnv) -> Episodes:
    """Run every env from a reset to the end of its first episode, with the most likely actions.

    The env is reset to the start of its streams, so every evaluation meets the same episodes.
    """
    beats.enter("evaluate")
    observations = env.reset()
    memory = policy.initial_memory(env.num_envs)
    names = (*env.task.reward_terms, *env.task.metric_terms)
    num_rewards = len(env.task.reward_terms)
    totals = torch.zeros((env.num_envs, len(names) + 1), dtype=torch.float64, device=env.device)
    running = torch.ones(env.num_envs, dtype=torch.bool, device=env.device)
    for step in range(env.config.max_episode_steps):
        beats.enter("evaluate")
        action, memory = policy.most_likely(observations, memory)
        transition = env.step(action)
        totals[:, :-1] += torch.where(running.unsqueeze(1), transition.terms, 0.0)
        totals[:, -1] += running
        running &= ~transition.done
        observations = transition.observations
        if step % STEPS_BETWEEN_LOOKS == 0 and not running.any():
            break
    terms, lengths = totals[:, :-1].cpu(), totals[:, -1].cpu().long()
    sums = list(zip(names, terms.unbind(1), strict=True))
    returns = terms[:, :num_rewards].sum(1)
    return Episodes(returns, lengths, dict(sums[:num_rewards]), dict(sums[num_rewards:]))


def summarise(episodes: Episodes, comm: Comm) -> dict[str, float]:
    """Return the metrics of an evaluation whose episodes the ranks have shared out, for a log line on every rank.

    Means are taken over all episodes in the order of their envs, so they don't depend on the number of ranks.
    """
    columns = {"mean_return": episodes.returns, "mean_episode_length": episodes.lengths.double()}
    columns |= {f"reward/{name}": values for name, values in episodes.term_returns.items()}
    columns |= {f"metric/{name}": values for name, values in episodes.metric_sums.items()}
    means = comm.gather_rows(torch.stack(tuple(columns.values()), dim=1), "evaluation").mean(0)
    comm.broadcast_({"means": means}, "evaluation")
    named = dict(zip(columns, means.tolist(), strict=True))
    for name in episodes.metric_sums:
        named[f"metric/{name}"] /= named["mean_episode_length"]  # a mean over env steps
    return {f"eval/{name}": mean for name, mean in named.items()}
