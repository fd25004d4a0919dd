"""rl_games' PPO agents on one of several ranks (rl-games 1.6.5): the same update on all of them.

Everything that rl_games would exchange itself, it is kept from (``multi_gpu: false``); what must be exchanged is, here:
gradients by the number of samples, before they are clipped; the KL divergence that steers the learning rate; advantages
and values by moments over all ranks' samples.
"""

import io
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from typing import Any

import torch
from rl_games.algos_torch.a2c_continuous import A2CAgent
from rl_games.algos_torch.a2c_discrete import DiscreteA2CAgent
from rl_games.common.a2c_common import A2CBase
from rl_games.common.algo_observer import AlgoObserver
from rl_games.common.tr_helpers import DefaultRewardsShaper
from torch.nn.utils import clip_grad_norm_

from lockstep.adapters.rl_games.env import RlGamesEnv
from lockstep.adapters.rl_games.normalizer import FrozenMeanStd, freeze
from lockstep.core.types import Comm
from lockstep.distributed.torch_gradients import average_gradients
from lockstep.distributed.torch_statistics import merge_moments, moments_of

Batch = dict[str, Any]


@contextmanager
def silence() -> Iterator[None]:
    """Return the context in which nothing that rl_games prints is seen."""
    with redirect_stdout(io.StringIO()):
        yield


class PooledSchedule:
    """A schedule of rl_games that goes by the KL divergence over all ranks' samples.

    Args:
        schedule: is asked.
        num_samples: of this rank, by which its divergence counts.
        comm: the ranks.
        device: of what is exchanged.
    """

    def __init__(self, schedule: Any, num_samples: int, comm: Comm, device: torch.device) -> None:
        self.schedule, self.num_samples, self.comm, self.device = schedule, num_samples, comm, device

    def update(
        self, current_lr: float, entropy_coef: float, epoch: int, frames: int, kl_dist: float, **others: Any
    ) -> Any:
        """Return the learning rate and the entropy coefficient from now on."""
        own = torch.tensor([kl_dist, 1.0], dtype=torch.float64, device=self.device) * self.num_samples
        total, count = self.comm.gather(own, "kl").sum(0).tolist()
        return self.schedule.update(current_lr, entropy_coef, epoch, frames, total / count, **others)


