"""A batch of our envs as the ``VecEnv`` that RSL-RL's runners take (rsl-rl-lib 5.5)."""

from typing import Any

import torch
from rsl_rl.env import VecEnv
from tensordict import TensorDict

from lockstep.core.errors import UsageError
from lockstep.core.types import Observations
from lockstep.envs.batch_env import BatchEnv


class RslRlEnv(VecEnv):  # type: ignore[misc]
    """The envs of a ``TorchEnv`` or of other people, in float32, with the observation groups ``actor`` and ``critic``.

    What a step returns beside observations, rewards and dones:

    - ``time_outs (num_envs,)`` bool: the time limit alone ended the episode;
    - ``final_observations``: as observations, but of the step itself, before any reset. RSL-RL's own PPO adds the
      value of the observation *before* the step where an episode timed out, for want of these; a learner that looks
      at them can do better;
    - ``log``, where episodes have ended: of each of them the sums of its reward terms, ``reward/<term>``, and the
      means of its metrics, ``metric/<name>``. RSL-RL logs their means.

    Args:
        env: steps the envs; it belongs to this one from now on.
        task: its name, for messages.

    Raises:
        UsageError: the task's actions are discrete, which RSL-RL has no policy for.
    """

    def __init__(self, env: BatchEnv, task: str = "") -> None:
        space = env.task.action_space
        if space.kind != "continuous":
            raise UsageError(
                f"RSL-RL has no policy for discrete actions, which {task or type(env.task).__name__} has; PPO of "
                "lockstep, rl_games, skrl and sb3 takes them (--rl_library)"
            )
        self.env = env
        self.num_envs, self.num_actions = env.num_envs, space.size
        self.max_episode_length = env.config.max_episode_steps
        self.device = env.device
        self.cfg: dict[str, Any] = env.config.model_dump(mode="json")
        self._names = [f"reward/{name}" for name in env.task.reward_terms]
        self._num_rewards = len(self._names)
        self._names += [f"metric/{name}" for name in env.task.metric_terms]
        # Columns: the sum of each term of the episode under way, then its length.
        self._sums = torch.zeros((self.num_envs, len(self._names) + 1), dtype=torch.float64, device=self.device)

    @property
    def unwrapped(self) -> "RslRlEnv":
        """This env, where RSL-RL looks for ``step_dt``."""
        return self

    @property
    def step_dt(self) -> float:
        """Simulated seconds per env step."""
        return self.env.task.step_duration_s

    @property
    def episode_length_buf(self) -> torch.Tensor:
        """How many steps each episode has taken, ``(num_envs,)`` int32, by which the envs keep their time limit.

        It may be set, as a runner does with ``init_at_random_ep_len``, so that the first episodes end at different
        times.
        """
        return self.env.episode_length

    @episode_length_buf.setter
    def episode_length_buf(self, lengths: torch.Tensor) -> None:
        if tuple(lengths.shape) != (self.num_envs,):
            raise ValueError(f"episode lengths have shape {tuple(lengths.shape)}, not {(self.num_envs,)}")
        with torch.inference_mode(False):
            self.env.episode_length = lengths.to(self.device, torch.int32, copy=True)
            self.env.episodes.restart(whole=self.env.episode_length == 0)

    def get_observations(self) -> TensorDict:
        """Return the current observations: groups ``(num_envs, num_observations[group])``."""
        return self._grouped(self.env.observations)

    def reset(self) -> tuple[TensorDict, dict[str, Any]]:
        """Start every env anew, as it was when it was made; return the observations, and an empty dictionary."""
        with torch.inference_mode(False):
            self._sums.zero_()
            return self._grouped(self.env.reset()), {}

    def step(self, actions: torch.Tensor) -> tuple[TensorDict, torch.Tensor, torch.Tensor, dict[str, Any]]:
        """Apply one action per env, ``(num_envs, num_actions)``.

        Returns:
            observations, of the new episode where one ended; rewards ``(num_envs,)``; dones ``(num_envs,)`` int64; and
            the dictionary that the class describes.
        """
        # A runner steps in inference mode, whose tensors can't be written to afterwards: the envs live on.
        with torch.inference_mode(False), torch.no_grad():
            transition = self.env.step(actions.to(self.device, self.env.dtype, copy=True))
            self._sums[:, :-1] += transition.terms
            self._sums[:, -1] += 1
            extras: dict[str, Any] = {
                "time_outs": transition.truncated,
                "final_observations": self._grouped(transition.final_observations),
            }
            ended = transition.done.nonzero().squeeze(1)
            if ended.numel():
                extras["log"] = self._of_episodes(ended)
                self._sums[ended] = 0.0
            rewards, dones = transition.reward.to(torch.float32), transition.done.to(torch.int64)
            return self._grouped(transition.observations), rewards, dones, extras

    def close(self) -> None:
        """Release the engine."""
        self.env.close()

    def _of_episodes(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        *sums, length = self._sums[rows].to(torch.float32).unbind(1)
        values = [*sums[: self._num_rewards], *(total / length for total in sums[self._num_rewards :])]
        return dict(zip(self._names, values, strict=True))

    def _grouped(self, observations: Observations) -> TensorDict:
        groups = {name: tensor.to(torch.float32) for name, tensor in observations.items()}
        return TensorDict(groups, batch_size=[self.num_envs], device=self.device)
