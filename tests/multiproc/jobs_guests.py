"""What the ranks of a pool do in the tests of other people's learners in general: a small learner, and its training."""

import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lockstep.core.errors import UsageError
from lockstep.core.types import Comm, Observations, Task
from lockstep.distributed.torch_gradients import average_gradients
from lockstep.distributed.torch_guests import guest_group
from lockstep.envs.batch_env import BatchEnv
from lockstep.learn.config import TrainConfig
from lockstep.learn.observer import NonFiniteError
from lockstep.learn.torch import sharding
from lockstep.learn.torch.guest import GuestTraining
from lockstep.session.make_config import make_config
from lockstep.session.make_env import build_share

LEARNER = "tests.multiproc.jobs_guests:LineLearner"


class LinePolicy(nn.Module):
    """One linear layer."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.num_observations = dict(task.num_observations)
        self.layer = nn.Linear(task.num_observations["actor"], task.action_space.size)

    def initial_memory(self, num_envs: int) -> torch.Tensor:
        return torch.zeros((0, num_envs, 0))

    def most_likely(self, observations: Observations, memory: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layer(observations["actor"]), memory


class LineLearner:
    """Imitates ``action = 1``; as a library would, it reduces a loss by an exchange of its own.

    ``config.library`` says what goes wrong: ``bad_rank`` has a loss that is not finite, ``drifting_rank`` changes a
    parameter that it does not name as its own, ``refusing`` is refused.

    Attributes:
        was_given: names of the parts of the state that it has loaded last, and the steps of its envs by then.
    """

    was_given: tuple[set[str], int]

    def __init__(self, config: TrainConfig, env: BatchEnv, comm: Comm) -> None:
        if "refusing" in config.library:
            raise UsageError("refusing can't be") from config.library["refusing"]
        if comm.world_size > 1:  # as libraries do; the job's group is there, and no such GPU
            dist.init_process_group("nccl", rank=0, world_size=77)
            torch.cuda.set_device(comm.rank)
        self.config, self.env, self.comm = config, env, comm
        self.policy = LinePolicy(env.task)
        self.optimizer = torch.optim.SGD(self.policy.parameters(), lr=config.agent.learning_rate)
        self.seen: list[torch.Tensor] = []
        self.num_updates = 0

    def require_ready(self) -> None:
        pass

    def collect(self) -> None:
        self.seen = []
        for _ in range(self.config.agent.num_steps_per_env):
            self.seen.append(self.env.observations["actor"])
            with torch.no_grad():
                self.env.step(self.policy.layer(self.seen[-1]))

    def update(self) -> dict[str, Any]:
        samples = torch.cat(self.seen)
        loss: torch.Tensor = (self.policy.layer(samples).sub(1.0)).square().sum() / max(len(samples), 1)
        self.optimizer.zero_grad()
        loss.backward()
        average_gradients(self.policy, len(samples), comm=self.comm)
        self.optimizer.step()
        shared = loss.detach().clone()
        if self.comm.world_size > 1:
            dist.all_reduce(shared)
        if self.config.library.get("bad_rank") == self.comm.rank:
            loss = loss * torch.nan
        learning_rate = self.optimizer.param_groups[0]["lr"]
        imitation = loss.detach() if len(samples) else torch.nan
        # What is told beside the losses may be nothing.
        told = {"line/rank": 1.0 * self.comm.rank, "line/nothing": torch.nan}
        self.num_updates += 1
        if self.num_updates > 1 and self.comm.rank == 1:
            told = {"line/late": 3.0, **told}
        return {"imitation": imitation, "kl": 0.5 + self.comm.rank, "learning_rate": learning_rate, **told}

    def merge(self) -> None:
        if self.config.library.get("drifting_rank") == self.comm.rank:
            with torch.no_grad():
                self.policy.layer.bias.add_(1.0)

    def replicated(self) -> dict[str, Any]:
        return {"policy": self.policy, "optimizer": self.optimizer}

    def state_dict(self) -> dict[str, Any]:
        replay = sharding.gather({"seen": torch.stack(self.seen, dim=1)}, self.comm, self.env.device)
        return {"policy": self.policy.state_dict(), "optimizer": self.optimizer.state_dict(), "replay": replay}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.was_given = {*state}, self.env.num_steps
        self.policy.load_state_dict(state["policy"])
        self.optimizer.load_state_dict(state["optimizer"])

    def retune(self, learning_rate: float) -> None:
        self.optimizer.param_groups[0]["lr"] = learning_rate

    def load_weights(self, state: Mapping[str, Any]) -> None:
        self.was_given = {*state}, self.env.num_steps
        self.policy.load_state_dict(state["policy"])


def training_on(comm: Comm, **settings: Any) -> GuestTraining:
    """Return a training of two envs on each rank."""
    config = make_config("cartpole_classic", device="cpu", agent={"num_mini_batches": 1, "num_steps_per_env": 4})
    config = config.model_copy(update={"num_envs": 2, "rl_library": "rsl_rl"} | settings)
    env = build_share(config, config.envs_by_rank(comm.world_size), comm.rank)
    return GuestTraining(LEARNER, config, env, comm)


def iterate(comm: Comm, num_iterations: int, **settings: Any) -> dict[str, Any]:
    """Return what iterations give, and what the training ends with."""
    training = training_on(comm, **settings)
    first = training.policy.layer.weight.tolist()  # type: ignore[attr-defined]
    try:
        metrics = [training.iterate() for _ in range(num_iterations)]
    except NonFiniteError as error:
        return {"error": str(error), "iteration": training.iteration}
    assert training.own_times is not None
    replicated = {name: tensor.tolist() for name, tensor in training.replicated_state().items()}
    waits = [(wait.tag, wait.num_bytes) for wait in training.own_times.waits]
    return {"metrics": metrics, "first": first, "replicated": replicated, "waits": waits}


def go_on(comm: Comm, content: dict[str, Any] | None) -> dict[str, Any]:
    """Return what a training is that rank 0 alone has read, and after one more iteration."""
    training = training_on(comm)
    training.load_state_dict(content if comm.rank == 0 else None, "model_2.pt")
    loaded = {name: tensor.tolist() for name, tensor in training.replicated_state().items()}
    observations = training.env.observations["actor"].tolist()
    return {"loaded": loaded, "observations": observations, "metrics": training.iterate()}


def begin_with(comm: Comm, content: dict[str, Any] | None) -> tuple[list[str], int]:
    """Return what a new training is given of the state of a checkpoint that rank 0 alone has read, and its bytes."""
    training = training_on(comm)
    comm.take_waits()
    training.load_weights(content if comm.rank == 0 else None, "model_2.pt")
    sent = sum(wait.num_bytes for wait in comm.take_waits())
    return sorted(training.learner.was_given[0]), sent  # type: ignore[attr-defined]


def content_after(comm: Comm, num_iterations: int) -> dict[str, Any]:
    """Return a checkpoint's content."""
    training = training_on(comm)
    for _ in range(num_iterations):
        training.iterate()
    return training.state_dict()


