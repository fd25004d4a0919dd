"""A training loop of your own that lockstep runs: its envs, run directory, display, checkpoints and launcher.

    lockstep train cartpole_classic --runner own_runner:Runner --env.action_kind discrete
    lockstep train_multigpu cartpole_classic --runner own_runner:Runner --env.action_kind discrete --num_gpus 2

The first word of ``--runner`` is a module of the current folder, or an installed one. The update is that of an actor
and a critic (A2C).
"""

import lockstep  # before torch: this is where a rank is given a GPU of its own

# isort: split

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributions import Categorical

from lockstep.core.types import Comm
from lockstep.distributed import DistributedMixin, moments_of
from lockstep.envs.batch_env import BatchEnv
from lockstep.learn.config import PpoConfig, TrainConfig
from lockstep.learn.torch.gae import generalised_advantages
from lockstep.learn.torch.loop import Observer, Status


class Runner(DistributedMixin):  # a runner that can't use several ranks: distributed_unsupported = "the reason"
    def __init__(self, config: TrainConfig, env: BatchEnv, comm: Comm) -> None:
        self.config, self.env, self.comm = config, env, comm
        num_inputs, num_actions = env.task.num_observations["actor"], env.task.action_space.size
        self.actor = nn.Sequential(nn.Linear(num_inputs, 32), nn.Tanh(), nn.Linear(32, num_actions)).to(env.device)
        self.critic = nn.Sequential(nn.Linear(num_inputs, 32), nn.Tanh(), nn.Linear(32, 1)).to(env.device)
        # lockstep gives every rank rank 0's modules and optimizers: here, and after a load.
        self.optimizer = torch.optim.Adam([*self.actor.parameters(), *self.critic.parameters()], lr=0.01)
        self.iteration = 0

    def train(self, observer: Observer, evaluation_env: BatchEnv | None) -> Status:
        while self.iteration < self.config.max_iterations:
            loss, num_samples = self.loss_of_rollout()
            self.optimizer.zero_grad()
            loss.backward()
            self.average_gradients([self.actor, self.critic], num_samples).require_finite()
            nn.utils.clip_grad_norm_(self.actor.parameters(), 1.0)
            self.optimizer.step()
            self.iteration += 1

            # Sums over the episodes that ended on all ranks since the last time: mean return, length and the like.
            sums = self.comm.gather(self.env.episodes.take(), "episodes").sum(0)
            losses = self.reduce_metrics({"loss/total": (loss.detach() * num_samples, num_samples)})
            observer.record({"iteration": self.iteration, **self.env.summarise(sums.tolist()), **losses})
            stop = self.agree_on_stop(observer.stop_requested)
            last = self.iteration == self.config.max_iterations
            if stop or last or self.iteration % self.config.checkpoints.interval == 0:
                observer.save(self.iteration, self.state_dict())
            if stop and not last:
                return stop
        return "finished"

    def loss_of_rollout(self) -> tuple[torch.Tensor, int]:
        """Return the mean loss over this rank's samples of one rollout, and how many they are."""
        agent = self.config.agent_as(PpoConfig)
        steps = []
        observation = self.env.observations["actor"]
        for _ in range(agent.num_steps_per_env):
            distribution = Categorical(logits=self.actor(observation))
            action = distribution.sample()
            transition = self.env.step(action)
            with torch.no_grad():
                next_value = self.critic(transition.final_observations["actor"]).squeeze(-1)
            value = self.critic(observation).squeeze(-1)
            log_prob = distribution.log_prob(action)
            steps.append((log_prob, value, next_value, transition.reward, transition.terminated, transition.done))
            observation = transition.observations["actor"]
        log_probs, values, next_values, rewards, terminated, done = map(torch.stack, zip(*steps, strict=True))
        advantages = generalised_advantages(
            rewards, values.detach(), next_values, terminated, done, agent.gamma, agent.lam
        )
        moments = self.merge_moments(moments_of(advantages.flatten()))  # over the samples of all ranks
        standardised = ((advantages - moments.mean) / (moments.std() + 1e-6)).to(log_probs)
        loss = -(log_probs * standardised).mean() + 0.5 * (values - values.detach() - advantages).square().mean()
        return loss, log_probs.numel()

    # For --resume; only rank 0 reads the file, every rank is handed its content.

    def state_dict(self) -> dict[str, Any]:
        return {
            "actor": self.actor.state_dict(),
            "critic": self.critic.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "iteration": self.iteration,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.actor.load_state_dict(state["actor"])
        self.critic.load_state_dict(state["critic"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.iteration = state["iteration"]


def main() -> None:
    config = lockstep.make_config(
        "cartpole_classic",
        runner="own_runner:Runner",
        num_envs=128,
        max_iterations=40,
        env={"action_kind": "discrete"},
        log_root="logs/examples",
    )
    lockstep.train(config)


if __name__ == "__main__":
    main()
