"""One training: everything that goes on from one iteration to the next, and how it is saved and taken up again."""

import json
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from lockstep.core import beats
from lockstep.core.interrupts import StopReason
from lockstep.core.rng import stream_seed
from lockstep.core.types import Comm
from lockstep.envs.batch_env import BatchEnv
from lockstep.learn.config import PpoConfig, TrainConfig
from lockstep.learn.observer import NonFiniteError as NonFiniteError
from lockstep.learn.observer import OwnTimes, no_clock, nobody_asks
from lockstep.learn.resuming import (
    incomplete_in_words,
    require_iterations,
    require_like,
    require_num_envs,
    require_num_models,
    require_parts,
    require_settings,
    require_task,
)
from lockstep.learn.torch import checkpoint, sharding
from lockstep.learn.torch.diagnosis import Finding, first_nonfinite
from lockstep.learn.torch.minibatches import Dealer
from lockstep.learn.torch.networks import ActorCritic
from lockstep.learn.torch.ppo import Ppo
from lockstep.learn.torch.reporting import Metrics, OwnIteration, iteration_metrics
from lockstep.learn.torch.rollout import ActionNoise, allocate, collect

_ONE_AT_A_TIME = threading.Lock()  # torch's generator is one for all threads


def make_policy(config: TrainConfig, env: BatchEnv) -> ActorCritic:
    """Return a policy for the env, initialised from the seed: the same on every rank, device and in every dtype."""
    with _ONE_AT_A_TIME, torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed, which would also reseed the caller's CUDA generators for good.
        torch.default_generator.manual_seed(stream_seed(config.seed, "policy"))
        policy = ActorCritic(config.agent_as(PpoConfig), dict(env.task.num_observations), env.task.action_space)
    policy.cast_parameters_(env.dtype)
    return policy.to(env.device)