def exchange_in_guest_group(comm: Comm) -> dict[str, Any]:
    """Return what is counted of exchanges that other people's code makes, and whether torch is as it was afterwards."""
    before = (dist.init_process_group, dist.all_reduce, torch.cuda.set_device)
    comm.gather(torch.zeros(1), "both are here")
    comm.take_waits()
    with guest_group(comm):
        dist.init_process_group("nccl")
        numbers = torch.full((3,), float(comm.rank + 1))
        time.sleep(0.2 * comm.rank)
        dist.all_reduce(numbers)
        dist.broadcast(numbers, src=0)
        work = dist.all_reduce(torch.zeros(2), async_op=True)
        work.wait()
    waits = comm.take_waits()
    return {
        "sum": numbers.tolist(),
        "waits": [(wait.tag, wait.num_bytes) for wait in waits],
        "waited_s": waits[0].seconds,
        "is_as_before": before == (dist.init_process_group, dist.all_reduce, torch.cuda.set_device),
        "backend": dist.get_backend(),
    }


def iterate_with(comm: Comm, settings: dict[str, Any]) -> dict[str, Any]:
    """Return what ``iterate`` does with settings changed."""
    return iterate(comm, 1, **settings)


class _Nobody:
    """An observer that keeps nothing."""

    stop_requested = None
    save_due = False

    def record(self, metrics: Any) -> None:
        pass

    def save(self, iteration: int, content: Any) -> None:
        pass

    def save_failure(self, iteration: int, content: Any) -> None:
        assert {"state", "env"} <= content.keys()


def train_drifting(comm: Comm) -> str:
    """Train with a rank that drifts away; the sentinel looks after each iteration."""
    training = training_on(comm, library={"drifting_rank": 1}, sentinel_interval=1)
    return training.train(_Nobody(), None)


def train_until_it_fails(comm: Comm) -> None:
    """Train where the first loss is not finite."""
    training_on(comm, library={"bad_rank": 0}).train(_Nobody(), None)
