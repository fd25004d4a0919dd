"""What crosses the border between our envs and Gymnasium's: spaces, observations, actions and reward terms."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from gymnasium import Space, spaces
from numpy.typing import NDArray

from lockstep.adapters.spaces import actions_of, observations_of
from lockstep.core.errors import UsageError
from lockstep.core.types import Observations
from lockstep.envs.torch_env import TorchEnv

Groups = Literal["actor", "all"]
"""What an observation is: the policy's alone, or all groups by name, with what only a critic may see."""
Picture = Callable[[NDArray[np.float64]], NDArray[np.uint8]]
"""Draws a pose ``qpos (nq,)`` as ``(height, width, 3)``."""


class Border:
    """Takes arrays of a ``TorchEnv`` to numpy in float32, and actions back.

    Args:
        env: whose arrays they are.
        observations: ``actor`` for the policy's observation as it is, ``all`` for a dictionary of all groups.

    Raises:
        UsageError: another word for ``observations``.
    """

    def __init__(self, env: TorchEnv, observations: Groups) -> None:
        if observations not in ("actor", "all"):
            raise UsageError(f"observations {observations!r} of a Gymnasium env must be 'actor' or 'all'")
        self._env, self._as_dictionary = env, observations == "all"
        sizes = env.task.num_observations
        self.names = tuple(sizes) if self._as_dictionary else ("actor",)

    def observation_space(self) -> Space[Any]:
        """Return the space of one env's observation; no task bounds what it shows."""
        boxes: dict[str, Space[Any]] = {name: self.box(name) for name in self.names}
        return spaces.Dict(boxes) if self._as_dictionary else boxes["actor"]

    def box(self, group: str) -> spaces.Box:
        """Return the space of one env's observations of a group."""
        return observations_of(self._env.task.num_observations[group])

    def action_space(self) -> Space[Any]:
        """Return the space of one env's action: up to where the task clips it, or the numbers of its choices."""
        return actions_of(self._env.task.action_space)

    def actions(self, actions: Any) -> torch.Tensor:
        """Return a copy of actions, a row for each env, as the env takes them.

        Raises:
            ValueError: they have another shape.
        """
        space, count = self._env.task.action_space, self._env.num_envs
        is_choice = space.kind == "discrete"
        shape = (count,) if is_choice else (count, space.size)
        array = torch.as_tensor(actions)
        if tuple(array.shape) != shape:
            raise ValueError(f"actions have shape {tuple(array.shape)}, not {shape}")
        return array.to(self._env.device, torch.int64 if is_choice else self._env.dtype, copy=True)

    def selected(self, observations: Observations) -> list[torch.Tensor]:
        """Return the groups that are shown, in their order."""
        return [observations[name] for name in self.names]

    def assembled(self, columns: Sequence[NDArray[np.float32]], row: Any = slice(None)) -> Any:
        """Return observations as their space has them, of groups on the host; of one env alone with ``row``."""
        if not self._as_dictionary:
            return columns[0][row]
        return {name: column[row] for name, column in zip(self.names, columns, strict=True)}

    def named_terms(self, terms: NDArray[np.float32]) -> dict[str, dict[str, Any]]:
        """Return ``terms (num_terms, ...)`` by their names, reward terms and metrics apart."""
        rewards, metrics = self._env.task.reward_terms, self._env.task.metric_terms
        by_name = {"reward_terms": dict(zip(rewards, terms, strict=False))}
        return by_name | ({"metrics": dict(zip(metrics, terms[len(rewards) :], strict=True))} if metrics else {})


def with_masks(values: Mapping[str, Any], mask: NDArray[np.bool_]) -> dict[str, Any]:
    """Return copies of arrays ``(num_envs,)``, nested by name, each with the mask of the envs that it is about."""
    masked: dict[str, Any] = {}
    for name, value in values.items():
        masked[name] = with_masks(value, mask) if isinstance(value, Mapping) else value.copy()
        masked[f"_{name}"] = mask.copy()
    return masked


def to_host(*tensors: torch.Tensor) -> list[NDArray[np.float32]]:
    """Return copies of tensors ``(num_envs,)`` or ``(num_envs, columns)`` in float32, in one transfer from a GPU."""
    flat = torch.cat([tensor.reshape(len(tensor), -1).to(torch.float32) for tensor in tensors], dim=1).cpu().numpy()
    ends = np.cumsum([1 if tensor.ndim == 1 else tensor.shape[1] for tensor in tensors])
    pieces = np.split(flat, ends[:-1], axis=1)
    return [
        np.ascontiguousarray(piece[:, 0] if tensor.ndim == 1 else piece)
        for piece, tensor in zip(pieces, tensors, strict=True)
    ]