class Training:
    """Policy, learner, envs and counters of a run on this rank.

    Args:
        config: of the run.
        env: this rank's envs; their global ids follow on those of the rank before.
        comm: the ranks.

    Attributes:
        stop_agreed: why all ranks stop after this iteration, or None.
        save_agreed: whether rank 0's clock asked for a checkpoint of this iteration.
        own_times: what this rank did in this iteration; None before the first.
    """

    def __init__(self, config: TrainConfig, env: BatchEnv, comm: Comm) -> None:
        self.config, self.env, self.comm = config, env, comm
        agent = config.agent_as(PpoConfig)
        self.policy = make_policy(config, env)
        self.total_envs, self._first_env = place_among_envs(env, comm)
        dealer = Dealer(config.seed, env.env_ids, agent.num_mini_batches, self.policy.recurrent, agent.chunk_size)
        self.learner = Ppo(agent, self.policy, comm, dealer, autocast=config.dtype == "bfloat16")
        self.noise = ActionNoise(env, config.seed)
        self.rollout = allocate(agent.num_steps_per_env, env)
        self.memory = self.policy.initial_state(env.num_envs)
        self.iteration = 0
        self.env_steps = 0
        self.wall_s = 0.0  # seconds of training so far, earlier attempts included
        self.stop_agreed: StopReason | None = None
        self.save_agreed = False
        self.own_times: OwnTimes | None = None
        comm.broadcast_(self.replicated_state(), "initial state")

    @property
    def so_far(self) -> Metrics:
        """The counters: iteration, env_steps and wall_s."""
        return {"iteration": self.iteration, "env_steps": self.env_steps, "wall_s": self.wall_s}

    def replicated_state(self) -> dict[str, torch.Tensor]:
        """Return everything that must be the same on every rank, by name; counters as a copy, the rest as it is."""
        counters = torch.tensor([self.iteration, self.env_steps], device=self.env.device)
        return self.learner.replicated_state() | {"counters": counters}

    def iterate(
        self, stop_requested: Callable[[], StopReason | None] = nobody_asks, save_due: Callable[[], bool] = no_clock
    ) -> Metrics:
        """Run one iteration: collect, estimate, update, merge the normalisers; return its metrics.

        Args:
            stop_requested: why this rank should stop, asked at the end of the iteration; ``stop_agreed`` then says what
                all ranks do.
            save_due: whether a checkpoint is due by this rank's clock; ``save_agreed`` then says what rank 0's said.

        Raises:
            NonFiniteError: nothing was changed from the first bad minibatch on.
        """
        self.comm.take_waits()  # those of evaluations and checkpoints, which are no part of an iteration
        beats.at_iteration(self.iteration)
        beats.enter("rollout")
        began = time.perf_counter()
        start = self.memory
        noise = self.noise.draw(self.config.agent.num_steps_per_env)
        after = collect(self.env, self.policy, start, noise, self.rollout, self.learner.precision)
        self._wait_for_device()
        collected = time.perf_counter()
        beats.enter("update")
        samples = self.learner.prepare(self.rollout, self.env.observations["critic"], start)
        result = self.learner.update(samples, start, self.iteration)
        self._wait_for_device()
        waits = self.comm.take_waits()
        wait_s = sum(wait.seconds for wait in waits)
        rollout_s, update_s = collected - began, time.perf_counter() - collected - wait_s
        own = OwnIteration(
            num_steps=self.rollout.rewards.numel(),
            times_s=(rollout_s, update_s, wait_s),
            stop=stop_requested(),
            save_due=save_due(),
        )
        metrics, (self.stop_agreed, self.save_agreed, bad_ranks) = iteration_metrics(self.env, own, result, self.comm)
        waits += self.comm.take_waits()
        self.own_times = OwnTimes({"rollout": rollout_s, "update": update_s}, tuple(waits))
        if bad_ranks:
            found = first_nonfinite(self.learner, self.rollout, samples, start, self.iteration)
            raise NonFiniteError(_first_cause(found, self.comm) or f"a tensor on rank {bad_ranks[0]}")
        self.learner.merge_normalizers(samples)
        self.memory = after._replace(critic=samples.critic_state)
        self.iteration += 1
        self.env_steps += int(metrics.pop("num_steps") or 0)
        beats.at_iteration(self.iteration)
        return {"iteration": self.iteration, "env_steps": self.env_steps} | metrics

    def _wait_for_device(self) -> None:
        if self.env.device.type == "cuda":
            with beats.exchange("device"):  # which may have to wait for the other ranks' gradients
                torch.cuda.synchronize(self.env.device)

    # --- saving and continuing -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return all of the training: tensors and plain values that ``torch.load(weights_only=True)`` takes.

        All ranks call it together; rank 0's has the envs of all ranks, in the order of their global ids.
        """
        envs = sharding.gather(self._env_rows(), self.comm, self.env.device)
        memory = {name: rows.transpose(0, 1).contiguous() for name, rows in envs.pop("memory").items()}
        return {
            "format": checkpoint.FORMAT,
            "ml_framework": "torch",
            "task": self.config.task,
            "config": self.config.model_dump(mode="json"),
            "iteration": self.iteration,
            "env_steps": self.env_steps,
            "wall_s": self.wall_s,
            "num_models": self.env.task.num_models,
            "policy": self.policy.state_dict(),
            "optimizer": self.learner.optimizer.state_dict(),
            "learning_rate": self.learner.learning_rate,
            "env": envs | {"num_steps": self.env.num_steps},
            "memory": memory,
        }

    def failure_dict(self) -> dict[str, Any]:
        """Return ``state_dict`` and the rollout of all ranks' envs."""
        rows = {name: tensor.transpose(0, 1) for name, tensor in self.rollout._asdict().items()}
        rollout = sharding.gather(rows, self.comm, self.env.device)
        return self.state_dict() | {"rollout": {name: whole.transpose(0, 1) for name, whole in rollout.items()}}

    def _env_rows(self) -> sharding.Nest:
        """Return the state of this rank's envs, and what the policy remembers of them, with the env as first axis."""
        rows = {name: value for name, value in self.env.state_dict().items() if name != "num_steps"}
        return rows | {"memory": {name: memory.transpose(0, 1) for name, memory in self.memory._asdict().items()}}

    def require_ready(self) -> None:
        """Do nothing: the learner is ready when it is made."""

    def load_weights(self, saved: Mapping[str, Any] | None, path: object) -> None:
        """Take up the policy and its normalisers alone, from a checkpoint's content.

        Args:
            saved: what rank 0 has read; other ranks get it from there.
            path: where it was read.

        Raises:
            UsageError: of another task, or made with other agent settings.
        """
        self.comm.on_main(lambda: self._load_weights(_content(saved), path), "checkpoint")
        self.comm.broadcast_(self.replicated_state(), "weights")

    def _load_weights(self, saved: Mapping[str, Any], path: object) -> str:
        require_task(saved, self.config.task, path)
        checkpoint.load_strictly(self.policy, saved["policy"], path)
        return ""

    def load_state_dict(self, saved: Mapping[str, Any] | None, path: object) -> None:
        """Continue where ``state_dict`` was taken, on any number of ranks.

        Args:
            saved: what rank 0 has read; other ranks get it from there.
            path: where it was read.

        Raises:
            UsageError: of another task, number of envs or models, or agent settings, or not complete.
        """
        counters = json.loads(self.comm.on_main(lambda: self._load_replicated(_content(saved), path), "checkpoint"))
        self.comm.broadcast_(self.replicated_state(), "checkpoint")
        device = self.env.device
        rows = None
        if saved is not None:
            memory = {name: memory.transpose(0, 1) for name, memory in saved["memory"].items()}
            rows = {name: saved["env"][name] for name in self._env_rows() if name != "memory"} | {"memory": memory}
        envs = sharding.deal(rows, self._env_rows(), self.total_envs, self._first_env, self.comm, device)
        memory = {name: own.to(device) for name, own in envs.pop("memory").items()}
        self.env.load_state_dict(envs | {"num_steps": counters["num_steps"]})
        # Envs that can't be saved have begun new episodes, of which nothing is remembered.
        has_begun = (self.env.episode_length > 0).reshape(-1, 1, 1)
        kept = {name: torch.where(has_begun, own, 0.0).transpose(0, 1).contiguous() for name, own in memory.items()}
        self.memory = self.memory._replace(**kept)
        self.iteration, self.env_steps = counters["iteration"], counters["env_steps"]
        self.wall_s = counters["wall_s"]

    def _load_replicated(self, saved: Mapping[str, Any], path: object) -> str:
        """Check a whole checkpoint and load what all ranks have alike; return the counters as JSON."""
        with incomplete_in_words(path):
            self._load_weights(saved, path)
            self._check(saved, path)
            # A rate that the user has changed is the new one to start from; otherwise the schedule goes on.
            changed = saved["config"]["agent"]["learning_rate"] != self.config.agent.learning_rate
            rate = self.learner.learning_rate.clone() if changed else saved["learning_rate"]
            self.learner.load_optimizer(saved["optimizer"], rate)
            counters = {"iteration": saved["iteration"], "env_steps": saved["env_steps"]}
            counters["wall_s"] = float(saved["wall_s"])
            return json.dumps(counters | {"num_steps": saved["env"]["num_steps"]})

    def _check(self, saved: Mapping[str, Any], path: object) -> None:
        require_parts(saved, ("optimizer", "learning_rate", "env", "memory"), path)
        now = self.config.model_dump(mode="json")
        require_settings(saved["config"], now, ("seed", "dtype", "agent.init_std"), path)
        require_num_models(saved, self.env.task.num_models, path)
        num_envs = saved["env"]["episode_length"].shape[0]
        require_num_envs(num_envs, self.total_envs, path)
        expected = sharding.with_rows(self._env_rows(), num_envs)
        memory = {name: rows.transpose(0, 1) for name, rows in expected.pop("memory").items()}
        require_like(saved["env"], expected, path, "env")
        require_like(saved["memory"], memory, path, "memory")
        require_iterations(saved["iteration"], self.config.max_iterations, path)


