"""One of our envs as a ``gymnasium.Env``."""

from typing import Any

import gymnasium
import numpy as np
import torch
from numpy.typing import NDArray

from lockstep.adapters.gymnasium.arrays import Border, Groups, Picture, to_host
from lockstep.core.errors import UsageError
from lockstep.envs.torch_env import TorchEnv


class LockstepEnv(gymnasium.Env[Any, Any]):
    """The one env of a ``TorchEnv``, with numpy arrays in float32; for more than a few, a vector env is far faster.

    ``info["reward_terms"]`` of a step has what each term added to the reward, ``info["metrics"]`` the task's other
    figures, each a float by name.

    Args:
        env: of one env; it belongs to this one from now on.
        seed: None leaves the streams to Gymnasium's own source of randomness until ``reset`` is given a seed; else
            they stay as the env has them.
        observations: ``actor``, or ``all`` for a dictionary with what only a critic may see.
        picture: draws a pose; None: nothing can be rendered.

    Raises:
        UsageError: there are several envs, or a word is not known.
    """

    def __init__(
        self,
        env: TorchEnv,
        *,
        seed: int | None = None,
        observations: Groups = "actor",
        picture: Picture | None = None,
    ) -> None:
        if env.num_envs != 1:
            raise UsageError(f"a gymnasium.Env is one env, and there are {env.num_envs}; make a vector env")
        self.env, self._picture = env, picture
        self._border = Border(env, observations)
        self.observation_space, self.action_space = self._border.observation_space(), self._border.action_space()
        self.metadata = {
            "render_modes": [] if picture is None else ["rgb_array"],
            "render_fps": 1.0 / env.task.step_duration_s,
        }
        self.render_mode = None if picture is None else "rgb_array"
        self._has_seed = seed is not None
        self._is_at_start, self._has_ended = True, False
        self._is_new, self._is_closed = True, False
        self._keep_pose()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin a new episode.

        Args:
            seed: from 0 to 2**64 - 1; the same one gives the same episodes. None goes on in the streams.
            options: there are none.

        Raises:
            ClosedEnvironmentError: the env was closed.
        """
        self._require_open()
        super().reset(seed=seed)
        if seed is None and not self._has_seed:
            seed = int(self.np_random.integers(2**63))
        if seed is not None:
            self.env.seed_streams(int(seed))
            self.env.reset()
            self._has_seed = True
        elif not self._is_at_start:
            self.env.restart(torch.ones(1, dtype=torch.bool, device=self.env.device))
        self._is_new = self._is_at_start = self._has_ended = False
        self._keep_pose()
        return self._border.assembled(to_host(*self._border.selected(self.env.observations)), 0), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Take one step; an episode that ends stays at its end until ``reset``.

        Args:
            action: ``(size,)`` floats, or an integer if discrete, in an array of any kind.

        Raises:
            ClosedEnvironmentError: the env was closed.
            ResetNeeded: the episode has ended, or none has begun.
            ValueError: an action of another shape.
        """
        self._require_open()
        if self._is_new:
            raise gymnasium.error.ResetNeeded("call reset before the first step")
        if self._has_ended:
            raise gymnasium.error.ResetNeeded("the episode has ended; call reset before the next step")
        transition = self.env.step(self._border.actions(np.asarray(action)[None]))
        reward, terms, terminated, truncated, *columns = to_host(
            transition.reward,
            transition.terms,
            transition.terminated,
            transition.truncated,
            *self._border.selected(transition.final_observations),
        )
        # The env has begun a new episode where one ended, which the next reset finds.
        self._has_ended = bool(terminated[0] or truncated[0])
        self._is_at_start = self._has_ended
        if not self._has_ended:
            self._keep_pose()
        info = self._border.named_terms(terms[0])
        named = {kind: {name: float(value) for name, value in values.items()} for kind, values in info.items()}
        return self._border.assembled(columns, 0), float(reward[0]), bool(terminated[0]), bool(truncated[0]), named

    def render(self) -> NDArray[np.uint8] | None:
        """Return a picture ``(height, width, 3)``; where the episode has ended, of the step before its end."""
        if self._picture is None:
            return None
        return self._picture(self._pose)

    def _keep_pose(self) -> None:
        if self._picture is not None:
            self._pose = self.env.state.qpos[0].to("cpu", torch.float64, copy=True).numpy()

    def _require_open(self) -> None:
        if self._is_closed:
            raise gymnasium.error.ClosedEnvironmentError("the env was closed; make a new one")

    def close(self) -> None:
        """Release the engine, and what draws."""
        self.env.close()
        self._picture = None
        self._is_closed = True
