"""PPO of RSL-RL whose ranks stay in step: its own losses and loop, with what is shared done once and exactly."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from rsl_rl.algorithms import PPO
from rsl_rl.storage import RolloutStorage
from tensordict import TensorDict
from torch import nn

from lockstep.core.types import Comm, Observations
from lockstep.distributed.torch_gradients import average_gradients
from lockstep.distributed.torch_moments import merge_over_ranks
from lockstep.distributed.torch_statistics import Number, moments_of


class Steering(NamedTuple):
    """How the learning rate follows the KL divergence; ``desired_kl`` None: it does not."""

    desired_kl: float | None
    min_learning_rate: float
    max_learning_rate: float

    def next(self, learning_rate: float, kl: float) -> float:
        """Return the learning rate after a minibatch, as RSL-RL has it but for its fixed bounds."""
        assert self.desired_kl is not None
        if kl > 2.0 * self.desired_kl:
            return max(self.min_learning_rate, learning_rate / 1.5)
        if 0.0 < kl < self.desired_kl / 2.0:
            return min(self.max_learning_rate, learning_rate * 1.5)
        return learning_rate


class InStepPPO(PPO):  # type: ignore[misc]
    """RSL-RL's PPO; ``join`` comes before the first step.

    Of what RSL-RL exchanges in each minibatch (the KL divergence, the learning rate, gradients) one message is made,
    in which every rank counts by its samples. It also leaves the advantages' mean and standard deviation to each rank:
    here they are those of all samples. A time-out is bootstrapped with the value of the observation that it led to, not
    of the one before.
    """

    normalize_advantage_per_mini_batch: bool

    def join(self, comm: Comm, steering: Steering, normalize_advantages: bool) -> None:
        """Take up what the constructor can't be given.

        Args:
            comm: the ranks.
            steering: instead of ``schedule`` and ``desired_kl``.
            normalize_advantages: over the rollout, unless it is done per minibatch.
        """
        self.comm, self.steering = comm, steering
        self.schedule = "fixed"  # the library's own steering would exchange two messages more per minibatch
        self.normalize_advantages = normalize_advantages and not self.normalize_advantage_per_mini_batch
        storage = self.storage
        is_recurrent = self.actor.is_recurrent or self.critic.is_recurrent
        block = storage.num_transitions_per_env
        self.num_samples = (
            storage.num_envs // self.num_mini_batches * block
            if is_recurrent
            else storage.num_envs * block // self.num_mini_batches
        )
        """Of this rank in each minibatch."""
        self._kl = nn.Parameter(torch.zeros((), device=self.device))  # its gradient travels with the others
        self._kls: list[float] = []
        self._batch = RolloutStorage.Batch()
        for name in ("mini_batch_generator", "recurrent_mini_batch_generator"):
            setattr(storage, name, self._noting(getattr(storage, name)))

    def models(self) -> dict[str, nn.Module]:
        """Return what is trained or counts, by name."""
        rnd = {} if self.rnd is None else {"rnd": self.rnd}
        return {"actor": self.actor, "critic": self.critic} | rnd

    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """Return them by name."""
        rnd = {} if self.rnd is None else {"rnd_optimizer": self.rnd.optimizer}
        return {"optimizer": self.optimizer} | rnd

    def counters(self) -> dict[str, Any]:
        """Return the numbers that go on from iteration to iteration."""
        return {
            "learning_rate": self.learning_rate,
            "num_rnd_steps": 0 if self.rnd is None else self.rnd.update_counter,
        }

    def load_counters(self, counters: dict[str, Any]) -> None:
        """Take up what ``counters`` returned."""
        self.learning_rate = counters["learning_rate"]
        if self.rnd is not None:
            self.rnd.update_counter = counters["num_rnd_steps"]

    # --- what RSL-RL calls ------------------------------------------------------------------------------------------

    def process_env_step(
        self, obs: TensorDict, rewards: torch.Tensor, dones: torch.Tensor, extras: dict[str, Any]
    ) -> None:
        """Record a step; ``extras`` has ``time_outs`` and ``final_observations``."""
        time_outs = extras["time_outs"]
        if time_outs.any():
            values = self._values_at(extras["final_observations"])
            rewards = rewards + self.gamma * torch.where(time_outs, values, 0.0)
        super().process_env_step(obs, rewards, dones, {})

    def compute_returns(self, obs: TensorDict) -> None:
        """Compute returns and advantages; those are normalised in ``update``, together with the other ranks'."""
        per_mini_batch, self.normalize_advantage_per_mini_batch = self.normalize_advantage_per_mini_batch, True
        super().compute_returns(obs)
        self.normalize_advantage_per_mini_batch = per_mini_batch

    def update(self) -> dict[str, Number]:
        """Run the update; return RSL-RL's mean losses of this rank, ``kl`` if it steers, and ``learning_rate``."""
        if self.normalize_advantages:
            self._normalize_advantages()
        self._kls = []
        losses: dict[str, Number] = super().update()  # of a rank without envs means over nothing
        if self._kls:
            losses["kl"] = sum(self._kls) / len(self._kls)
        return losses | {"learning_rate": self.learning_rate}

    def reduce_parameters(self) -> None:
        """Average the gradients over all samples, and steer the learning rate of this very step."""
        trained = [self.actor, self.critic] if self.rnd is None else [self.actor, self.critic, self.rnd.predictor]
        if self.steering.desired_kl is None:
            average_gradients(trained, self.num_samples, comm=self.comm)
            return
        self._kl.grad = self._own_kl()
        average_gradients([*trained, self._kl], self.num_samples, comm=self.comm)
        self._kls.append(float(self._kl.grad))
        self.learning_rate = self.steering.next(self.learning_rate, self._kls[-1])
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate

    # --- inside -----------------------------------------------------------------------------------------------------

    def _noting(self, generate: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        """Return a generator of minibatches that lets ``reduce_parameters`` see the one that is learned from."""

        def generator(*arguments: Any) -> Iterator[Any]:
            for self._batch in generate(*arguments):
                yield self._batch

        return generator

    @torch.no_grad()
    def _own_kl(self) -> torch.Tensor:
        before = self._batch.old_distribution_params
        now = tuple(parameter[: before[0].shape[0]] for parameter in self.actor.output_distribution_params)
        kl: torch.Tensor = self.actor.get_kl_divergence(before, now)
        return kl.float().mean()

    def _values_at(self, observations: Observations) -> torch.Tensor:
        """Return the critic's values ``(num_envs,)``, and leave its memory as it is."""
        memory = self.critic.get_hidden_state()
        values: torch.Tensor = self.critic(observations).squeeze(1)
        self.critic.reset(hidden_state=memory)
        return values

    def _normalize_advantages(self) -> None:
        advantages = self.storage.advantages  # (num_steps, num_envs, 1)
        (moments,) = merge_over_ranks([moments_of(advantages.reshape(-1))], self.comm)
        std = (moments.m2 / (moments.count - 1.0).clamp(min=1.0)).sqrt()
        shift, scale = (number.to(advantages.dtype) for number in (moments.mean, std))
        self.storage.advantages = (advantages - shift) / (scale + 1e-8)