def place_among_envs(env: BatchEnv, comm: Comm) -> tuple[int, int]:
    """Return how many envs all ranks have, and the global id of this rank's first one.

    Raises:
        ValueError: the ids of all ranks are not 0, 1, 2, ... in the order of ranks.
    """
    first = int(env.env_ids[0]) if env.num_envs else -1
    table = comm.gather(torch.tensor([env.num_envs, first], device=env.device), "number of envs").tolist()
    total = 0
    place = 0
    for rank, (num_envs, begin) in enumerate(table):
        if num_envs and begin != total:
            raise ValueError(f"rank {rank} has envs from global id {begin} on, not from {total}; see first_env_id")
        if rank == comm.rank:
            place = total
        total += num_envs
    return total, place


def _first_cause(found: Finding | None, comm: Comm) -> str | None:
    """Return the cause that comes first as data flows, of those the ranks have found, and its rank."""
    findings = [json.loads(text) for text in comm.gather_text(json.dumps(found), "diagnosis")]
    causes = [(order, rank, text) for rank, (order, text) in enumerate(each or (None, "") for each in findings) if text]
    if not causes:
        return None
    _, rank, text = min(causes)
    return f"{text} on rank {rank}"


def _content(saved: Mapping[str, Any] | None) -> Mapping[str, Any]:
    if saved is None:
        raise ValueError("rank 0 must be given what it has read of the checkpoint")
    return saved
