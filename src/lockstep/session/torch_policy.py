"""A policy that was trained with torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lockstep.core.errors import UsageError
from lockstep.core.registry import load
from lockstep.core.types import Observations
from lockstep.learn.config import PpoConfig, TrainConfig
from lockstep.learn.torch import checkpoint
from lockstep.learn.torch.networks import ActorCritic
from lockstep.recipes.catalog import make_task
from lockstep.recipes.libraries import OWN, library_of
from lockstep.session.make_config import make_config
from lockstep.session.make_env import resolve_device

if TYPE_CHECKING:
    from lockstep.learn.torch.guest import GuestLearner


class TorchPolicy:
    """A ``Policy`` of tensors.

    Attributes:
        config: of the run that trained it.
        iteration: iterations it was trained for.
        num_observations: of the group ``actor``.
        network: the actor and critic, in evaluation mode on the device; of another library the actor alone.
    """

    def __init__(self, config: TrainConfig, iteration: int, network: Any) -> None:
        self.config, self.iteration, self.network = config, iteration, network
        self.num_observations = network.num_observations["actor"]
        self._memory: torch.Tensor | None = None

    def reset(self, done: torch.Tensor | None = None) -> None:
        """Forget everything, or only in the envs of ``done (num_envs,)``; call it when episodes end."""
        if done is None or self._memory is None:
            self._memory = None
        else:
            self._memory = self._memory * (~done).to(self._memory.dtype).unsqueeze(-1)

    def __call__(self, observations: Observations | torch.Tensor) -> torch.Tensor:
        """Return actions ``(num_envs, size)`` (discrete: ``(num_envs,)``) for raw observations.

        Args:
            observations: the env's groups, or those of the group ``actor`` alone, ``(num_envs, num_observations)``.
        """
        actor = torch.as_tensor(observations["actor"] if isinstance(observations, dict) else observations)
        if actor.ndim != 2 or actor.shape[1] != self.num_observations:
            raise ValueError(f"observations have shape {tuple(actor.shape)}, not (num_envs, {self.num_observations})")
        like = next(self.network.parameters())
        others = observations if isinstance(observations, dict) else {}
        groups = {name: torch.as_tensor(group).to(like) for name, group in {**others, "actor": actor}.items()}
        with torch.no_grad():
            memory = self._memory
            if memory is None or memory.shape[1] != groups["actor"].shape[0]:
                memory = self.network.initial_memory(groups["actor"].shape[0])
            actions: torch.Tensor
            actions, self._memory = self.network.most_likely(groups, memory)
            return actions


def load_policy(path: Path, device: str) -> TorchPolicy:
    """Load the policy of a checkpoint file.

    Raises:
        UsageError: no such checkpoint, damaged, of a user's runner, or of a task that this installation doesn't have.
    """
    content = checkpoint.load(path)
    config = make_config(**content["config"])
    if config.runner:
        raise UsageError(f"checkpoint {path} is of runner {config.runner}, whose policy its own code alone can run")
    task = make_task(config)
    if config.rl_library != OWN:
        guest: GuestLearner = load(library_of(config).learners["torch"])
        with checkpoint.misfits_in_words(path):
            network = guest.load_policy(config, content["state"], task)
        network.requires_grad_(False).to(resolve_device(device)).eval()
        return TorchPolicy(config, content["iteration"], network)
    network = ActorCritic(config.agent_as(PpoConfig), dict(task.num_observations), task.action_space)
    network.cast_parameters_(torch.float64 if config.dtype == "float64" else torch.float32)
    checkpoint.load_strictly(network, content["policy"], path)
    network.requires_grad_(False).to(resolve_device(device)).eval()
    return TorchPolicy(config, content["iteration"], network)
