"""Returns and lengths of finished episodes, added up on the device without asking it for anything."""

from collections.abc import Mapping, Sequence

import torch


class EpisodeStatistics:
    """Sums over the episodes that ended since the last ``take``.

    An episode that did not start at its beginning (``randomize_initial_episode_length``) is left out: its return is
    that of a shorter one.

    Args:
        num_terms: how many numbers are added up per env: reward terms and metrics.
        num_envs: number of envs.
        device: where the sums live.
    """

    def __init__(self, num_terms: int, num_envs: int, device: torch.device) -> None:
        self._whole = torch.ones(num_envs, dtype=torch.bool, device=device)
        # Columns: the sum of each term, then the length, then 1 (so that adding columns counts episodes).
        self._running = torch.zeros((num_envs, num_terms + 1), dtype=torch.float64, device=device)
        self._finished = torch.zeros(num_terms + 2, dtype=torch.float64, device=device)

    def restart(self, whole: torch.Tensor) -> None:
        """Forget everything; ``whole (num_envs,)`` says which of the episodes now starting begin at step 0."""
        self._whole = whole.clone()
        self._running.zero_()
        self._finished.zero_()

    def forget(self, mask: torch.Tensor) -> None:
        """Leave out the episodes under way in the envs of ``mask (num_envs,)``, where whole ones begin."""
        self._running = torch.where(mask.unsqueeze(1), 0.0, self._running)
        self._whole = self._whole | mask

    def add(self, terms: torch.Tensor, done: torch.Tensor) -> None:
        """Count one env step: its terms ``(num_envs, num_terms)`` and which episodes it ended ``(num_envs,)``."""
        self._running[:, :-1] += terms
        self._running[:, -1] += 1
        counted = done & self._whole
        self._finished[:-1] += torch.where(counted.unsqueeze(1), self._running, 0.0).sum(0)
        self._finished[-1] += counted.sum()
        self._running = torch.where(done.unsqueeze(1), 0.0, self._running)
        self._whole |= done

    def take(self) -> torch.Tensor:
        """Return ``(num_terms + 2,)`` float64 sums over finished episodes (terms, length, count) and start anew.

        ``TorchEnv.summarise`` says what they mean.
        """
        taken = self._finished.clone()
        self._finished.zero_()
        return taken

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the sums of the episodes under way; per env, leading axis ``num_envs``."""
        return {"whole": self._whole.clone(), "running": self._running.clone()}

    def load_state_dict(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Continue the episodes of ``state_dict``."""
        self._whole.copy_(saved["whole"])
        self._running.copy_(saved["running"])
        self._finished.zero_()


def summarise(
    sums: Sequence[float], reward_terms: tuple[str, ...], metric_terms: tuple[str, ...]
) -> dict[str, float | None]:
    """Turn sums over finished episodes into the metrics of a log line; see ``TorchEnv.summarise``."""
    *term_sums, length_sum, count = sums
    reward_sums, metric_sums = term_sums[: len(reward_terms)], term_sums[len(reward_terms) :]
    metrics: dict[str, float | None] = {
        "mean_return": sum(reward_sums) / count if count else None,
        "mean_episode_length": length_sum / count if count else None,
        "num_episodes": int(count),
    }
    for name, value in zip(reward_terms, reward_sums, strict=True):
        metrics[f"reward/{name}"] = value / count if count else None
    for name, value in zip(metric_terms, metric_sums, strict=True):
        metrics[f"metric/{name}"] = value / length_sum if count else None
    return metrics
