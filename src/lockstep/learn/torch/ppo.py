"""Proximal policy optimisation (Schulman et al. 2017, arXiv:1707.06347): from a rollout to one policy update.

Written against a ``Comm``: the update of several ranks is that of one process with all their envs.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any, NamedTuple

import torch

from lockstep.core import beats
from lockstep.core.types import Comm, FlatGradients
from lockstep.learn.config import PpoConfig
from lockstep.learn.torch.gae import generalised_advantages
from lockstep.learn.torch.gradients import GradientBuffer
from lockstep.learn.torch.losses import adapt_learning_rate_
from lockstep.learn.torch.minibatches import Batch, Dealer, Sequences
from lockstep.learn.torch.networks import ActorCritic, PolicyState
from lockstep.learn.torch.optimizer import Adam
from lockstep.learn.torch.passes import RIDERS as RIDERS
from lockstep.learn.torch.passes import add_gradients_, add_gradients_by_autograd_, are_spelled_out
from lockstep.learn.torch.rollout import Rollout
from lockstep.learn.torch.statistics import Moments, merge_over_ranks, standardise
from lockstep.learn.torch.values import rollout_values


class Samples(NamedTuple):
    """A rollout made ready for the update."""

    batch: Batch  # leading axes (num_steps, num_envs)
    actor_moments: Moments  # of the raw observations, over all ranks
    critic_moments: Moments
    critic_state: torch.Tensor  # the critic's memory after the rollout


class UpdateResult(NamedTuple):
    """What an update gave, on the device."""

    means: torch.Tensor  # (num_riders,) over all minibatches, in the order of RIDERS
    gradient_norm: torch.Tensor  # () mean over minibatches, before clipping
    learning_rate: torch.Tensor  # () after the last minibatch
    nonfinite: torch.Tensor  # (world_size,) 1 where a rank's sums were not finite; nothing was changed from then on


class Ppo:
    """Optimizer, learning rate and gradient buffer of one policy.

    Args:
        config: the learner's settings.
        policy: already on its device and of its final dtype.
        comm: the ranks.
        dealer: deals this rank's samples to minibatches.
        autocast: run the networks in bfloat16 (parameters, gradients and losses stay as they are).
    """

    def __init__(self, config: PpoConfig, policy: ActorCritic, comm: Comm, dealer: Dealer, autocast: bool) -> None:
        self.config, self.policy, self.comm, self.dealer = config, policy, comm, dealer
        parameters = dict(policy.named_parameters())
        first = next(iter(parameters.values()))
        self.gradients = GradientBuffer(parameters, RIDERS, comm.world_size)
        # float32 whatever the parameters are: CUDA's fused Adam reads the rate as such.
        self.learning_rate = torch.tensor(config.learning_rate, dtype=torch.float32, device=first.device)
        self.optimizer = Adam(parameters.values(), lr=self.learning_rate, fused=True)
        # Fused Adam leaves everything as it is while this is 1: a bad step is skipped without asking the device.
        self._skip = torch.zeros((), dtype=torch.float32, device=first.device)
        self.optimizer.found_inf = self._skip  # type: ignore[attr-defined]
        self._autocast = autocast
        self._prepare_optimizer_state()

    def _prepare_optimizer_state(self) -> None:
        """Make now what Adam makes in its first step: every rank has all that must be the same from the start."""
        for parameter in self.gradients.parameters.values():
            self.optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }

    def replicated_state(self) -> dict[str, torch.Tensor]:
        """Return what must be the same on every rank, by name: the tensors themselves, none of them a copy."""
        state = {f"policy.{name}": tensor for name, tensor in self.policy.state_dict().items()}
        for name, parameter in self.gradients.parameters.items():
            own = self.optimizer.state[parameter].items()
            state |= {f"optimizer.{name}.{kind}": tensor for kind, tensor in own}
        return state | {"learning_rate": self.learning_rate}

    def precision(self) -> AbstractContextManager[object]:
        """Return the context that the networks run in."""
        if not self._autocast:
            return nullcontext()
        return torch.autocast(self.learning_rate.device.type, dtype=torch.bfloat16)

    def load_optimizer(self, saved: dict[str, Any], learning_rate: torch.Tensor) -> None:
        """Take up the optimizer's moments and the learning rate of a checkpoint."""
        self.optimizer.load_state_dict(saved)
        # Loading replaces the rate by a copy; the one that the schedule steers must be the one that is used.
        self.learning_rate.copy_(learning_rate)
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate

    def prepare(self, rollout: Rollout, last_observations: torch.Tensor, state: PolicyState) -> Samples:
        """Normalise the rollout's observations in place, estimate advantages and standardise them over all ranks.

        Args:
            rollout: as collected.
            last_observations: ``(num_envs, num_critic)`` raw, where the next rollout starts.
            state: memories at the start of the rollout.
        """
        policy, config = self.policy, self.config
        moments = [Moments.of(rollout.actor_observations), Moments.of(rollout.critic_observations)]
        rollout.actor_observations.copy_(policy.actor_normalizer(rollout.actor_observations))
        for buffer in (rollout.critic_observations, rollout.final_critic_observations):
            buffer.copy_(policy.critic_normalizer(buffer))
        with self.precision():
            last = policy.critic_normalizer(last_observations)
            values, next_values, critic_state = rollout_values(policy, rollout, last, state, config.chunk_size)
        advantages = generalised_advantages(
            rollout.rewards, values, next_values, rollout.terminated, rollout.done, config.gamma, config.lam
        )
        moments.append(Moments.of(advantages.unsqueeze(-1)))
        actor_moments, critic_moments, advantage_moments = merge_over_ranks(moments, self.comm)
        targets = advantages + values
        if config.normalize_advantages:
            advantages = standardise(advantages, advantage_moments)
        batch = Batch(
            actor_observations=rollout.actor_observations,
            critic_observations=rollout.critic_observations,
            actions=rollout.actions,
            log_probs=rollout.log_probs,
            distributions=rollout.distributions,
            values=values,
            advantages=advantages,
            targets=targets,
            done=rollout.done,
        )
        return Samples(batch, actor_moments, critic_moments, critic_state)

    def update(self, samples: Samples, state: PolicyState, iteration: int) -> UpdateResult:
        """Run all epochs over the samples; ``state`` holds the memories at the start of the rollout."""
        means = torch.zeros_like(self.gradients.means)
        norm = torch.zeros_like(self.gradients.flat[0])
        flags = torch.zeros_like(self.gradients.flags)
        minibatches = self.minibatches(samples, state, iteration)
        upcoming = deque(islice(minibatches, 1))
        while upcoming:
            self.accumulate(upcoming.popleft(), self.comm.last_backward)
            # Dealing the next minibatch fills the time that the gradients travel, and that a slower rank is late.
            self.comm.mean_gradients_(self.gradients, lambda: upcoming.extend(islice(minibatches, 1)))
            flags = torch.maximum(flags, self.gradients.flags)
            norm += self._step(skip=flags.amax())
            means += self.gradients.means
        count = self.config.num_learning_epochs * self.config.num_mini_batches
        return UpdateResult(means / count, norm / count, self.learning_rate.clone(), flags)

    def merge_normalizers(self, samples: Samples) -> None:
        """Let the normalisers take up the rollout's observations; they were frozen since the last time."""
        self.policy.actor_normalizer.merge_(samples.actor_moments)
        self.policy.critic_normalizer.merge_(samples.critic_moments)

    def minibatches(self, samples: Samples, state: PolicyState, iteration: int) -> Iterator[Sequences]:
        """Yield every minibatch of every epoch of an iteration; the same ones each time they are asked for."""
        num_epochs = self.config.num_learning_epochs
        for epoch in range(iteration * num_epochs, (iteration + 1) * num_epochs):
            yield from self.dealer.deal(samples.batch, state, epoch)

    def accumulate(
        self,
        minibatch: Sequences,
        last_backward: Callable[[FlatGradients], AbstractContextManager[None]] = nullcontext,  # type: ignore[assignment]
    ) -> None:
        """Fill the gradient buffer with sums over this rank's samples of a minibatch.

        Args:
            minibatch: as the dealer gave it.
            last_backward: makes the context of the last backward pass, from which on gradients are complete.
        """
        self.gradients.zero_()
        spelled_out = are_spelled_out(self.policy, self._autocast)
        chunks = list(self.dealer.chunks(minibatch))
        for number, chunk in enumerate(chunks, start=1):
            beats.enter("update")
            if spelled_out:
                riders = add_gradients_(self.config, self.policy, chunk.batch)
            else:
                with last_backward(self.gradients) if number == len(chunks) else nullcontext():
                    riders = add_gradients_by_autograd_(self.config, self.policy, chunk, self.precision)
            self.gradients.ride_(riders, chunk.batch.advantages.numel())

    def _step(self, skip: torch.Tensor) -> torch.Tensor:
        """Adapt the learning rate, clip, step unless ``skip`` is 1; return the gradient norm before clipping."""
        config = self.config
        self._skip.copy_(skip)
        if config.schedule == "adaptive":
            # Without a number to go by the rate stays as it is, like everything else in a step that is skipped.
            kl = self.gradients.means[RIDERS.index("kl")].masked_fill(skip > 0, torch.nan)
            adapt_learning_rate_(
                self.learning_rate, kl, config.desired_kl, config.min_learning_rate, config.max_learning_rate
            )
        norm = self.gradients.clip_(config.max_grad_norm)
        self.optimizer.step()
        return norm
