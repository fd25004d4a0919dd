"""A batch of envs in torch: engine and task, auto-reset, time limits. The only code that writes their state."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import array_api_compat.torch as xp
import numpy
import torch

from lockstep.core.rng import Stream
from lockstep.core.types import Engine, Observations, State, Task
from lockstep.envs.config import EnvConfig
from lockstep.envs.episodes import EpisodeStatistics, summarise


class Transition(NamedTuple):
    """What one env step gave."""

    observations: Observations  # each (num_envs, num_observations): of the new episode where one ended
    reward: torch.Tensor  # (num_envs,)
    terms: torch.Tensor  # (num_envs, num_terms): reward terms, then metrics, in the order of the task
    terminated: torch.Tensor  # (num_envs,) bool: ended for good, by the task or because physics diverged
    truncated: torch.Tensor  # (num_envs,) bool: ended by the time limit alone; its value must be bootstrapped
    final_observations: Observations  # as observations, but of the step itself, before any reset

    @property
    def done(self) -> torch.Tensor:
        """``(num_envs,)`` bool: an episode ended here."""
        return self.terminated | self.truncated


def looking_is_free(device: torch.device) -> bool:
    """Return whether the host may look at values without having to wait for the device."""
    return device.type == "cpu"


class _Noise(NamedTuple):
    first_step: int
    reset: torch.Tensor  # (num_steps, num_envs, task.num_reset_noise)
    step: torch.Tensor  # (num_steps, num_envs, task.num_step_noise)


class TorchEnv:
    """``num_envs`` simulated worlds of one task on one device.

    Args:
        task: the pure functions of the task.
        engine: steps the physics of ``num_envs`` envs.
        config: time limit and the like.
        seed: the run's seed; streams are keyed by it, ``streams`` and the global env id.
        device, dtype: of all tensors handed out; float32 or float64.
        first_env_id: global id of this process's first env.
        streams: prefix of the streams' purposes; an evaluation has its own.
        noise_block: env steps whose noise is drawn at once (a rollout's length).
    """

    def __init__(
        self,
        task: Task,
        engine: Engine,
        config: EnvConfig,
        *,
        seed: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        first_env_id: int = 0,
        streams: str = "train",
        noise_block: int = 1,
    ) -> None:
        self.task, self.engine, self.config = task, engine, config
        self.num_envs = engine.num_envs
        self.device, self.dtype = device, dtype
        self.noise_block = noise_block
        space = task.action_space
        self._action_shape = (self.num_envs, space.size) if space.kind == "continuous" else (self.num_envs,)
        self.env_ids = first_env_id + torch.arange(self.num_envs, dtype=torch.int32, device=device)
        self._streams = streams
        self.seed_streams(seed)
        self._num_rewards = len(task.reward_terms)
        self.episodes = EpisodeStatistics(self._num_rewards + len(task.metric_terms), self.num_envs, device)
        self.num_diverged = torch.zeros((), dtype=torch.int64, device=device)
        self.reset()

    @property
    def state(self) -> State:
        """What the task sees of all envs now, each array ``(num_envs, ...)``; not to be written to."""
        return self._state

    def seed_streams(self, seed: int) -> None:
        """Draw from the streams of another seed from now on; each env keeps the variant of its model that it has."""
        self._reset_stream = Stream(seed, f"{self._streams}/reset", xp, self.device)
        self._step_stream = Stream(seed, f"{self._streams}/step", xp, self.device)
        self._length_stream = Stream(seed, f"{self._streams}/initial_episode_length", xp, self.device)
        self._noise: _Noise | None = None

    # --- the steps of an episode ---------------------------------------------------------------------------------

    def reset(self) -> Observations:
        """Start every env anew, at counter 0 of its streams; return the observations."""
        self.num_steps = 0
        everywhere = torch.ones(self.num_envs, dtype=torch.bool, device=self.device)
        self.episode_length = self._initial_episode_lengths()
        self.episodes.restart(whole=self.episode_length == 0)
        self.num_diverged.zero_()
        reset_noise, step_noise = self._noise_at(0)
        self._state = self._initial_state(everywhere, reset_noise)
        self.observations = self.task.observations(xp, self._state, step_noise)
        self._check_observations()
        return self.observations

    def restart(self, mask: torch.Tensor) -> Observations:
        """Break off the episodes of the envs of ``mask (num_envs,)`` bool; return the observations of all.

        New ones begin, from their beginning, as after a step that ended them; the other envs stay as they are. Every
        call counts as a step of the streams, so that no two of them start the same episode.
        """
        self.num_steps += 1
        self._state, self.observations = self._begin_episodes(self._state, mask, self.observations)
        self.episode_length = torch.where(mask, 0, self.episode_length)
        self.episodes.forget(mask)
        return self.observations

    def step(self, action: torch.Tensor) -> Transition:
        """Apply one action per env: ``(num_envs, size)`` floats, or ``(num_envs,)`` integers if discrete."""
        if tuple(action.shape) != self._action_shape:
            raise ValueError(f"actions have shape {tuple(action.shape)}, not {self._action_shape}")
        self.num_steps += 1
        _, step_noise = self._noise_at(self.num_steps)
        state, diverged = self._advance(action, step_noise)
        terms = self._terms(state, action)
        # A diverged env has no meaningful reward; it must not reach the sums either.
        terms = torch.where(diverged.unsqueeze(1), torch.zeros_like(terms), terms)
        terminated = self.task.terminations(xp, state) | diverged
        self.episode_length += 1
        truncated = (self.episode_length >= self.config.max_episode_steps) & ~terminated
        done = terminated | truncated
        final_observations = self.task.observations(xp, state, step_noise)
        self.episodes.add(terms, done)
        self.num_diverged += diverged.sum()
        self._state, self.observations = self._begin_episodes(state, done, final_observations)
        self.episode_length = torch.where(done, 0, self.episode_length)
        reward = terms[:, : self._num_rewards].sum(1)
        return Transition(self.observations, reward, terms, terminated, truncated, final_observations)

    def summarise(self, sums: Sequence[float]) -> dict[str, float | None]:
        """Turn sums over finished episodes into metrics by name, as a log line has them.

        Args:
            sums: as ``episodes.take`` gives them, on the host (``tolist``); or those of all ranks added up.

        Returns:
            ``mean_return``, ``mean_episode_length`` in env steps, ``num_episodes``; ``reward/<term>``, the mean over
            episodes of the term's sum; ``metric/<name>``, the mean over env steps. Without an episode means are None.
        """
        return summarise(sums, self.task.reward_terms, self.task.metric_terms)

    def _terms(self, state: State, action: torch.Tensor) -> torch.Tensor:
        rewards = self.task.rewards(xp, state, action)
        metrics = self.task.metrics(xp, state, action)
        columns = (
            *(rewards[name] for name in self.task.reward_terms),
            *(metrics[name] for name in self.task.metric_terms),
        )
        return torch.stack(columns, dim=1)

    def _advance(self, action: torch.Tensor, step_noise: torch.Tensor) -> tuple[State, torch.Tensor]:
        ctrl = self.task.control(xp, self._state, action)
        push = self.task.push(xp, self._state, step_noise)
        info = self.engine.step(*self._all_to_engine(ctrl, *(() if push is None else (push,))))
        state = State(
            qpos=self._from_engine(info.qpos),
            qvel=self._from_engine(info.qvel),
            ctrl=ctrl,
            sensordata=self._from_engine(info.sensordata),
            variables=self._state.variables,
        )
        diverged = torch.as_tensor(info.diverged, device=self.device)
        return self.task.advance(xp, state, action, step_noise), diverged

    def _begin_episodes(
        self, state: State, done: torch.Tensor, observations: Observations
    ) -> tuple[State, Observations]:
        """Return the state and its observations with the envs of ``done`` at new starts."""
        reset_noise, step_noise = self._noise_at(self.num_steps)
        if not looking_is_free(self.device):
            initial = self._initial_state(done, reset_noise)
            fresh = self.task.observations(xp, initial, step_noise)
            return _merge(partial(_where, done), initial, state, fresh, observations)
        # Most steps end few episodes.
        rows = done.nonzero().squeeze(1)
        if not rows.numel():
            return state, observations
        initial = self._initial_state(done, reset_noise, rows)
        fresh = self.task.observations(xp, initial, step_noise[rows])
        return _merge(partial(_replace_rows, rows), initial, state, fresh, observations)

    def _initial_state(self, mask: torch.Tensor, reset_noise: torch.Tensor, rows: torch.Tensor | None = None) -> State:
        """Put the engine's envs of ``mask`` at a new start; return a state that is meant for those alone.

        With ``rows (num_rows,)``, the indices of those envs, it has their rows only.
        """
        qpos, qvel, variables = self.task.reset(xp, reset_noise if rows is None else reset_noise[rows])
        if rows is None:
            sensordata = self._reset_engine(mask, qpos, qvel)
        else:
            everywhere = (tensor.new_zeros((self.num_envs, tensor.shape[1])) for tensor in (qpos, qvel))
            places = (whole.index_copy(0, rows, own) for whole, own in zip(everywhere, (qpos, qvel), strict=True))
            sensordata = self._reset_engine(mask, *places)[rows.numpy()]
        ctrl = torch.zeros((qpos.shape[0], self.engine.num_controls), dtype=self.dtype, device=self.device)
        return State(qpos, qvel, ctrl, self._from_engine(sensordata), variables)

    def _reset_engine(self, mask: torch.Tensor, qpos: torch.Tensor, qvel: torch.Tensor) -> Any:
        engine_mask = self._to_engine(mask)
        if self.engine.takes_numpy and not engine_mask.any():
            # Most steps end no episode: then a GPU need not be asked for states that nobody reads.
            return self.engine.reset(engine_mask, None, None)
        return self.engine.reset(engine_mask, *self._all_to_engine(qpos, qvel))

    def _initial_episode_lengths(self) -> torch.Tensor:
        if not self.config.randomize_initial_episode_length:
            return torch.zeros(self.num_envs, dtype=torch.int32, device=self.device)
        uniform = self._length_stream.uniform(self._length_stream.counters(0, 1), self.env_ids, 1, self.dtype)[0, :, 0]
        return cast(torch.Tensor, (uniform * self.config.max_episode_steps).to(torch.int32))

    def _check_observations(self) -> None:
        for name, size in self.task.num_observations.items():
            shape = tuple(self.observations[name].shape)
            if shape != (self.num_envs, size):
                raise ValueError(f"task gives observations '{name}' of shape {shape}, not ({self.num_envs}, {size})")

    # --- noise and conversions -----------------------------------------------------------------------------------

    def _noise_at(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        noise = self._noise
        if noise is None or not noise.first_step <= step < noise.first_step + noise.reset.shape[0]:
            counters = self._step_stream.counters(step, self.noise_block)
            noise = self._noise = _Noise(
                first_step=step,
                reset=self._reset_stream.uniform(counters, self.env_ids, self.task.num_reset_noise, self.dtype),
                step=self._step_stream.uniform(counters, self.env_ids, self.task.num_step_noise, self.dtype),
            )
        return noise.reset[step - noise.first_step], noise.step[step - noise.first_step]

    def _from_engine(self, array: Any) -> torch.Tensor:
        # An engine in numpy lends its buffers: no copy on a CPU in float64, one conversion otherwise.
        tensor = torch.from_numpy(array) if isinstance(array, numpy.ndarray) else array
        return tensor.to(device=self.device, dtype=self.dtype)

    def _to_engine(self, tensor: torch.Tensor) -> Any:
        if not self.engine.takes_numpy:
            return tensor
        host = tensor.cpu()
        return host.numpy() if host.dtype == torch.bool else host.to(torch.float64).numpy()

    def _all_to_engine(self, *tensors: torch.Tensor) -> Sequence[Any]:
        """Return tensors ``(num_envs, columns)`` in one copy, since each from a GPU to the host waits for the GPU."""
        if not self.engine.takes_numpy:
            return tensors
        ends = numpy.cumsum([tensor.shape[1] for tensor in tensors])
        return numpy.split(self._to_engine(torch.cat(tensors, dim=1)), ends[:-1], axis=1)

    # --- saving and continuing -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return everything a bitwise continuation needs; per-env tensors lead with the env axis (local order)."""
        return {
            "num_steps": self.num_steps,
            "engine": {name: torch.as_tensor(array).clone() for name, array in self.engine.state_dict().items()},
            "state": {name: getattr(self._state, name).clone() for name in State._fields if name != "variables"},
            "variables": {name: tensor.clone() for name, tensor in self._state.variables.items()},
            "observations": {name: tensor.clone() for name, tensor in self.observations.items()},
            "episode_length": self.episode_length.clone(),
            "episodes": self.episodes.state_dict(),
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue where ``state_dict`` was taken."""
        self.num_steps = saved["num_steps"]
        self._noise = None
        engine_state = saved["engine"]
        if self.engine.takes_numpy:
            engine_state = {name: tensor.cpu().numpy() for name, tensor in engine_state.items()}
        self.engine.load_state_dict(engine_state)
        self._state = State(
            **{name: self._own(tensor) for name, tensor in saved["state"].items()},
            variables={name: self._own(tensor) for name, tensor in saved["variables"].items()},
        )
        self.observations = {name: self._own(tensor) for name, tensor in saved["observations"].items()}
        self.episode_length = self._own(saved["episode_length"])
        self.episodes.load_state_dict(saved["episodes"])

    def _own(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy on this env's device: what was saved must not change with the env."""
        return tensor.to(self.device, copy=True)

    def close(self) -> None:
        """Release the engine."""
        self.engine.close()


def _where(mask: torch.Tensor, new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    return torch.where(mask.reshape(-1, *(1,) * (old.ndim - 1)), new, old)


def _replace_rows(rows: torch.Tensor, new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    return old.index_copy(0, rows, new.to(old.dtype))


def _merge(
    put: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    initial: State,
    state: State,
    fresh: Observations,
    observations: Observations,
) -> tuple[State, Observations]:
    """Return state and observations with what is new in its place."""
    merged = State(
        qpos=put(initial.qpos, state.qpos),
        qvel=put(initial.qvel, state.qvel),
        ctrl=put(initial.ctrl, state.ctrl),
        sensordata=put(initial.sensordata, state.sensordata),
        variables={name: put(initial.variables[name], old) for name, old in state.variables.items()},
    )
    return merged, {name: put(fresh[name], old) for name, old in observations.items()}