class LateRewards:
    """A reward shaper of rl_games that also adds what is still to come where the time limit ended an episode."""

    def __init__(self, shape: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.shape = shape
        self.to_come: torch.Tensor | None = None  # (num_envs, 1) discounted, of the step that was just made

    def __call__(self, rewards: torch.Tensor) -> torch.Tensor:
        """Return ``rewards (num_envs, 1)`` as the agent learns from them."""
        shaped = self.shape(rewards)
        return shaped if self.to_come is None else shaped + self.to_come


class NoMeter:
    """Stands where rl_games counts finished episodes, which our envs do already."""

    current_size = 0

    def update(self, values: torch.Tensor) -> None:
        """Count nothing."""

    def clear(self) -> None:
        """Forget nothing."""


class InStep(A2CBase):  # type: ignore[misc]
    """What both agents of rl_games have on top: collecting and learning one by one, and the exchanges.

    Args:
        params: what stands below ``params`` in a configuration of rl_games; it is changed.
        env: this rank's envs.
        comm: the ranks.

    Attributes:
        plain_model: actor, and critic unless there is a central value network; not compiled.
        plain_central_value: the model of the central value network, or None.
    """

    model: Any
    scheduler: Any
    writer: Any
    plain_central_value: Any
    _central_value_loss: Any

    def __init__(self, params: dict[str, Any], env: RlGamesEnv, comm: Comm) -> None:
        self.comm = comm
        config = params["config"]
        if env.env.device.type == "cpu":
            config["mixed_precision"] = False  # which rl_games has for CUDA alone
        self._standardises = config["normalize_advantage"]
        self._late = LateRewards(DefaultRewardsShaper(**config["reward_shaper"]))
        self._batch: Batch | None = None
        with silence(), tempfile.TemporaryDirectory() as folder:
            config |= {
                "normalize_advantage": False,  # by this rank's samples alone
                "reward_shaper": self._late,
                "features": {"observer": AlgoObserver()},
                "env_info": env.get_env_info(),
                "vec_env": env,
                "device": str(env.env.device),
                "full_experiment_name": "run",
                "train_dir": folder,  # makes folders and a file of events there, come what may
            }
            super().__init__("run", params)
            self.writer.close()
            self.writer = None
            self._prepare_networks(config.get("torch_compile", False))
            self.init_tensors()
        self.game_rewards = self.game_shaped_rewards = self.game_lengths = NoMeter()
        if self.is_adaptive_lr:
            self.scheduler = PooledSchedule(self.scheduler, self.num_actors, comm, env.env.device)

    def _prepare_networks(self, compiled: Any) -> None:
        self.plain_model, self.plain_central_value = self.model, None
        freeze(self.plain_model)
        if self.has_central_value:
            net = self.central_value_net
            self.plain_central_value, net.writter = net.model, None
            freeze(net.model)
            # Between its gradients and its step there is no other place of rl_games to reduce and clip at.
            self._clips_central_value, net.truncate_grads = net.truncate_grads, False
            net.optimizer.register_step_pre_hook(self._before_central_value_step)
        if self.normalize_value:
            model = self.plain_central_value if self.has_central_value else self.plain_model
            self.value_mean_std = model.value_mean_std
        modes = compiled if isinstance(compiled, Mapping) else {"mode": compiled if isinstance(compiled, str) else None}
        if compiled:
            mode = modes.get("mode") or "default"
            self.model = torch.compile(self.plain_model, mode=mode)
            if self.has_central_value:
                mode = modes.get("critic_mode") or mode
                self.central_value_net.model = torch.compile(self.plain_central_value, mode=mode)

    # --- an iteration ----------------------------------------------------------------------------------------------

    def collect(self) -> None:
        """Step every env ``horizon_length`` times and keep what was seen."""
        self.obs = self.obs_to_tensors(self.vec_env.reset())
        self.set_eval()
        play = super().play_steps_rnn if self.is_rnn else super().play_steps
        with torch.no_grad():
            self._batch = play()

    def play_steps(self) -> Batch:
        """Return what ``collect`` has kept, once; the networks are updated between the two."""
        batch, self._batch = self._batch, None
        assert batch is not None
        return batch

    play_steps_rnn = play_steps

    def learn(self) -> dict[str, float]:
        """Learn from what was collected; return losses and the like, means over this rank's samples."""
        self._central_value_loss = None
        self.update_epoch()
        _, _, _, _, surrogates, values, *others, _, _ = self.train_epoch()
        *bounds, entropies, divergences = others
        self.dataset.update_values_dict(None)
        means = {"surrogate": surrogates, "value": values, "entropy": entropies, "kl": divergences}
        if bounds and self.bound_loss_type != "none":
            means["bound"] = bounds[0]
        losses = {name: float(torch.stack(each).detach().mean()) for name, each in means.items()}
        if self.has_central_value:
            self.central_value_net.dataset.update_values_dict(None)
            losses["value"] = self._central_value_loss
        self.model.eval()
        return losses | {"learning_rate": float(self.last_lr)}

    def merge(self) -> None:
        """Let the normalisers of observations take up what was collected; they were frozen since the last time."""
        seen = self.experience_buffer.tensor_dict
        for model, name in ((self.plain_model, "obses"), (self.plain_central_value, "states")):
            normalizer = getattr(model, "running_mean_std", None)
            if isinstance(normalizer, FrozenMeanStd):
                normalizer.merge_(seen[name].flatten(0, 1), self.comm)

    # --- where rl_games asks ---------------------------------------------------------------------------------------

    def env_step(self, actions: torch.Tensor) -> Any:
        """Step the envs; note the value of where the time limit ended an episode, for ``LateRewards``."""
        result = super().env_step(actions)
        self._late.to_come = None
        rows = self.vec_env.last.truncated.nonzero().squeeze(1)
        if self.value_bootstrap and len(rows):
            self._late.to_come = torch.zeros((self.num_actors, 1), device=self.device)
            self._late.to_come[rows] = self.gamma * self._final_values(rows)
        return result

    def _final_values(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the values ``(num_rows, 1)`` of the observations that the last step of some envs led to."""
        final = self.vec_env.grouped(self.vec_env.last.final_observations)
        central = self.has_central_value
        net = self.central_value_net if central else self
        memories = None if net.rnn_states is None else [part[:, rows].contiguous() for part in net.rnn_states]
        model = self.plain_central_value if central else self.plain_model
        observations = final["states" if central else "obs"][rows]
        result = model({"is_train": False, "prev_actions": None, "obs": observations, "rnn_states": memories})
        values: torch.Tensor = result["values"]
        return values

    def get_values(self, obs: Any) -> torch.Tensor:
        """Return the values at the end of a rollout, which the memory of a critic is not to take for one more step."""
        net = self.central_value_net if self.has_central_value else None
        memory = getattr(net, "rnn_states", None)
        values: torch.Tensor = super().get_values(obs)
        if net is not None:
            net.rnn_states = memory
        return values

    def prepare_dataset(self, batch_dict: Batch) -> None:
        """Make samples of a rollout, with values and advantages scaled by moments over all ranks."""
        if self.normalize_value and not self.config.get("freeze_critic", False):
            for name in ("values", "returns"):
                self.value_mean_std.merge_(batch_dict[name], self.comm)
        super().prepare_dataset(batch_dict)
        if self._standardises:
            samples = self.dataset.values_dict
            advantages = samples["advantages"]
            moments = merge_moments(moments_of(advantages), comm=self.comm)
            std = (moments.m2 / (moments.count - 1.0).clamp(min=1.0)).sqrt()
            samples["advantages"] = ((advantages - moments.mean) / (std + 1e-8)).to(advantages.dtype)

    def train_central_value(self) -> float:
        """Train the critic, if it is a network of its own."""
        loss: float = super().train_central_value()
        self._central_value_loss = loss
        return loss

    def trancate_gradients_and_step(self) -> None:
        """Average over all ranks' samples, then clip and step; rl_games spells it so."""
        average_gradients(self.plain_model, self.minibatch_size, comm=self.comm)
        super().trancate_gradients_and_step()

    def _before_central_value_step(self, optimizer: Any, arguments: Any, named: Any) -> None:
        net = self.central_value_net
        average_gradients(self.plain_central_value, net.minibatch_size, comm=self.comm)
        if self._clips_central_value:
            clip_grad_norm_(self.plain_central_value.parameters(), net.grad_norm)


class ContinuousAgent(InStep, A2CAgent):  # type: ignore[misc]
    """PPO with a Gaussian policy."""


class DiscreteAgent(InStep, DiscreteA2CAgent):  # type: ignore[misc]
    """PPO with a categorical policy."""


def make_agent(params: dict[str, Any], env: RlGamesEnv, comm: Comm) -> Any:
    """Return the agent that a configuration of rl_games names."""
    kind = ContinuousAgent if params["algo"]["name"] == "a2c_continuous" else DiscreteAgent
    return kind(params, env, comm)
