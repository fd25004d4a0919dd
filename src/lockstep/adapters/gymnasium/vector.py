"""A batch of our envs as a ``gymnasium.vector.VectorEnv``."""

from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from lockstep.adapters.gymnasium.arrays import Border, Groups, Picture, to_host, with_masks
from lockstep.core.errors import UsageError
from lockstep.envs.torch_env import TorchEnv


class LockstepVectorEnv(gymnasium.vector.VectorEnv[Any, Any, NDArray[Any]]):
    """The envs of a ``TorchEnv``, stepped together, with numpy arrays in float32.

    ``info["reward_terms"]`` of a step has what each term added to the reward, ``info["metrics"]`` the task's other
    figures, each ``(num_envs,)`` by name, and as everywhere in Gymnasium masks beside them. With ``SameStep`` they are
    of the step also where an episode ended, and ``final_info`` has them of those envs again.

    All envs draw from the streams of one seed, each by its number, so ``reset`` takes one seed, for all of them.

    Args:
        env: steps the envs; it belongs to this one from now on.
        seed: None leaves the streams to Gymnasium's own source of randomness until ``reset`` is given a seed; else
            they stay as the env has them.
        autoreset_mode: ``SameStep``, ``NextStep`` or ``Disabled``, what happens where an episode ends; Gymnasium
            defines them.
        observations: ``actor``, or ``all`` for a dictionary with what only a critic may see.
        picture: draws a pose; None: nothing can be rendered.

    Raises:
        UsageError: a word that is not known.
    """

    def __init__(
        self,
        env: TorchEnv,
        *,
        seed: int | None = None,
        autoreset_mode: str | AutoresetMode = AutoresetMode.SAME_STEP,
        observations: Groups = "actor",
        picture: Picture | None = None,
    ) -> None:
        self.env, self._picture = env, picture
        self._border = border = Border(env, observations)
        self._mode = _as_mode(autoreset_mode)
        self.num_envs = env.num_envs
        self.single_observation_space, self.single_action_space = border.observation_space(), border.action_space()
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.state_space = border.box("critic")
        self.metadata = {
            "autoreset_mode": self._mode,
            "render_modes": [] if picture is None else ["rgb_array"],
            "render_fps": 1.0 / env.task.step_duration_s,
        }
        self.render_mode = None if picture is None else "rgb_array"
        self._has_seed, self._is_new = seed is not None, True
        self._ended = np.zeros(self.num_envs, dtype=np.bool_)  # episodes whose end is shown, and no new start yet
        self._final = env.observations

    @property
    def device(self) -> torch.device:
        """Where the envs are computed."""
        return self.env.device

    def state(self) -> NDArray[np.float32]:
        """Return what a critic may see of the envs now, ``(num_envs, num_observations["critic"])``."""
        return to_host(self._shown("critic"))[0]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin new episodes, in all envs or in those of ``options["reset_mask"] (num_envs,)``.

        Args:
            seed: from 0 to 2**64 - 1; the same one gives the same episodes. None goes on in the streams.
            options: may have a ``reset_mask``, a numpy array of booleans.

        Raises:
            ClosedEnvironmentError: the envs were closed.
            ValueError: a mask that is none, or a seed that is not one number or that comes with a mask.
        """
        self._require_open()
        mask = _mask_of(options, self.num_envs)
        if seed is not None and not (isinstance(seed, int | np.integer) and mask.all()):
            raise ValueError(f"seed {seed!r} of reset must be one whole number, and for all envs")
        super().reset(seed=seed)
        if seed is None and not self._has_seed:
            seed = int(self.np_random.integers(2**63))
        if seed is not None:
            self.env.seed_streams(int(seed))
            self.env.reset()
            self._has_seed = True
        elif not self._is_new:
            self.env.restart(torch.as_tensor(mask, device=self.env.device))
        self._is_new = False
        self._ended &= ~mask
        return self._border.assembled(to_host(*(self._shown(name) for name in self._border.names))), {}

    def step(
        self, actions: Any
    ) -> tuple[Any, NDArray[np.float32], NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]:
        """Take one step in every env.

        Args:
            actions: ``(num_envs, size)`` floats, or ``(num_envs,)`` integers if discrete, in an array of any kind.

        Raises:
            ClosedEnvironmentError: the envs were closed.
            ResetNeeded: nothing was reset yet; or with ``Disabled``, an episode has ended and its env was not reset.
            ValueError: actions of another shape.
        """
        self._require_open()
        if self._is_new:
            raise gymnasium.error.ResetNeeded("call reset before the first step")
        if self._mode is AutoresetMode.DISABLED and self._ended.any():
            raise gymnasium.error.ResetNeeded(
                f"the episodes of envs {np.flatnonzero(self._ended)} have ended; reset them"
            )
        starts = self._ended  # with NextStep, these do nothing in this step but start
        env, action = self.env, self._border.actions(actions)
        if starts.any():
            rows = torch.as_tensor(starts, device=env.device)
            action[rows] = 0
            transition = env.step(action)
            env.restart(rows)
        else:
            transition = env.step(action)
        reward, terms, terminated, truncated, *columns = to_host(
            transition.reward,
            transition.terms,
            transition.terminated,
            transition.truncated,
            *self._border.selected(env.observations),
            *self._border.selected(transition.final_observations),
        )
        fresh, final = columns[: len(columns) // 2], columns[len(columns) // 2 :]
        has_ended, was_cut = (terminated != 0) & ~starts, (truncated != 0) & ~starts
        done = has_ended | was_cut
        reward[starts], terms[starts] = 0.0, 0.0
        info = self._border.named_terms(terms.T)
        infos = with_masks(info, ~starts)
        if self._mode is AutoresetMode.SAME_STEP:
            if done.any():
                infos |= {"final_obs": self._rows(final, done), "_final_obs": done.copy()}
                infos |= {"final_info": with_masks(info, done), "_final_info": done.copy()}
        else:
            self._ended, self._final = done, transition.final_observations
            for new, old in zip(fresh, final, strict=True):
                new[done] = old[done]
        return self._border.assembled(fresh), reward, has_ended, was_cut, infos

    def _rows(self, columns: list[NDArray[np.float32]], mask: NDArray[np.bool_]) -> NDArray[Any]:
        """Return an array of objects ``(num_envs,)`` as Gymnasium has it: the masked envs' observations, else None."""
        rows = np.full(self.num_envs, fill_value=None, dtype=object)
        for row in np.flatnonzero(mask):
            rows[row] = self._border.assembled(columns, row)
        return rows

    def _shown(self, group: str) -> torch.Tensor:
        """Return the observations of a group that were handed out last, where no new episode has begun since."""
        ended = torch.as_tensor(self._ended, device=self.env.device).unsqueeze(1)
        return torch.where(ended, self._final[group], self.env.observations[group])

    def render(self) -> tuple[NDArray[np.uint8], ...] | None:
        """Return a picture ``(height, width, 3)`` of every env; where an episode has just ended, of the next one."""
        if self._picture is None:
            return None
        return tuple(self._picture(row) for row in self.env.state.qpos.to("cpu", torch.float64).numpy())

    def _require_open(self) -> None:
        if self.closed:
            raise gymnasium.error.ClosedEnvironmentError("the envs were closed; make new ones")

    def close_extras(self, **kwargs: Any) -> None:
        """Release the engine, and what draws."""
        self.env.close()
        self._picture = None


def _as_mode(mode: str | AutoresetMode) -> AutoresetMode:
    try:
        return AutoresetMode(mode)
    except ValueError:
        known = ", ".join(each.value for each in AutoresetMode)
        raise UsageError(f"autoreset_mode {mode!r} is unknown; use one of {known}") from None


def _mask_of(options: dict[str, Any] | None, num_envs: int) -> NDArray[np.bool_]:
    # It stays in the options: Gymnasium's wrappers look for it after the call.
    mask = (options or {}).get("reset_mask")
    if mask is None:
        return np.ones(num_envs, dtype=np.bool_)
    if not isinstance(mask, np.ndarray) or mask.dtype != np.bool_ or mask.shape != (num_envs,) or not mask.any():
        raise ValueError(f"options['reset_mask'] must be a numpy array of ({num_envs},) booleans, one of them True")
    return mask
