"""PPO, SAC and TD3 of Stable-Baselines3, in one process (stable-baselines3 2.9)."""

import sys
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from stable_baselines3 import TD3
from stable_baselines3.common.callbacks import CallbackList
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.vec_env import VecEnv, VecNormalize

from lockstep.adapters.sb3.env import Sb3Env, spaces_of
from lockstep.adapters.sb3.policy import Sb3Policy
from lockstep.adapters.sb3.settings import Told, left_out, told
from lockstep.core.rng import stream_seed
from lockstep.core.types import Comm, Task
from lockstep.distributed.torch_state import Replicated
from lockstep.envs.batch_env import BatchEnv
from lockstep.learn.config import TrainConfig

_COUNTERS = ("num_timesteps", "_n_updates", "_episode_num", "_current_progress_remaining")
_LOSSES = {
    "policy_gradient_loss": "surrogate",
    "value_loss": "value",
    "entropy_loss": "entropy",
    "approx_kl": "kl",
    "learning_rate": "learning_rate",
    "actor_loss": "actor",
    "critic_loss": "critic",
    "ent_coef": "temperature",
}
"""What the library logs below ``train/``, and what it is called here."""


class Sb3Learner:
    """A ``GuestLearner``.

    The library's learning rates are fixed, and actor and critic see the observation group ``actor``: where a recipe has
    it otherwise, a line says so before the start. Observations are normalised by the library's ``VecNormalize``, whose
    moments change with every step.

    The generators of torch and numpy that it draws from are seeded for every iteration, so that a resumed training goes
    on bit for bit; but a replay starts empty, and is filled with the policy's own steps before it is learned from, and
    the sums of rewards that ``vec_normalize.norm_reward`` goes by start at zero.
    """

    def __init__(self, config: TrainConfig, env: BatchEnv, comm: Comm) -> None:
        self.config, self.env, self._rank = config, env, comm.rank
        self.told = told(config, env.task, env.num_envs)
        comm.on_main(lambda: _warn(left_out(config, env.task)), "what sb3 leaves out")
        self._iteration = 0
        wrapped: VecEnv = Sb3Env(env)
        self.vec_normalize: VecNormalize | None = None
        if self.told.vec_normalize is not None:
            wrapped = self.vec_normalize = VecNormalize(wrapped, **self.told.vec_normalize)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that PPO is slow on a GPU, and the like
            self.model: Any = self.told.kind(env=wrapped, device=str(env.device), **self.told.arguments)
        self.model.set_logger(Logger(folder=None, output_formats=[]))
        self.total_steps = config.max_iterations * config.agent.num_steps_per_env * env.num_envs
        self.model._setup_learn(self.total_steps, None, True)
        self._callback = CallbackList([])
        self._callback.init_callback(self.model)
        self._is_seeded = False
        self.policy = Sb3Policy(self.model.policy, env.task.num_observations["actor"], env.task.action_space)
        self.merge()

    def require_ready(self) -> None:
        """Do nothing: it is ready when it is made."""

    def collect(self) -> None:
        """Step every env and keep what is learned from."""
        model = self.model
        seed = stream_seed(self.config.seed, f"sb3/iteration {self._iteration}/rank {self._rank}")
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002 - the library draws from it
        if self.config.algorithm == "ppo":
            model.collect_rollouts(model.env, self._callback, model.rollout_buffer, model.n_steps)
            model._update_current_progress_remaining(model.num_timesteps, self.total_steps)
            return
        if not self._is_seeded:  # by the generators of the run, which have their seed by now; it draws first actions
            model.action_space.seed(int(torch.randint(2**31, ())))
            self._is_seeded = True
        model.collect_rollouts(
            model.env,
            self._callback,
            model.train_freq,
            model.replay_buffer,
            action_noise=model.action_noise,
            learning_starts=model.learning_starts,
        )

    def update(self) -> Mapping[str, float]:
        """Learn from it; return losses and the like."""
        model = self.model
        if self.config.algorithm == "ppo":
            model.train()
        elif self._has_enough() and model.gradient_steps:
            model.train(gradient_steps=model.gradient_steps, batch_size=model.batch_size)
        model.policy.set_training_mode(False)
        self._iteration += 1
        logged = {name.removeprefix("train/"): value for name, value in model.logger.name_to_value.items()}
        model.logger.dump()
        losses = {name: float(logged[theirs]) for theirs, name in _LOSSES.items() if theirs in logged}
        if "entropy" in losses:
            losses["entropy"] = -losses["entropy"]
        return losses

    def _has_enough(self) -> bool:
        """Return whether the replay is full, or holds more than the steps that come before the first update."""
        replay = self.model.replay_buffer
        return bool(replay.full or replay.size() * self.env.num_envs > self.model.learning_starts)

    def merge(self) -> None:
        """Give the policy the moments that observations are normalised by."""
        if self.vec_normalize is not None and self.vec_normalize.norm_obs:
            self.policy.normalizer.take_up(self.vec_normalize)

    def replicated(self) -> Mapping[str, Replicated]:
        """Return the networks and the normaliser; there are no other ranks to have them alike."""
        return {"policy": self.policy} | ({"temperature": self._temperature()} if self._has_temperature() else {})

    def state_dict(self) -> dict[str, Any]:
        """Return networks, optimizers, temperature, counters and moments; no replay."""
        state: dict[str, Any] = {
            "parameters": self.model.get_parameters(),
            "counters": {name: getattr(self.model, name) for name in _COUNTERS},
            "iteration": self._iteration,
            "moments": {name: _moments(each) for name, each in self._statistics().items()},
        }
        return state | ({"temperature": self._temperature().detach()} if self._has_temperature() else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self.model.set_parameters(state["parameters"], device=self.model.device)
        for name, value in state["counters"].items():
            setattr(self.model, name, value)
        self._iteration = state["iteration"]
        self._load_moments(state)
        if "temperature" in state:
            with torch.no_grad():
                self._temperature().copy_(state["temperature"])

    def load_weights(self, state: Mapping[str, Any]) -> None:
        """Begin with the networks and moments of a state alone."""
        self.model.policy.load_state_dict(state["parameters"]["policy"])
        self._load_moments(state)

    def retune(self, learning_rate: float) -> None:
        """Take up another learning rate than the state's, unless ``library`` has one; of SAC's temperature too."""
        if "learning_rate" in self.config.library:
            return
        model = self.model
        model.learning_rate = learning_rate
        model._setup_lr_schedule()
        owners = (model.policy, getattr(model, "actor", None), getattr(model, "critic", None))
        optimizers = [getattr(owner, "optimizer", None) for owner in owners]
        for optimizer in filter(None, [*optimizers, getattr(model, "ent_coef_optimizer", None)]):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate

    @staticmethod
    def load_policy(config: TrainConfig, state: Mapping[str, Any], task: Task) -> Sb3Policy:
        """Return the policy of a state, on the CPU."""
        num_envs = config.envs_by_rank(1)[0]
        settings: Told = told(config, task, num_envs)
        kind, size = settings.kind.policy_aliases[settings.arguments["policy"]], task.num_observations["actor"]
        policy = kind(*spaces_of(task), lambda _: 0.0, **_policy_arguments(settings))
        policy.load_state_dict(state["parameters"]["policy"])
        policy.set_training_mode(False)
        loaded = Sb3Policy(policy, size, task.action_space)
        if settings.vec_normalize is not None and "observations" in state["moments"]:
            loaded.normalizer.take_up(_Statistics(settings.vec_normalize, state["moments"]["observations"]))  # type: ignore[arg-type]
        return loaded

    def _look_again(self) -> None:
        """Take up the observations of envs as they are now, by the moments that there are now."""
        model, vec_normalize = self.model, self.vec_normalize
        seen = Sb3Env(self.env).reset() if vec_normalize is None else vec_normalize.venv.reset()
        model._last_obs = seen
        if vec_normalize is not None:
            assert isinstance(seen, np.ndarray)
            vec_normalize.old_obs = seen
            model._last_obs, model._last_original_obs = vec_normalize.normalize_obs(seen), seen

    def _statistics(self) -> dict[str, Any]:
        if self.vec_normalize is None:
            return {}
        rewards = {"returns": self.vec_normalize.ret_rms}
        return rewards | ({"observations": self.vec_normalize.obs_rms} if self.vec_normalize.norm_obs else {})

    def _load_moments(self, state: Mapping[str, Any]) -> None:
        for name, each in self._statistics().items():
            saved = state["moments"][name]
            each.mean, each.var, each.count = saved["mean"].numpy(), saved["var"].numpy(), saved["count"]
        self._look_again()
        self.merge()

    def _has_temperature(self) -> bool:
        return getattr(self.model, "log_ent_coef", None) is not None

    def _temperature(self) -> torch.Tensor:
        """Return the logarithm of the temperature, ``(1,)``."""
        temperature: torch.Tensor = self.model.log_ent_coef
        return temperature


class _Statistics:
    """As much of a ``VecNormalize`` as a policy looks at."""

    def __init__(self, arguments: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
        self.obs_rms = self
        self.mean, self.var = saved["mean"].numpy(), saved["var"].numpy()
        self.epsilon, self.clip_obs = arguments.get("epsilon", 1e-8), arguments.get("clip_obs", 10.0)


def _warn(left: list[str]) -> str:
    """Say what of a recipe is not followed; return "" as all work of rank 0 returns a text."""
    if left:
        print(f"lockstep: warning: rl_library sb3 can't follow the recipe in all: {'; '.join(left)}", file=sys.stderr)  # noqa: T201
    return ""


def _moments(statistics: Any) -> dict[str, Any]:
    mean, var = (torch.from_numpy(np.array(each)) for each in (statistics.mean, statistics.var))
    return {"mean": mean, "var": var, "count": float(statistics.count)}


def _policy_arguments(settings: Told) -> dict[str, Any]:
    """Return the arguments of the policy's class as the algorithm would give them."""
    use_sde = {} if settings.kind is TD3 else {"use_sde": settings.arguments.get("use_sde", False)}
    return dict(settings.arguments["policy_kwargs"]) | use_sde
