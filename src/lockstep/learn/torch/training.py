"""One training: everything that goes on from one iteration to the next, and how it is saved and taken up again."""

import time
from collections.abc import Mapping
from typing import Any

import torch

from lockstep.core.errors import UsageError
from lockstep.core.rng import stream_seed
from lockstep.core.types import Comm
from lockstep.envs.torch_env import TorchEnv
from lockstep.learn.config import TrainConfig
from lockstep.learn.torch import checkpoint
from lockstep.learn.torch.diagnosis import first_nonfinite
from lockstep.learn.torch.minibatches import Dealer
from lockstep.learn.torch.networks import ActorCritic
from lockstep.learn.torch.ppo import Ppo
from lockstep.learn.torch.reporting import Metrics, iteration_metrics
from lockstep.learn.torch.rollout import ActionNoise, allocate, collect


class NonFiniteError(Exception):
    """A tensor was not finite; the message names it."""


def make_policy(config: TrainConfig, env: TorchEnv) -> ActorCritic:
    """Return a policy for the env, initialised from the seed: the same on every rank, device and in every dtype."""
    with torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed, which would also reseed the caller's CUDA generators for good.
        torch.default_generator.manual_seed(stream_seed(config.seed, "policy"))
        policy = ActorCritic(config.agent, dict(env.task.num_observations), env.task.action_space)
    policy.cast_parameters_(env.dtype)
    return policy.to(env.device)


class Training:
    """Policy, learner, envs and counters of a run on this rank.

    Args:
        config: of the run.
        env: this rank's envs.
        comm: the ranks.
    """

    def __init__(self, config: TrainConfig, env: TorchEnv, comm: Comm) -> None:
        self.config, self.env, self.comm = config, env, comm
        agent = config.agent
        self.policy = make_policy(config, env)
        comm.broadcast_(self.policy.state_dict())
        dealer = Dealer(config.seed, env.env_ids, agent.num_mini_batches, self.policy.recurrent, agent.chunk_size)
        self.learner = Ppo(agent, self.policy, comm, dealer, autocast=config.dtype == "bfloat16")
        self.noise = ActionNoise(env, config.seed)
        self.rollout = allocate(agent.num_steps_per_env, env)
        self.memory = self.policy.initial_state(env.num_envs)
        self.iteration = 0
        self.env_steps = 0
        self.wall_s = 0.0  # seconds of training so far, earlier attempts included

    @property
    def so_far(self) -> Metrics:
        """The counters: iteration, env_steps and wall_s."""
        return {"iteration": self.iteration, "env_steps": self.env_steps, "wall_s": self.wall_s}

    def iterate(self) -> Metrics:
        """Run one iteration: collect, estimate, update, merge the normalisers; return its metrics.

        Raises:
            NonFiniteError: nothing was changed from the first bad minibatch on.
        """
        began = time.perf_counter()
        start = self.memory
        noise = self.noise.draw(self.config.agent.num_steps_per_env)
        after = collect(self.env, self.policy, start, noise, self.rollout, self.learner.precision)
        self._wait_for_device()
        collected = time.perf_counter()
        samples = self.learner.prepare(self.rollout, self.env.observations["critic"], start)
        result = self.learner.update(samples, start, self.iteration)
        self._wait_for_device()
        times_s = (collected - began, time.perf_counter() - collected, 0.0)
        num_steps = self.rollout.rewards.numel()
        metrics, bad_ranks = iteration_metrics(self.env, num_steps, times_s, result, self.comm)
        if bad_ranks:
            found = first_nonfinite(self.learner, self.rollout, samples, start, self.iteration)
            raise NonFiniteError(found or f"a tensor on rank {bad_ranks[0]}")
        self.learner.merge_normalizers(samples)
        self.memory = after._replace(critic=samples.critic_state)
        self.iteration += 1
        self.env_steps += int(metrics.pop("num_steps") or 0)
        return {"iteration": self.iteration, "env_steps": self.env_steps} | metrics

    def _wait_for_device(self) -> None:
        if self.env.device.type == "cuda":
            torch.cuda.synchronize(self.env.device)

    # --- saving and continuing -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return all of the training: tensors and plain values that ``torch.load(weights_only=True)`` takes."""
        return {
            "format": checkpoint.FORMAT,
            "ml_framework": "torch",
            "task": self.config.task,
            "config": self.config.model_dump(mode="json"),
            "iteration": self.iteration,
            "env_steps": self.env_steps,
            "wall_s": self.wall_s,
            "policy": self.policy.state_dict(),
            "optimizer": self.learner.optimizer.state_dict(),
            "learning_rate": self.learner.learning_rate,
            "env": self.env.state_dict(),
            "memory": self.memory._asdict(),
        }

    def load_weights(self, saved: Mapping[str, Any], path: object) -> None:
        """Take up the policy and its normalisers alone, from a checkpoint's content.

        Raises:
            UsageError: of another task, or made with other agent settings.
        """
        if saved["task"] != self.config.task:
            raise UsageError(f"checkpoint {path} is of task '{saved['task']}', not '{self.config.task}'")
        checkpoint.load_strictly(self.policy, saved["policy"], path)

    def load_state_dict(self, saved: Mapping[str, Any], path: object) -> None:
        """Continue where ``state_dict`` was taken.

        Raises:
            UsageError: of another task, number of envs or agent settings, or not complete.
        """
        try:
            self._load(saved, path)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            raise UsageError(f"checkpoint {path} is incomplete or was changed ({reason}); use another one") from error

    def _load(self, saved: Mapping[str, Any], path: object) -> None:
        self.load_weights(saved, path)
        missing = [name for name in ("optimizer", "learning_rate", "env", "memory") if name not in saved]
        if missing:
            raise UsageError(f"checkpoint {path} has no {missing[0]}, so a run can't resume from it; use --checkpoint")
        before, now = saved["config"], self.config.model_dump(mode="json")
        for name in ("seed", "dtype", "agent.init_std"):
            *group, field = name.split(".")
            then, asked = ((config[group[0]] if group else config)[field] for config in (before, now))
            if then != asked:
                raise UsageError(
                    f"checkpoint {path} has {name} {then}, not {asked}; a run resumes with the {name} it had (to "
                    "change it, start a new run with --checkpoint)"
                )
        num_envs = saved["env"]["episode_length"].shape[0]
        if num_envs != self.env.num_envs:
            raise UsageError(
                f"checkpoint {path} has {num_envs} envs, not {self.env.num_envs}; a run resumes with as many as it "
                "had (to change them, start a new run with --checkpoint)"
            )
        for name, expected in (("env", self.env.state_dict()), ("memory", self.memory._asdict())):
            checkpoint.check_like(saved[name], expected, path, name)
        # A rate that the user has changed is the new one to start from; otherwise the schedule goes on.
        changed = before["agent"]["learning_rate"] != now["agent"]["learning_rate"]
        rate = self.learner.learning_rate.clone() if changed else saved["learning_rate"]
        self.learner.load_optimizer(saved["optimizer"], rate)
        self.env.load_state_dict(saved["env"])
        device = self.env.device
        self.memory = self.memory._replace(**{name: memory.to(device) for name, memory in saved["memory"].items()})
        if saved["iteration"] > self.config.max_iterations:
            raise UsageError(
                f"checkpoint {path} is of iteration {saved['iteration']}, past max_iterations "
                f"{self.config.max_iterations}, which is the total; use a larger --max_iterations"
            )
        self.iteration, self.env_steps = saved["iteration"], saved["env_steps"]
        self.wall_s = float(saved["wall_s"])
